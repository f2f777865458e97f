"""Subgraphs to kernels of ours, in the rewrites that hooks/ calls before kernels are split.

A folder a family: gemm/ attention/ decode/ norm/ sampling/ embedding/ kv_append/. In each, match.py finds it
in a graph; named.py is a function known by name, whose reference is plain tinygrad (*reference.py) and whose
kernel is made by *lower.py. What families share is here. Read in this order:

  index.py        where an element of a tensor lies in the memory it is a view of
  contraction.py  sums of products, found by their indices: M, N, K, batch; operands, copied where that pays
  epilogue.py     what follows a sum, as an expression that its kernel computes
  named.py        functions known by name; strides.py: where an argument of one lies
  positions.py    values that a graph computes from where an element stands; values.py: at points
  program.py      a kernel in tinygrad's graph, with the facts that explain() tells of it; finalize.py: what
                  is left to do before it is compiled; rewriting.py: graphs with such kernels in them
  building.py     kernels that do not build: tinygrad's own lowering runs in their place
  target.py       what the kernels of a device are made for
  stable.py       derivatives in a form that holds for large inputs
  registered.py   the rewrites in their order, and what each needs to be in a graph

Then gemm/match.py. What a pattern does not take stays as tinygrad would have run it, and `program.miss` says
why.
"""
