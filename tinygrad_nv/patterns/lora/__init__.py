"""LoRA: the terms that adapters add to a linear layer.

  named.py  `lora_added`, made of two functions known by name: shrink and expand
"""
