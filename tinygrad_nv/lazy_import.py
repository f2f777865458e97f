"""Functions of modules that are imported at the first call.

Protocol: `lazy_import("tinygrad_nv.patterns.gemm.match:rewrite")` calls what the module has under that name.
It is for tables, whose rows are large and mostly not asked for. tests/unit/test_package.py finds all
these strings and resolves them.
"""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_import(place: str) -> Callable[..., Any]:
    """A function that imports the module of `place` ("module:attribute") and calls its attribute."""
    module, _, name = place.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any: return getattr(import_module(module), name)(*args, **kwargs)
    return call
