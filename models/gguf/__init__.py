"""GGUF files as models: what their metadata mean in terms of config.json, and their tensors under Hugging
Face's names.

Protocol: `config_of(file)` is what config.json would be, for `config.parse_config`; its quantization_config
has the types of blocks (quant/readers/gguf.py). `list_tensors(file)` are the tensors as a checkpoint lists
them, `elements` reads some of one.

  architecture.py    the record of an architecture of llama.cpp, a file's metadata, rope scaling
  architectures.py   the architectures that are read
  config.py          metadata as fields of config.json
  tensors.py         tensors by Hugging Face's names, with what llama.cpp's converter changes undone

Source: docs/gguf.md of https://github.com/ggml-org/ggml, the converter and src/models of llama.cpp
"""
from .config import config_of
from .tensors import StoredTensor, elements, hugging_face_name, list_tensors

__all__ = ["StoredTensor", "config_of", "elements", "hugging_face_name", "list_tensors"]
