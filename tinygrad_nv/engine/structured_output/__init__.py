"""Structured output: JSON schemas, regular expressions and grammars, and the token masks they allow.

  schema.py         JSON schemas, simplified to keywords that constrain something
  grammar_check.py  Compiles a grammar in a subprocess with time and memory limits
  token_masks.py    Token masks that exclude end tokens until min_tokens
  matcher.py        Compiled grammars, and the token masks of a sequence
  token_rules.py    Allowed tokens and bad words, beside a grammar
  params.py         a JSON schema, regular expression, choice, grammar or JSON object, checked
"""
