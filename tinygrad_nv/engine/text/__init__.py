"""Tokens and text: tokenizer, chat templates, detokenizer, stop strings.

  detokenizer.py  Token ids to text while they arrive
  processor.py    `OutputProcessor`: a request's chosen tokens become text
  token_bytes.py  The bytes that each token of a vocabulary stands for
  tokenizer.py    Text to ids and back, and chat templates
"""
