"""The vision part of Qwen2.5-VL (arXiv 2502.13923): images to rows of the language model's embedding.

  config.py   `VisionConfig` and `ImageConfig`, of config.json and preprocessor_config.json
  images.py   An image as patches: sizes, resampling, normalisation; windows, and positions of tokens
  tower.py    `VisionTower`, the network
  weights.py  Its tensors in a checkpoint
"""
