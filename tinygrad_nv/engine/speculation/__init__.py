"""Speculative decoding: draft tokens, verified in one step.

  draft_model.py  Proposer: a smaller draft model
  ngram.py        Proposer: n-gram prompt lookup; and the `--speculative` option
"""
