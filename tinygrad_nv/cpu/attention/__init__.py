"""Attention on a CPU, forward and backward.

  flash.py      forward: softmax(score(q kᵀ)) v by tiles of queries over blocks of keys
  blocks.py     packing of keys and values, and the matmuls of a few rows with packed blocks
  score.py      scores, masks, softmax, dropout and documents, in C
  backward/     dq, dk and dv
"""
