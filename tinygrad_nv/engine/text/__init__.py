"""Tokens and text.

  tokenizer.py    text to token ids and back, and chat templates
  token_bytes.py  the bytes of each token of a vocabulary
  detokenizer.py  token ids to text while they arrive, and stop strings
  processor.py    `OutputProcessor`: the chosen tokens of a request become text
"""
