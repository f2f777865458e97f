"""Architectures and their weight maps, in ordinary tinygrad code.

Read in this order:
  config.py     config.json of a Hugging Face directory, checked, as one frozen `ModelConfig`
  families/     what differs from LLaMA, a small file for each family
  multimodal.py the language model of a directory that reads images, too
  qwen_vl/      what reads them: the vision tower of Qwen2.5-VL
  fields.py, layer_config.py  keys of config.json, what differs in layers
  rope.py       rotary frequencies: default, linear, dynamic, llama3, yarn, longrope; their parameters
  llama.py      the network; layers.py, attention.py, dense.py have its parts
  paged.py      a step of many sequences over KV cache pages
  weights.py    which tensors a checkpoint must hold, and where in the network each is stored
  quantised/    quantised and sparse layers among them, and their repacked files
  checkpoint.py the files: safetensors (single or sharded) and pytorch_model.bin
  peft.py       adapters (LoRA) as PEFT saves them; lora.py has them on the device
  pickles.py    the tensors of a pytorch_model.bin, without running the pickle
  gguf/         GGUF files: metadata as config.json, tensors by Hugging Face names
  encoder.py    encoders of texts; encoder_config.py and encoder_weights.py: their fields, their tensors
  embedding_model.py  models of one result for a text; pooling.py, classifier.py: what follows the network
  parallel.py   what one rank has of a network; parts.py: parts of a checkpoint's tensors
  whisper/      speech to text
  diffusion/    Stable Diffusion
  tales/        the bundled model, and its training data and code
"""
