"""Attention on a CPU, forward and backward.

  flash.py      forward: softmax(score(q kᵀ)) v by tiles of queries over blocks of keys
  blocks.py     packing of keys and values, and the matmuls of a few rows with packed blocks
  score.py      scores, masks, softmax and dropout, in C
  documents.py  documents that lie one after the other, each an attention of its own
  dropout.py    which weights are dropped (tile/attention/dropout.py), in C
  backward/     dq, dk and dv
"""
