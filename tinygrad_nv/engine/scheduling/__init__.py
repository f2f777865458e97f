"""Requests, and which of their tokens each step computes.

  batch.py      What a step computes and what comes back: the words between scheduling and the device
  request.py    A request, and the state of its sequences while they wait and run
  scheduler.py  Which sequences the next step computes, and how much of each
"""
