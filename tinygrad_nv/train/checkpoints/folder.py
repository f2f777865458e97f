"""The checkpoints of a directory: their names, and how they come and go.

Protocol: a checkpoint of step N is written as `.checkpoint-N.partial`, which `commit` renames to
`checkpoint-N` when it is whole. One of that step which is there already is renamed to
`.checkpoint-N.replaced` first, and to its name again by `sweep` if a process was killed between the two.
`remove` renames to `.checkpoint-N.deleted` before it deletes: a directory named `checkpoint-N` is whole at
every moment. `sweep` takes away what killed processes left.

`Lock` lets one process alone write: it holds a lock of the system, which ends with the process.

A run is a JSON object of the caller's. Checkpoints of one directory have equal ones; the first field that
differs is named.
"""
from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.train.checkpoints.manifest import Manifest, read_manifest, require_sizes
from tinygrad_nv.train.files import refusal, sync_folder

NAME = re.compile(r"checkpoint-(\d+)")
LEFT = re.compile(r"\.checkpoint-(\d+)\.(partial|replaced|deleted)")
LOCK = ".checkpoints.lock"
PLAIN = "objects with strings as keys, lists, strings, numbers, booleans, or None"


def final(directory: Path, step: int) -> Path: return directory / f"checkpoint-{step}"


def partial(directory: Path, step: int) -> Path: return directory / f".checkpoint-{step}.partial"


def _replace(directory: Path, step: int) -> Path: return directory / f".checkpoint-{step}.replaced"


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Steps and directories of checkpoints, the newest first; whole or not."""
    if not directory.is_dir(): return []
    names = sorted(each.name for each in directory.iterdir() if each.is_dir())
    found = {int(match[1]): directory / name for name in names if (match := LEFT.fullmatch(name))
             and match[2] == "replaced"}
    found |= {int(match[1]): directory / name for name in names if (match := NAME.fullmatch(name))}
    return sorted(found.items(), reverse=True)


def sweep(directory: Path) -> None:
    """Takes away what a killed process left. Raises OSError."""
    for path in sorted(directory.iterdir()):
        if (match := LEFT.fullmatch(path.name)) is None: continue
        named = final(directory, int(match[1]))
        if match[2] == "replaced" and not named.exists(): path.rename(named)
        else: shutil.rmtree(path)
    sync_folder(directory)


def commit(directory: Path, step: int) -> Path:
    """Gives a whole checkpoint its name. Raises OSError."""
    source, target, old = partial(directory, step), final(directory, step), _replace(directory, step)
    sync_folder(source)
    if replaces := target.exists(): os.rename(target, old)
    os.rename(source, target)
    sync_folder(directory)
    if replaces: shutil.rmtree(old)
    return target


def remove(step: int, path: Path) -> None:
    """Deletes a checkpoint. Raises OSError."""
    away = path.with_name(f".checkpoint-{step}.deleted")
    os.rename(path, away)
    shutil.rmtree(away)


def rotate(directory: Path, keep: int, newest: int) -> None:
    """Removes what is older than the `keep` newest whole checkpoints, one of which is that of step `newest`.
    Whole: the manifest and the sizes of files are right. Hashes were right when they were written, and are
    checked before they are read. Raises OSError."""
    left = keep - 1
    for step, path in list_checkpoints(directory):
        if step == newest: continue
        if left == 0 and step < newest: remove(step, path)
        elif left and _whole(path): left -= 1


def _whole(path: Path) -> bool:
    try: require_sizes(path, read_manifest(path))
    except CheckpointError: return False
    return True


class Lock:
    """Held by the process that writes checkpoints to a directory. File systems without locks have none."""

    def __init__(self, directory: Path) -> None:
        """Raises `CheckpointError` where another process has it."""
        self._file: int | None = None
        try: fcntl = importlib.import_module("fcntl")
        except ImportError: return
        try: self._file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error: raise refusal(directory, error) from error
        try: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            self.release()
            raise CheckpointError(f"process {owner or 'unknown'} writes checkpoints to {directory}",
                                  "a directory of one training run",
                                  "end that process, or choose another directory") from error
        except OSError: return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Lets others have it."""
        if self._file is not None:
            with contextlib.suppress(OSError): os.close(self._file)
        self._file = None


def to_plain_json(value: Any, name: str) -> Any:
    """A copy that JSON gives back as it is, so that later changes are not seen; `name` is used in messages.
    Raises `CheckpointError` for what would not come back from JSON as it was."""
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
