"""Whisper (arXiv 2212.04356): speech to tokens, in ordinary tinygrad code.

Read in this order:
  config.py    config.json of a Hugging Face directory, as one frozen `WhisperConfig`
  features.py  samples to the log-mel spectrogram that the encoder reads
  network.py   the encoder, and the decoder over pages of keys and values
  weights.py   which tensors a checkpoint must hold, and where in the network each is stored
"""
