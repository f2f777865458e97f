"""Meshes: devices with named axes, tensors whose dimensions have names, and which axis cuts which dimension.

  layout.py     the rules of a layout, and how they cut a tensor
  mesh.py       `mesh(…)`: groups by axis, placing tensors, `pmap`; tables of tensors and collectives
  steps.py      functions by axis, joined with `>>`: map, reduce, scan, collectives, pipelines
"""
from tinygrad_nv.dist.mesh.layout import Placement
from tinygrad_nv.dist.mesh.mesh import Mesh, current, mesh, pmap
from tinygrad_nv.dist.mesh.steps import MeshFunction

__all__ = ["Mesh", "MeshFunction", "Placement", "current", "mesh", "pmap"]
