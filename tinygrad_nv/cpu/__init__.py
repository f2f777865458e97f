"""The CPU as a target: the specs of tile/ as C kernels for the compiler that the project finds.

Read in this order: isa.py (instruction sets, and which this processor has), machine.py (threads, caches),
kernel.py (what a kernel is, and its parameters), vector.h (vectors in C), expression.py (epilogues and
scores), schedule.py (how a spec is computed). Then the templates: each takes a spec and a `CPUSchedule` and
returns a `CPUKernel`, and its other files bear its name.

    products       gemv.py (few rows), gemm.py, amx.py: templates.py; choose.py finds the schedule, tune.py a
                   faster one, which database.py keeps
    attention      flash.py, flash_backward.py, decode.py; kv_append.py; dropout.py is what both ways draw
    by rows        norm.py (RMSNorm, softmax, argmax), embedding.py
    sampling       threshold.py, choice.py, count.py

measure.py times the machine for predictions. patterns/ make the calls, as they do for GPUs.
"""
