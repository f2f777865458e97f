"""Serving of low-rank adapters (LoRA): many on one base model, mixed in a batch.

Read in this order:
  request.py   `LoRARequest`: an adapter by name, number and directory; `LoRAConfig`: limits
  serving.py   adapters in host memory, least recently used first out
  slots.py     which adapters are on the device, for running sequences
models/peft.py reads an adapter's directory, models/lora.py has what is on the device.
"""
