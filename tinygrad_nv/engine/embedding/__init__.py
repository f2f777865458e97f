"""Embedding models: texts in, vectors out. No cache, no sampling: a text is one step.

  embedder.py     `Embedder`: a loaded model; texts to tokens to vectors
  batching.py     `EmbeddingEngine`: batches of what waits, in a thread of its own
"""
