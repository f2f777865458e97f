"""The CPU as a target: the specs of tile/ as C kernels for the compiler that the project finds.

Read in this order: isa.py (instruction sets, and which this processor has), machine.py (threads, caches),
kernel.py (what a kernel is, and its parameters), vector.h (vectors in C), expression.py (epilogues and
scores), schedule.py (how a spec is computed), then the templates: each takes a spec and a `CPUSchedule` and
returns a `CPUKernel`. choose.py finds the schedule. patterns/ make the calls, as they do for GPUs.
"""
