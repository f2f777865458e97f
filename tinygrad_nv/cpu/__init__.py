"""The CPU as a target: the specs of tile/ as C kernels for the compiler that the project finds.

Read in this order: isa.py (instruction sets, and which this processor has), machine.py (threads.py, caches),
kernel.py (what a kernel is, and its parameters), vector.h (vectors in C), expression.py (epilogues and
scores), schedule.py (how a spec is computed). Then the families, named as in tile/: each template takes a
spec and a `CPUSchedule` and returns a `CPUKernel`.

  gemm/       gemv/ (few rows), blocked/, amx.py; choose.py finds the schedule, tune.py a faster one
  attention/  flash.py and backward/; dropout.py is what both ways draw
  decode/, kv_append/, norm/, sampling/, embedding/

measure.py times the machine for predictions. patterns/ make the calls, as they do for GPUs.
"""
