"""The functions of a file that have annotations with dimensions.

Protocol. `load(path)` imports a file under its own name, with its folder on the path of modules, as Python
does for a script; what stands behind `if __name__ == "__main__"` does not run. `functions(module, name)` are
those that the module defines, in the order of their lines, or the one of a name: "f", or "Block.__call__" of
a class. A method is taken of the first module variable that is such an object.
"""
from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from tinygrad_nv.errors import NVError, ShapeError
from tinygrad_nv.shapes.signature import inner, signature, types_in

TILES = {"Tile", "KTile", "QTile", "OTile"}


def load(path: Path) -> ModuleType:
    """The module of a file. Raises `ShapeError`."""
    if not path.is_file(): raise ShapeError(f"no file {path}", "a Python file")
    # a file may be called as a module that is loaded already
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_shapes"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None: raise ShapeError(f"{path} is no Python file", "a name with .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try: spec.loader.exec_module(module)
    except NVError: raise
    except Exception as error:
        raise ShapeError(f"{path} cannot be imported: {type(error).__name__}: {error}",
                         "a file that Python imports", f"python {path} shows where it fails") from error
    finally: sys.path.pop(0)
    return module


def functions(module: ModuleType, name: str | None = None) -> list[Callable[..., Any]]:
    """Functions and bound methods with dimensions, all or one. Raises `ShapeError` for a name that is
    none."""
    found = dict[str, Callable[..., Any]]()
    for each in list(vars(module).values()):
        if inspect.isclass(each) and each.__module__ == module.__name__:
            found |= {f"{each.__name__}.{key}": made for key in vars(each)
                      if (made := _method(module, each, key)) is not None}
        elif (plain := _plain(each)) is not None and plain.__module__ == module.__name__:
            found[plain.__name__] = each
    kept = {key: each for key, each in found.items() if _has_dims(each)}
    if name is None:
        return sorted(kept.values(), key=lambda each: inner(each).__code__.co_firstlineno)
    if name in kept: return [kept[name]]
    near = get_close_matches(name, kept, 1)
    raise ShapeError(f"{module.__name__} has no function {name} with dimensions in its annotations",
                     f"one of {', '.join(kept)}" if kept else 'annotations such as Tensor["B", "S", "D"]',
                     f"did you mean {near[0]}?" if near else "")


def _plain(given: Any) -> Any:
    """The Python function that an object is, under decorators."""
    if not callable(given) or inspect.isclass(given): return None
    plain = inspect.unwrap(given)
    return plain if inspect.isfunction(plain) else None


def _method(module: ModuleType, cls: type, name: str) -> Any:
    """A method of the first module variable of a class."""
    if _plain(vars(cls)[name]) is None: return None
    owner = next((each for each in vars(module).values() if type(each) is cls), None)
    return None if owner is None else vars(cls)[name].__get__(owner)


def _has_dims(fn: Any) -> bool:
    """Whether it has types of tensors; kernels over tiles are compiled, not called with Tensors."""
    own = signature(inner(fn))
    kinds = {one.kind for each in (*own.annotations.values(), own.result) for one in types_in(each)}
    return bool(kinds) and not kinds & TILES
