"""Speculative decoding: draft tokens that a step verifies all at once.

  draft_model.py  A smaller model that guesses the next tokens (speculation.py's proposer)
  speculation.py  Guesses of the next tokens, which a step verifies all at once
"""
