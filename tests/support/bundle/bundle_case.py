"""What tests of bundles share."""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.bundle import container
from tinygrad_nv.bundle.container import FORMAT, HEAD, PAGE, digest, open_bundle
from tinygrad_nv.bundle.manifest import ALIGNMENT, canonical
from tinygrad_nv.bundle.plan import program_digest, step_digest
from tinygrad_nv.errors import BundleError


def check_all(file: Path) -> None: open_bundle(file).verify()


def manifest_of(file: Path) -> Any: return json.loads(open_bundle(file).manifest.encode())


def forged(file: Path, name: str, data: bytes, without: str = "") -> Path:
    """The bundle with another part, or "manifest", of which all hashes and digests fit."""
    if name != "manifest": return with_part(file, name, data)
    bundle = open_bundle(file)
    return written(file.with_name("forged.tnv"), data, [bundle.read(each) for each in bundle.parts
                                                        if each != without])


def with_part(file: Path, name: str, data: bytes) -> Path:
    """The bundle with another part."""
    bundle, found, end = open_bundle(file), manifest_of(file), 0
    parts = {each: bundle.read(each) for each in bundle.parts} | {name: data}
    if not name.endswith("set.json"): _redigest(parts, name.partition("/")[0])
    for part in found["parts"]:
        content = parts[part["name"]]
        part.update(bytes=len(content), offset=end, sha256=digest(content).hex())
        end += -(-len(content) // ALIGNMENT) * ALIGNMENT
    return written(file.with_name("forged.tnv"), canonical(found), [*parts.values()])


def _redigest(parts: dict[str, bytes], own: str) -> None:
    """Puts the digests of steps that can be read into their set."""
    about = json.loads(parts[f"{own}/set.json"])
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        rows, code = json.loads(parts[f"{own}/programs.json"]), parts[f"{own}/code"]
        for step in about["steps"].values():
            found = json.loads(parts[f"{own}/{step[0]}"])
            step[1] = step_digest(found, lambda number: program_digest(rows[number], code))
    parts[f"{own}/set.json"] = canonical(about)


def written(target: Path, manifest: bytes, parts: list[bytes]) -> Path:
    """A file of these bytes."""
    head = HEAD.pack(container.MAGIC, *FORMAT, len(manifest), 0)
    whole = head + hashlib.sha256(head + manifest).digest() + manifest
    whole += bytes(-len(whole) % PAGE)
    target.write_bytes(whole + b"".join(each + bytes(-len(each) % ALIGNMENT) for each in parts))
    return target


def flips(file: Path, bits: list[int], check: Callable[[Path], None] = check_all) -> None:
    """Each flipped bit is refused, by the name of the part that it is in."""
    bundle = open_bundle(file)
    places = [(bundle.start + each.offset, each.nbytes, each.name) for each in bundle.manifest.parts
              if not each.ranges]
    with file.open("r+b") as opened:
        for bit in bits:
            at = bit // 8
            [before] = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([before ^ 1 << bit % 8]), at)
            name = next((name for start, size, name in places if start <= at < start + size), "")
            with pytest.raises(BundleError) as raised: check(file)
            assert name in str(raised.value), (bit, name, str(raised.value))
            os.pwrite(opened.fileno(), bytes([before]), at)
    check(file)
