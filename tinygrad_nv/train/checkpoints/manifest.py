"""What a checkpoint's files are: `manifest.json`, written last.

Protocol: each rank has a `Part`: its files with size and SHA-256, where its tensors are in them, and its
state. With several ranks each writes its part as JSON when its files are on the disk, and rank 0 joins them
to the `Manifest`. The manifest has a hash of itself. `read_manifest` raises `CheckpointError` for one that
is missing, damaged, or of another format; `verified` also for files that are not as the manifest says.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.files import read_json
from tinygrad_nv.train.files import FileRecord, read_record

MAX_MANIFEST_BYTES = 64 << 20   # limit: bytes of a checkpoint's manifest.json
MANIFEST, FORMAT, VERSION = "manifest.json", "tinygrad_nv training checkpoint", 1
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
    """What one rank wrote."""
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
    tensors = {name: StoredTensor(str(each["file"]), str(each["dtype"]), tuple(map(int, each["shape"])),
                                  int(each["offset"])) for name, each in data["tensors"].items()}
    files = {name: FileRecord(int(each["nbytes"]), str(each["sha256"]))
             for name, each in data["files"].items()}
    return Part(int(data["rank"]), data["state"], files, tensors)


def incomplete(path: Path, why: str) -> CheckpointError:
    """Of a checkpoint that is not as it was written."""
    return CheckpointError(f"{path} is no whole checkpoint: {why}", "a checkpoint as it was written", FIX)


def read_manifest(path: Path) -> Manifest:
    """Of the checkpoint in a directory, whose other files are not looked at. Raises `CheckpointError`."""
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
        return Manifest(int(content["step"]), content["run"],
                        tuple(part_from_json(part) for part in content["parts"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise incomplete(path, f"{MANIFEST} lacks {error}") from error


def require_sizes(path: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError` for a file that is missing or of another size."""
    for part in manifest.parts:
        for name, record in part.files.items():
            try: size = (path / name).stat().st_size
            except OSError as error: raise incomplete(path, f"{name}: {error.strerror}") from error
            if size != record.nbytes:
                raise incomplete(path, f"{name} has {size} bytes, and had {record.nbytes}")


def verified(path: Path) -> Manifest:
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
