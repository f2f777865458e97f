"""Meshes: devices with named axes, tensors whose dimensions have names, and which axis cuts which dimension.

  layout.py     what a layout says of a tensor, and what cannot be
  mesh.py       `mesh(…)`: groups by axis, placing tensors, `pmap`
  steps.py      map, reduce, scan, collectives and pipelines by axis, to put one behind the other
  describe.py   which tensor is where, bytes a device, collectives a step
"""
from tinygrad_nv.dist.mesh.layout import Placement
from tinygrad_nv.dist.mesh.mesh import Mesh, current, mesh, pmap
from tinygrad_nv.dist.mesh.steps import Step

__all__ = ["Mesh", "Placement", "Step", "current", "mesh", "pmap"]
