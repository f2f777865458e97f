"""Launches of kernels with what they were given and what the emulator answered, kept in a file.

Protocol. A `Case` is one launch: PTX, its shape, arguments as bytes, and the memory it can reach before and
after, at the emulator's addresses. Words of arguments and of memory that are such addresses are moved to
wherever the memory lies when the case is launched elsewhere (`relocate`); tensor maps are made anew. `Judged`
says of a buffer what its elements must be, in float64, and how far they may be from it.

The file is one SQLite database: texts of PTX by their digest, cases by name (test#digest), memory compressed.
Several processes may write to it at a time.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.runtime.driver import TensorMapSpec

DEFAULT = Path(__file__).parents[1] / "results" / "cache" / "cases.sqlite"
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Memory:
    """A buffer: its address on the emulator, its bytes, and what its elements are (a torch dtype's name, ""
    where that is not known)."""
    address: int
    before: bytes
    after: bytes
    dtype: str = ""


@dataclass(frozen=True)
class Judged:
    """Exact elements of a buffer: |got - exact| <= bound, and NaN where `exact` is NaN. Empty where the
    emulator's answer is exact: then every byte must be as it has it."""
    memory: int
    exact: np.ndarray
    bound: np.ndarray


@dataclass(frozen=True)
class Case:
    """A launch. `args` are the parameters' bytes; `maps` the tensor maps among them, by position."""
    name: str
    arch: str
    ptx: str
    entry: str
    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_smem: int
    args: tuple[bytes, ...]
    maps: dict[int, TensorMapSpec]
    memory: tuple[Memory, ...]
    judged: tuple[Judged, ...] = ()

    @property
    def test(self) -> str:
        """The test it was recorded in."""
        return self.name.partition("#")[0]

    @property
    def digest(self) -> str:
        """Digest of all that a launch is given."""
        shape = repr((self.arch, self.entry, self.grid, self.block, self.cluster, self.dynamic_smem,
                      self.args, sorted(self.maps.items())))
        whole = hashlib.sha256(self.ptx.encode() + shape.encode())
        for each in self.memory: whole.update(each.before)
        return whole.hexdigest()[:12]


def relocate(data: bytes, memory: Sequence[Memory], addresses: Sequence[int]) -> bytes:
    """The bytes with every 8-byte word that is an address of `memory` turned into one of where that lies."""
    words = np.frombuffer(data[:len(data) // 8 * 8], np.uint64)
    out = words.copy()
    for each, address in zip(memory, addresses, strict=True):
        inside = (words >= each.address) & (words < each.address + max(len(each.before), 1))
        if inside.any(): out[inside] = words[inside] - np.uint64(each.address) + np.uint64(address)
    return out.tobytes() + data[len(words) * 8:]


def _xor(a: bytes, b: bytes) -> bytes:
    return (np.frombuffer(a, np.uint8) ^ np.frombuffer(b, np.uint8)).tobytes()


def _map(facts: dict[str, Any]) -> TensorMapSpec:
    kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    return TensorMapSpec(**kept)


# **** the file ****

TABLES = """
create table if not exists texts (digest text primary key, ptx blob);
create table if not exists cases (name text primary key, text text, facts text, data blob);
create table if not exists about (key text primary key, value text);
"""


class Cases:
    """The file of recorded launches."""

    def __init__(self, path: Path, write: bool = False) -> None:
        if write: path.parent.mkdir(parents=True, exist_ok=True)
        self.file = sqlite3.connect(path, timeout=60, isolation_level=None)
        if write: self.file.executescript(TABLES)

    def close(self) -> None: self.file.close()

    def about(self) -> dict[str, Any]:
        """Returns the notes of the recording: commit, triton."""
        return {key: json.loads(value) for key, value in self.file.execute("select key, value from about")}

    def note(self, key: str, value: Any) -> None:
        """Keeps a fact of the recording."""
        self.file.execute("insert or replace into about values (?, ?)", (key, json.dumps(value)))

    def names(self, words: str = "") -> list[str]:
        """Returns the names of all cases whose PTX has these words, in the order they were recorded."""
        texts = {digest for digest, ptx in self.file.execute("select digest, ptx from texts")
                 if words.encode() in zlib.decompress(ptx)} if words else set()
        return [name for name, text in self.file.execute("select name, text from cases order by rowid")
                if not words or text in texts]

    def add(self, case: Case, most: int = 1 << 62) -> bool:
        """Keeps a case, unless it takes more than `most` bytes; one of the same name stays as it is."""
        text = hashlib.sha256(case.ptx.encode()).hexdigest()
        self.file.execute("insert or ignore into texts values (?, ?)",
                          (text, zlib.compress(case.ptx.encode(), 6)))
        facts = {"arch": case.arch, "entry": case.entry, "grid": case.grid, "block": case.block,
                 "cluster": case.cluster, "dynamic_smem": case.dynamic_smem,
                 "args": [each.hex() for each in case.args],
                 "maps": {i: dataclasses.asdict(spec) for i, spec in case.maps.items()},
                 "memory": [(each.address, len(each.before), each.dtype) for each in case.memory],
                 "judged": [(each.memory, each.exact.size) for each in case.judged]}
        data = [part for each in case.memory for part in (each.before, _xor(each.before, each.after))]
        data += [part.astype("<f8").tobytes() for each in case.judged for part in (each.exact, each.bound)]
        packed = zlib.compress(b"".join(data), 6)
        if len(packed) > most: return False
        self.file.execute("insert or ignore into cases values (?, ?, ?, ?)",
                          (case.name, text, json.dumps(facts), packed))
        return True

    def get(self, name: str) -> Case:
        """A case by its name."""
        (text, said, packed), = self.file.execute("select text, facts, data from cases where name = ?",
                                                  (name,))
        (ptx,), = self.file.execute("select ptx from texts where digest = ?", (text,))
        facts, data, at = json.loads(said), memoryview(zlib.decompress(packed)), 0

        def take(nbytes: int) -> bytes:
            nonlocal at
            at += nbytes
            return bytes(data[at - nbytes:at])

        def buffer(address: int, n: int, dtype: str) -> Memory:
            before = take(n)
            return Memory(address, before, _xor(before, take(n)), dtype)

        memory = tuple(buffer(*each) for each in facts["memory"])
        judged = tuple(Judged(i, np.frombuffer(take(8 * n)), np.frombuffer(take(8 * n)))
                       for i, n in facts["judged"])
        maps = {int(i): _map(spec) for i, spec in facts["maps"].items()}
        return Case(name, facts["arch"], zlib.decompress(ptx).decode(), facts["entry"],
                    tuple(facts["grid"]), tuple(facts["block"]), tuple(facts["cluster"]),
                    facts["dynamic_smem"], tuple(map(bytes.fromhex, facts["args"])), maps, memory, judged)
