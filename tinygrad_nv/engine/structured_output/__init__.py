"""Answers of a given form: schemas, regular expressions, grammars, and the token masks they allow.

  grammar_check.py  Tells whether a grammar compiles in a bounded time, in a process that can be ended
  masks.py          Which tokens may be chosen, packed: bit i % 32 of word i // 32 for token i, as …
  matcher.py        Structured answers: which tokens a form allows next
  structured.py     What form an answer has: a JSON schema, a regular expression, one of several texts, or …
"""
