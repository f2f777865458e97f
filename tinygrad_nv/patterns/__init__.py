"""Subgraphs to kernels of ours, in the rewrites that hooks.py calls before kernels are split.

  index.py        where an element of a tensor lies in the memory it is a view of
  contraction.py  sums of products, found by their indices: M, N, K, batch; operands, copied where that pays
  epilogue.py     what follows a sum, as an expression that its kernel computes
  gemm.py         the rewrite "gemm": a contraction and its epilogue to a spec, a schedule and a call
  named.py        functions known by name, whose bodies are their references
    paged.py        attention over keys and values in pages; kv_append.py: new ones into pages. *_body.py are
                  their references, *_lower.py make kernels; paged_check.py looks at tables of pages
    fp8_attention.py  attention of 8 bits with scales
    embedding.py    rows of a table by number
    varlen.py       attention of sequences that lie one after the other
    attention_named.py  attention that is trained: the forward pass, and its gradient as another function;
                  attention_operands.py: what users give; attention_lower*.py make kernels
  strides.py      where an argument of such a function lies
  program.py      a kernel in tinygrad's graph, with the facts that explain() tells of it; settle.py: what
                  is left to do before it is compiled; rewriting.py: graphs with such kernels in them

  registered.py   the rewrites in their order, and what each needs to be in a graph

Read in that order. What a pattern does not take stays as tinygrad would have run it, and `program.miss` says
why.
"""
