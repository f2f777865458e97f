"""Structured output: JSON schemas, regular expressions and grammars, and the token masks they allow.

  schema.py         JSON schemas, simplified to keywords that constrain something
  grammar_check.py  Compiles a grammar in a subprocess with time and memory limits
  matcher.py        Compiled grammars, and the token masks of a sequence
  matchers.py       The matcher of a request; allowed tokens and bad words, beside a grammar
  params.py         a JSON schema, regular expression, choice, grammar or JSON object, checked
"""
