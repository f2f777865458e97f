"""Serving of low-rank adapters (LoRA): many on one base model, mixed in a batch.

Read in this order:
  request.py   `LoRARequest`: an adapter by name, number and directory; `LoRAConfig`: limits
  peft.py      a PEFT directory: adapter_config.json and adapter_model.safetensors, checked
  cache.py     adapters in host memory, least recently used first out
  slots.py     which adapters are on the device, for running sequences
models/lora.py has what is on the device.
"""
