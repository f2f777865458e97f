"""Structured output: JSON schemas, regular expressions, grammars, and their token masks.

  structured.py     what is asked: a JSON schema, a regular expression, a choice, or a grammar
  matcher.py        which tokens may come next, for each sequence
  masks.py          token masks: bit i % 32 of word i // 32 is token i
  grammar_check.py  compiles a grammar in a process with limits of time and memory
"""
