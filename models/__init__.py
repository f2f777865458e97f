"""Architectures and their weight maps, in ordinary tinygrad code.

Read in this order:
  config.py     config.json of a Hugging Face directory, checked, as one frozen `ModelConfig`
  rope.py       rotary frequencies: default, linear, dynamic, llama3, yarn
  llama.py      the LLaMA family as one network: Llama, Mistral, Qwen2, Qwen3, Gemma
  weights.py    which tensors a directory holds, and where in the network each belongs
  checkpoint.py the files: safetensors (single or sharded) and pytorch_model.bin
  pickles.py    the tensors of a pytorch_model.bin, without running what is pickled in it
  tales/        the model in the box and everything that makes it
"""
