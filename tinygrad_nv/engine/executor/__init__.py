"""A model that several ranks have together: rank 0 schedules, all compute.

  plan.py       what each rank loads
  followers.py  rank 0's side: its own ranks, and what it tells them
  follower.py   the other side: a process that does as rank 0 does

Loaded only where a parallel size is above 1.
"""
