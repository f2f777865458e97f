"""GGUF, llama.cpp's files: a model's metadata, tokenizer and tensors in one.

  file.py     the header: metadata and where tensors lie, checked before anything is read; models in parts
  blocks.py   blocks of a tensor as the buffers of types.py

Source: docs/gguf.md and ggml-quants of https://github.com/ggml-org/ggml
"""
