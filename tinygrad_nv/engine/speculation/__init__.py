"""Speculative decoding: draft tokens that one step verifies.

  speculation.py  proposes draft tokens, by n-grams or a draft model, and accepts the correct ones
  draft_model.py  the proposer that runs a smaller model
"""
