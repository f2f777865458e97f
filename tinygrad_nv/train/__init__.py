"""Training: what `tinygrad-nv train` is made of.

  files.py, tensor_files.py   files that are whole or not there; safetensors files written from memory
  checkpoints/  checkpoints of a training run: written beside the steps, verified, resumed from
  export/       trained models as Hugging Face directories, adapters as PEFT directories
"""
