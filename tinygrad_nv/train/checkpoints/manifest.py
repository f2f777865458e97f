"""Manifest of a checkpoint's files: `manifest.json`, written last.

Protocol: each rank has a `Part`: its files with size and SHA-256, where its tensors are in them, and its
state. With several ranks each writes its part as JSON when its files are on the disk, and rank 0 joins them
to the `Manifest`. The manifest has a hash of itself. `read_manifest` raises `CheckpointError` for one that
is missing, damaged, or of another format; `verify` also for files that are not as the manifest says.
"""
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.files import read_json, regular_size
from tinygrad_nv.models.checkpoint import ITEM_BYTES
from tinygrad_nv.train.files import FileRecord, read_record

MAX_MANIFEST_BYTES = 64 << 20   # limit: bytes of a checkpoint's manifest.json
MANIFEST, FORMAT, VERSION = "manifest.json", "tinygrad_nv training checkpoint", 1
MAX_RANK = 64   # limit: dimensions of a checkpoint's tensor
READERS = 4     # files that are hashed at a time
FIX = "remove it, and resume from an older checkpoint"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: dtype by that format's name, and its first byte in the file."""
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Part:
    """Files and tensors that one rank wrote."""
    rank: int
    state: Any
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Manifest:
    """`run` is what a run must have in common with the one that wrote this, to resume from it."""
    step: int
    run: Any
    parts: tuple[Part, ...]


def to_json(manifest: Manifest) -> str:
    """The text of manifest.json."""
    content = {"format": FORMAT, "version": VERSION, "step": manifest.step, "run": manifest.run,
               "parts": [asdict(part) for part in manifest.parts]}
    text = json.dumps(content)
    return f'{{"sha256": "{hashlib.sha256(text.encode()).hexdigest()}",\n"content": {text}}}\n'


def part_to_json(part: Part) -> str: return json.dumps(asdict(part))


def part_from_json(data: Mapping[str, Any]) -> Part:
    """Raises KeyError, TypeError, ValueError."""
    files = {_plain_name(name): FileRecord(_count(each["nbytes"]), str(each["sha256"]))
             for name, each in data["files"].items()}
    tensors = {name: _read_tensor(each, files) for name, each in data["tensors"].items()}
    return Part(_count(data["rank"]), data["state"], files, tensors)


def _read_tensor(data: Mapping[str, Any], files: Mapping[str, FileRecord]) -> StoredTensor:
    """Returns where a tensor is. Raises KeyError, TypeError, ValueError: its file has not these bytes."""
    shape = tuple(map(_count, data["shape"]))
    made = StoredTensor(str(data["file"]), str(data["dtype"]), shape, _count(data["offset"]))
    if len(shape) > MAX_RANK: raise ValueError(f"a tensor of {len(shape)} dimensions")
    size = math.prod(shape) * ITEM_BYTES[made.dtype]
    if made.offset + size > files[made.file].nbytes:
        raise ValueError(f"{size} bytes from {made.offset} on, in a file of {files[made.file].nbytes}")
    return made


def _count(value: Any) -> int:
    """An integer of 8 bytes, from 0 on. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63: raise ValueError(f"{str(value)[:40]!r} as a count")
    return value


def _plain_name(name: str) -> str:
    """The name of a file in the directory, and not of one elsewhere. Raises ValueError."""
    if not name or name in (".", "..") or {"/", "\\", "\0"} & set(name):
        raise ValueError(f"{name[:40]!r} as the name of a file")
    return name


def incomplete(path: Path, why: str) -> CheckpointError:
    """Returns the error of a checkpoint that is not as it was written."""
    return CheckpointError(f"{path} is no whole checkpoint: {why}", "a checkpoint as it was written", FIX)


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint in a directory, whose other files are not looked at. Raises
    `CheckpointError`."""
    file = path / MANIFEST
    if not file.is_file(): raise incomplete(path, f"it has no {MANIFEST}")
    try: data = read_json(file, MAX_MANIFEST_BYTES)
    except OSError as error: raise incomplete(path, f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise incomplete(path, f"{MANIFEST} is not JSON ({error})") from error
    try:
        content, wanted = data["content"], data["sha256"]
        if hashlib.sha256(json.dumps(content).encode()).hexdigest() != wanted:
            raise incomplete(path, f"{MANIFEST} was changed after it was written")
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError(f"{file} is of format {content['format']!r}, version {content['version']}",
                                  f"{FORMAT!r}, version {VERSION}", "resume with the release that wrote it")
        parts = tuple(part_from_json(part) for part in content["parts"])
        if not parts or [part.rank for part in parts] != [*range(len(parts))]:
            raise ValueError(f"parts of ranks {[part.rank for part in parts[:8]]}")
        return Manifest(_count(content["step"]), content["run"], parts)
    except KeyError as error: raise incomplete(path, f"{MANIFEST} lacks {error}") from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise incomplete(path, f"{MANIFEST} has {error}") from error


def require_sizes(path: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError` for a file that is missing or of another size."""
    for part in manifest.parts:
        for name, record in part.files.items():
            try: size = regular_size(path / name)
            except OSError as error: raise incomplete(path, f"{name}: {error.strerror}") from error
            if size != record.nbytes:
                raise incomplete(path, f"{name} has {size} bytes, and had {record.nbytes}")


def verify(path: Path) -> Manifest:
    """The manifest of a checkpoint, all files of which were read and have their hashes. Raises
    `CheckpointError` that names the first file that differs."""
    manifest = read_manifest(path)
    require_sizes(path, manifest)
    def check(one: tuple[str, FileRecord]) -> None:
        try: found = read_record(path / one[0])
        except OSError as error: raise incomplete(path, f"{one[0]}: {error.strerror}") from error
        if found != one[1]:
            raise incomplete(path, f"{one[0]} is damaged: its SHA-256 is {found.sha256[:16]}…, and was "
                                   f"{one[1].sha256[:16]}…")
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(check, (each for part in manifest.parts for each in part.files.items())))
    return manifest
