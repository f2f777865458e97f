"""Shapes with names: annotations, checks at call time, and shapes of variables without running anything.

    @shapes.checked
    def attention(q: Tensor["B", "H", "S", "D", bf16], k: Tensor["B", "H", "T", "D", bf16]
                  ) -> Tensor["B", "H", "S", "T", bf16]: ...

Reading order: `dims` (a dimension as a polynomial of names), `types` (annotations), `binding` (sizes of names
from real shapes), `signature` (annotations of a function, and the tensors in its arguments), `checking` (the
decorator), `fit` (a dimension from numbers), `tracing` (one run without values), `inference` (the report,
and that as text), `mypy_plugin`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinygrad_nv.shapes.dims import Dim, parse
from tinygrad_nv.shapes.types import Dims, KTile, OTile, QTile, TensorType, Tile, TileType

if TYPE_CHECKING:
    from tinygrad_nv.shapes.checking import checked
    from tinygrad_nv.shapes.inference import AbstractCache, Line, Mismatch, Report, infer

__all__ = ["AbstractCache", "Dim", "Dims", "KTile", "Line", "Mismatch", "OTile", "QTile", "Report",
           "TensorType", "Tile", "TileType", "checked", "infer", "parse"]

LATER = {"checked": "checking", "AbstractCache": "inference", "Line": "inference", "Mismatch": "inference",
         "Report": "inference", "infer": "inference"}


def __getattr__(name: str) -> Any:
    """Returns a name that `LATER` has, loaded when asked for: `import tinygrad_nv` loads annotations
    alone."""
    if name not in LATER: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(f"tinygrad_nv.shapes.{LATER[name]}"), name)
