"""Requests and the scheduler.

  scheduler_output.py  The interface between scheduler and model runner: a step, and its output
  request.py           A request, and the state of its sequences while they wait and run
  scheduler.py         Which sequences the next step computes, and how many tokens of each
"""
