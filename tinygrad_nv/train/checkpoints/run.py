"""To which training run checkpoints belong, and what of it is JSON.

Protocol: a run is a JSON object of the caller's. Checkpoints of one directory have equal ones; the first
field that differs is named. `to_plain_json` copies an object, so that later changes are not seen, and raises
`CheckpointError` for what would not come back from JSON as it was.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.train.checkpoints.folder import list_checkpoints
from tinygrad_nv.train.checkpoints.manifest import Manifest, read_manifest

PLAIN = "objects with strings as keys, lists, strings, numbers, booleans, or None"


def to_plain_json(value: Any, name: str) -> Any:
    """A copy that JSON gives back as it is; `name` is used in messages. Raises `CheckpointError`."""
    if value is None or isinstance(value, bool | int | float | str): return value
    if isinstance(value, Mapping):
        if (wrong := next((key for key in value if not isinstance(key, str)), None)) is not None:
            raise CheckpointError(f"{name} has the key {wrong!r}", PLAIN, "use strings as keys")
        return {key: to_plain_json(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list): return [to_plain_json(each, f"{name}[{i}]") for i, each in enumerate(value)]
    raise CheckpointError(f"{name} is a {type(value).__name__}", PLAIN,
                          "convert it: of arrays .tolist(), of tuples list(…), or pass it as a tensor")


def differing(ours: Any, theirs: Any, name: str = "") -> str | None:
    """The first field in which two JSON values differ, in words; None if they are equal."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            where = f"{name}.{key}" if name else key
            if key not in ours: return f"{where} is {theirs[key]!r} there, and not set here"
            if key not in theirs: return f"{where} is {ours[key]!r} here, and not set there"
            if (found := differing(ours[key], theirs[key], where)) is not None: return found
        return None
    return None if ours == theirs else f"{name} is {theirs!r} there, and {ours!r} here"


def require_run(path: Path, manifest: Manifest, run: Any) -> None:
    """Raises `CheckpointError` for a checkpoint of another run."""
    if (found := differing(run, manifest.run)) is not None:
        raise CheckpointError(f"{path} is of another training run: {found}", "a checkpoint of this run",
                              "use the settings of that run, or choose another directory")


def require_same_run(directory: Path, run: Any) -> None:
    """Raises `CheckpointError` for a directory with a checkpoint of another run."""
    for _, path in list_checkpoints(directory):
        try: manifest = read_manifest(path)
        except CheckpointError: continue
        require_run(path, manifest, run)
