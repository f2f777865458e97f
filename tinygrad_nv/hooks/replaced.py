"""tinygrad's attributes: replaced, and put back. For __init__.py and devices.py alone.

Protocol: `replace(owner, attribute, ours)` remembers what was there, `theirs` says what that is, `put_back`
restores it, unless other code has replaced ours since. `add` and `remove` keep tables of what is registered
by name.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

import tinygrad.schedule as schedule

from tinygrad_nv.errors import HookError

TINYGRAD_VERSION = "0.14.0"
_replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}  # (theirs, ours)


def official() -> bool:
    """Whether this tinygrad has the plugin points of upstream.patch."""
    return hasattr(schedule, "pre_schedule")


def check_version() -> None:
    # a look at one folder: importlib.metadata takes 10 ms to import
    if (Path(schedule.__file__).parents[2] / f"tinygrad-{TINYGRAD_VERSION}.dist-info").is_dir(): return
    from importlib import metadata
    try: version = metadata.version("tinygrad")
    except metadata.PackageNotFoundError: version = "of no known version"
    if version != TINYGRAD_VERSION:
        raise HookError(f"tinygrad {version} is installed", f"tinygrad {TINYGRAD_VERSION}",
                        f"pip install tinygrad=={TINYGRAD_VERSION}")


def check_own(name: str, own: bool) -> None:
    if own: return
    raise HookError(f"{name} has been replaced by another package", "tinygrad's own",
                    "import tinygrad_nv before that package, or do without one of them")


def replace(owner: Any, attribute: str, ours: Any) -> None:
    if (owner, attribute) in _replaced: return
    _replaced[owner, attribute] = getattr(owner, attribute), ours
    setattr(owner, attribute, ours)


def put_back(owner: Any, attribute: str) -> None:
    if (owner, attribute) not in _replaced: return
    theirs, ours = _replaced[owner, attribute]
    if getattr(owner, attribute) is not ours:
        raise HookError(f"{owner.__name__}.{attribute} has been replaced after tinygrad_nv did",
                        "what tinygrad_nv put there", "undo the later replacement first")
    setattr(owner, attribute, theirs)
    del _replaced[owner, attribute]


def theirs(owner: Any, attribute: str) -> Any:
    return _replaced[owner, attribute][0] if (owner, attribute) in _replaced else getattr(owner, attribute)


def add(table: dict[str, Any], kind: str, name: str, value: Any) -> None:
    if name in table:
        raise HookError(f"{kind} {name!r} is registered already", "one registration for each name",
                        f"call hooks.remove_{kind.replace(' ', '_')}({name!r}) first")
    table[name] = value


def remove(table: dict[str, Any], kind: str, name: str) -> Any:
    if name not in table: raise HookError(f"no {kind} {name!r} is registered", f"one of {sorted(table)}")
    return table.pop(name)
