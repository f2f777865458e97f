"""Architectures and their weight maps, in ordinary tinygrad code.

Read in this order:
  config.py     config.json of a Hugging Face directory, checked, as one frozen `ModelConfig`
  rope.py       rotary embedding: default, linear, dynamic, llama3, yarn
  llama.py      the LLaMA family as one network: Llama, Mistral, Qwen2, Qwen3, Gemma
  paged.py      its steps over paged KV caches
  weights.py    the tensors of a directory, and their places in the network
  checkpoint.py the files: safetensors (single or sharded) and pytorch_model.bin
  pickles.py    the tensors of a pytorch_model.bin, without running pickled code
  tales/        the model that comes with the package, and everything that makes it
"""
