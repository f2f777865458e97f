"""Bundles: a model, or a function of Tensors, in one file that runs without a compiler (docs/bundles.md).

  container.py   the file: header, manifest, parts, hashes; read and written
  manifest.py    the manifest, and what is checked of one
  signing.py     Ed25519 signatures
  objects.py     object files of a CPU's kernels, and what is checked of one
  plan.py        steps and programs as JSON and machine code

engine/bundled/ makes bundles of models and functions, and runs them.
"""
