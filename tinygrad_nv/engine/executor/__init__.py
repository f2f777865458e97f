"""A model that several ranks have: together (tensor and pipeline parallel), or in replicas (data parallel).

  plan.py           what each rank loads
  connections.py    how ranks are started, and connected
  ranks.py          all of them, as rank 0 has them
  followers.py      the side of a rank that leads a replica: what it tells the others
  follower.py       their side: a process that does as it is told
  replicas.py       rank 0's side of other replicas: which one answers a request
  replica.py        their side: an engine of its own

Loaded only where a parallel size is above 1, but for plan.py.
"""
