"""Matching: subgraphs of tinygrad's graph become kernels of this package.

Each family is a folder: gemm/ attention/ decode/ norm/ kv_append/ cross_entropy/ grouped_gemm/ quant_gemm/
router/ scaled_gemm/; or a module where it is one file: column_sum.py conv.py embedding.py lora.py
optimizer.py quant_grouped.py rope.py sampling.py sparse_gemm.py. match.py finds it in a graph; named.py is a
function known by name, whose reference implementation is plain tinygrad (*reference.py) and whose kernel
comes from *lower.py; a module has all of it. What families share is here. Read in this order:

  index.py        index space: where an element of a tensor lies in memory
  contraction.py  matmuls, found by their indices: M, N, K, batch; operands, copied where that pays
  epilogue.py     the operations after a sum, as an expression for its kernel
  named.py        named functions; strides.py: where their arguments lie; named_matmul.py: their matmuls
  positions.py    values that depend on the position of an element; values.py evaluates nodes at points
  program.py      a kernel in tinygrad's graph, with the facts that explain() shows, prepared for
                  compilation; rewriting.py handles graphs that contain such kernels
  building.py     a kernel that does not build: tinygrad's own lowering runs in its place
  target.py       what the kernels of a device are compiled for
  dropout.py      elements dropped by a counter
  stable.py       derivatives in a form that holds for large inputs
  registered.py   the rewrites in their order, and the ops that each needs

Then gemm/match.py. What is not matched runs as tinygrad would have run it, and `program.miss` records why.
"""
