"""The router of a mixture of experts: which experts a token gets, and in which order tokens are computed.

  spec.py       what is computed
  reference.py  the same in plain tinygrad
  choice.py     a token's experts and weights, by a warp
  kernel.py     the kernel of few tokens, and both of many
  templates.py  its record
"""
