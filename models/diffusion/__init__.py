"""Stable Diffusion 1.5, 2 and XL, from directories as diffusers writes them.

Read in this order:
  config.py      config.json of the text encoders, the UNet and the VAE, checked
  layers.py      convolutions, norms and linear layers of channels-last images
  clip.py        the text encoders
  blocks.py      blocks of the UNet and the VAE; transformer.py has those with cross-attention
  unet.py, vae.py  the networks
  weights.py     tensors of a directory to parameters
  schedulers.py  DDIM, Euler and DPM++ 2M as coefficients of each step
  noise.py       initial latents of a seed
  tokenizer.py   prompts to the 77 tokens that text encoders read
  pipeline.py    all of it: prompt to image; png.py writes files
"""
