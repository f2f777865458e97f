"""Trained models as directories that transformers, PEFT and vLLM load.

Read in this order:
  checkpoint_tensors.py  the network's tensors by the names and in the layout of the family's checkpoints
  pretrained.py          `save_pretrained`: a Hugging Face directory
  adapter.py             `save_adapter`, `load_adapter`: a PEFT directory
"""
from tinygrad_nv.train.export.adapter import LoadedAdapter, load_adapter, save_adapter
from tinygrad_nv.train.export.pretrained import save_pretrained

__all__ = ["LoadedAdapter", "load_adapter", "save_adapter", "save_pretrained"]
