"""The router of a mixture of experts: which experts a token gets, and in which order tokens are computed.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
  plan.py       threads, tokens of a CTA, and what has no kernel
  choice.py     a token's experts and weights, by a warp
  order.py      counts, offsets
  kernel.py     the kernel of few tokens, and both of many
  templates.py  its record
"""
