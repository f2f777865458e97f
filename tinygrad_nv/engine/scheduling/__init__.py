"""Requests, and which of their tokens each step computes.

  request.py    a request, and the state of its sequences
  batch.py      a step and its result, as data
  scheduler.py  which sequences the next step computes, how many tokens of each, and preemption
"""
