"""The CPU as a target: the specs of tile/ as C kernels.

Read in this order: isa.py (instruction sets, and which this processor has), target.py (instruction set,
threads, caches), kernel.py (a finished kernel and its parameters), vector.h (vectors in C), expression.py
(epilogues and scores in C), template.py (schedules, and a template's record). Then the families, named as in
tile/, each a module, or a folder with its templates.py: a template takes a spec and its own schedule and
returns a `CPUKernel`.

  gemm/       gemv/ (few rows), blocked/, amx.py; templates.py finds the schedule, tune.py a faster one
  attention/  flash.py and backward/
  decode/     attention of few queries over a cache
  sampling/   filters, choices and counts of tokens
  embedding   rows of a table, and the sums of its gradient
  conv        the blocked GEMM, whose left operand is packed from images
  quant_gemm/ matmuls with a quantised matrix: as stored, and in tiles
  lora/       the terms that adapters add to a linear layer
  grouped_gemm/  rows times the matrix of their group
  quant_grouped/  the same with quantised matrices
  language/   programs of the tile language; programs.py: templates that are such

measure.py measures the rates of this machine, for predictions. patterns/ make the calls, as they do for
GPUs.
"""
