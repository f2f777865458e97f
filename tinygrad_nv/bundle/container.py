"""The file of a bundle.

Protocol, format 1.0; numbers are little-endian:

    0   8 bytes    b"\\x89TNV\\r\\n\\x1a\\n"
    8   u32, u32   format, major and minor
    16  u64        bytes of the manifest
    24  u64        bytes of the signature block, 0 or 96
    32  32 bytes   SHA-256 of bytes 0 to 32, the manifest and the signature block
    64             manifest (manifest.py), signature block (signing.py), zeros up to a multiple of 4096
    then           parts, in the manifest's order, each from a multiple of 256 on, zeros between

A reader takes files of its major format and of minors up to its own. `open_bundle` checks all but the bytes
of parts: the header's hash, names, sizes, that the parts fill the file, that zeros are zeros. Every reading
of a part checks its hash before it gives anything: what a file says is trusted no further than its
manifest's hash, and that no further than a signature. Nothing in a file is a path that is written to, or
code of Python. Memory is bounded by the size of the file: no part is compressed.

The hash of a part, `digest(data)`, is SHA-256 over the SHA-256 of each of its chunks of 8 MiB. Several
threads hash the chunks of a large part at a time: hashlib computes without the interpreter's lock.
"""
from __future__ import annotations

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from tinygrad_nv.bundle import signing
from tinygrad_nv.bundle.manifest import (
    ALIGNMENT,
    FIX,
    MOST_BYTES,
    FileRange,
    Manifest,
    Part,
    decode,
    parse_json,
    shorten,
)
from tinygrad_nv.errors import BundleError
from tinygrad_nv.files import regular_size

CHUNK = 8 << 20
THREADS = min(8, os.cpu_count() or 1)
MAGIC, FORMAT = b"\x89TNV\r\n\x1a\n", (1, 1)     # 1.1 has im2col tensor maps
HEAD = struct.Struct("<8sIIQQ")
HEADER, PAGE = 64, 4096
JSON_BYTES = 128 << 20      # limit: bytes of a bundle's part that is parsed; a large model's have 10 MB
Progress = Callable[[int], None]


def digest(data: bytes | memoryview) -> bytes:
    """The 32 bytes of a part's hash."""
    return digest_of(len(data), lambda start, end: data[start:end])


def digest_of(nbytes: int, chunk: Callable[[int, int], bytes | memoryview],
              progress: Callable[[int], None] = lambda nbytes: None) -> bytes:
    """The hash of `nbytes` bytes, of which `chunk(start, end)` gives some, in any thread. `progress` is told
    of the bytes of each chunk."""
    def hash_chunk(start: int) -> bytes:
        end = min(start + CHUNK, nbytes)
        made = hashlib.sha256(chunk(start, end)).digest()
        progress(end - start)
        return made
    starts = range(0, nbytes, CHUNK)
    if len(starts) < 2: return hashlib.sha256(b"".join(map(hash_chunk, starts))).digest()
    with ThreadPoolExecutor(THREADS) as threads:
        return hashlib.sha256(b"".join(threads.map(hash_chunk, starts))).digest()


def is_bundle(path: Path) -> bool:
    """Whether a file begins as a bundle does."""
    try:
        regular_size(path)      # a FIFO would be waited for
        with path.open("rb") as file: return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError): return False     # of a name with a null byte, too


@dataclass(frozen=True)
class Bundle:
    """An open bundle, whose header and manifest are checked. `weights` is where files are that it refers to,
    "" where nothing says."""
    path: Path
    manifest: Manifest
    hash: str
    signed_by: str
    start: int
    weights: str = ""

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """Parts by name."""
        return {each.name: each for each in self.manifest.parts}

    def part(self, name: str) -> Part:
        """A part, whose bytes are there. Raises `BundleError` where there is none of this name."""
        if (found := self.parts.get(name)) is None:
            raise BundleError(f"{self.path} has no part {shorten(name)}", "a bundle that is whole", FIX)
        if found.ranges: self._require_files(found)
        return found

    def read(self, name: str) -> bytes:
        """The bytes of a part, checked."""
        made = bytearray(self.part(name).nbytes)
        self.read_into(name, memoryview(made))
        return bytes(made)

    def json(self, name: str) -> Any:
        """A part that is JSON."""
        if (size := self.part(name).nbytes) > JSON_BYTES:
            raise BundleError(f"{self.path}: {name} has {size} bytes", f"{JSON_BYTES} at most", FIX)
        return parse_json(self.read(name), f"{self.path}: {name}")

    def read_into(self, name: str, target: memoryview, progress: Progress = lambda nbytes: None) -> None:
        """Fills `target`, of as many bytes as the part has, and checks them. Raises `BundleError`: what the
        target has then is not to be used."""
        part = self.part(name)
        assert len(target) == part.nbytes, "the memory of a part has its size"
        self._check(part, lambda start, end: target[start:end], progress)

    def verify(self, progress: Progress = lambda nbytes: None) -> None:
        """Checks every byte. Raises `BundleError`."""
        for part in self.manifest.parts:
            self._check(self.part(part.name), lambda start, end: memoryview(bytearray(end - start)), progress)

    def _check(self, part: Part, memory: Callable[[int, int], memoryview], progress: Progress) -> None:
        """Reads a part into `memory(start, end)` of each of its chunks. Raises `BundleError` where its hash
        is another."""
        files = self._open(part)
        try:
            def chunk(start: int, end: int) -> memoryview:
                view = memory(start, end)
                self._fill(part, files, start, view)
                return view
            made = digest_of(part.nbytes, chunk, progress)
        finally:
            for each in files.values(): os.close(each)
        if made.hex() != part.sha256: raise self._damage_error(part)

    def _damage_error(self, part: Part) -> BundleError:
        where = f" (in {', '.join(sorted({each.file for each in part.ranges}))})" if part.ranges else ""
        return BundleError(f"{self.path}: {part.name}{where} is damaged: its bytes have another hash",
                           f"sha256 {part.sha256}", FIX)

    def _require_files(self, part: Part) -> None:
        """Raises unless the files that a part refers to have its bytes: before memory is taken for them, and
        before a FIFO is opened, which would wait."""
        if not self.weights:
            raise BundleError(f"{self.path} refers to weights in {shorten(part.ranges[0].file)}, and to no "
                              "directory", "the directory of that file", "give it: --weights DIR")
        ends, name = Counter[str](), ""
        for each in part.ranges: ends[each.file] = max(ends[each.file], each.offset + each.nbytes)
        try:
            for name, end in ends.items():
                if (size := regular_size(Path(self.weights) / name)) < end:
                    raise BundleError(f"{self.path}: {part.name} ends after {end} bytes of {shorten(name)}, "
                                      f"which has {size}", "a whole file", FIX)
        except (OSError, ValueError) as error:      # of a directory with a null byte, too
            why = error.strerror if isinstance(error, OSError) else error
            raise BundleError(f"{self.path} refers to {shorten(Path(self.weights) / name)}: {why}",
                              "the checkpoint that the bundle was compiled from",
                              "put it there, or say where it is: --weights DIR") from error

    def _open(self, part: Part) -> dict[str, int]:
        """The files in which a part is, open."""
        places = {each.file: Path(self.weights) / each.file for each in part.ranges} or {"": self.path}
        made: dict[str, int] = {}
        try:
            for name, place in places.items(): made[name] = os.open(place, os.O_RDONLY)
        except OSError as error:
            for each in made.values(): os.close(each)
            raise BundleError(f"{shorten(place)} cannot be read: {error.strerror}", "a file of the bundle",
                              FIX) from error
        return made

    def _fill(self, part: Part, files: Mapping[str, int], start: int, view: memoryview) -> None:
        """Reads bytes of a part from `start` on."""
        at = 0
        for one in part.ranges or (FileRange("", self.start + part.offset, part.nbytes),):
            first, last = max(start, at), min(start + len(view), at + one.nbytes)
            if first < last:
                _read(files[one.file], one.offset + first - at, view[first - start:last - start],
                      f"{self.path}: {part.name}")
            at += one.nbytes


def _read(file: int, offset: int, view: memoryview, what: str) -> None:
    while len(view):
        count = os.preadv(file, [view], offset)
        if not count: raise BundleError(f"{what} ends after {offset} bytes of its file", "a whole file", FIX)
        offset, view = offset + count, view[count:]


def open_bundle(path: str | Path, required_key: Path | None = None, weights: Path | None = None) -> Bundle:
    """Opens a bundle, whose manifest has to be signed by `required_key` if one is given. `weights`: the
    directory of files that it refers to. Raises `BundleError`."""
    path = Path(path)
    try:
        regular_size(path)      # a FIFO would be waited for
        file = path.open("rb")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BundleError(f"{shorten(path)} cannot be read: {why}", "a bundle",
                          "make one: tinygrad-nv compile MODEL -o model.tnv") from error
    with file:
        head = file.read(HEADER)
        if len(head) < HEADER or head[:len(MAGIC)] != MAGIC:
            raise BundleError(f"{path} is no bundle", "a file that tinygrad-nv compile wrote",
                              "make one: tinygrad-nv compile MODEL -o model.tnv")
        _, major, minor, size, signature = HEAD.unpack_from(head)
        if major != FORMAT[0] or minor > FORMAT[1]:
            raise BundleError(f"{path} has format {major}.{minor}", f"1.0 to {FORMAT[0]}.{FORMAT[1]}",
                              "use a newer tinygrad_nv, or compile the model with this one")
        if size > MOST_BYTES or signature not in (0, signing.SIGNATURE_BYTES):
            raise BundleError(f"{path} has a manifest of {size} bytes, a signature of {signature}",
                              f"{MOST_BYTES} at most; 0 or {signing.SIGNATURE_BYTES}", FIX)
        rest = file.read(size + signature)
        if len(rest) < size + signature:
            raise BundleError(f"{path} ends in its manifest", "a whole file", FIX)
        hashed = hashlib.sha256(head[:32] + rest).digest()
        if hashed != head[32:]:
            raise BundleError(f"{path}: the header or the manifest is damaged: it has another hash",
                              f"sha256 {head[32:].hex()}", FIX)
        data, block = rest[:size], rest[size:]
        if required_key is not None: signing.check(_message(head, data), block, required_key, str(path))
        manifest, start = decode(data, str(path)), -(-(HEADER + len(rest)) // PAGE) * PAGE
        _require_filled(file, path, HEADER + len(rest), start, manifest.parts)
    # the same with and without a signature
    name = hashlib.sha256(data).hexdigest()
    directory = weights if weights is not None else manifest.about.get("weights", "")
    return Bundle(path, manifest, name, block[:signing.KEY_BYTES].hex(), start, str(directory))


def _message(head: bytes, manifest: bytes) -> bytes: return hashlib.sha256(head[:32] + manifest).digest()


def _require_filled(file: BinaryIO, path: Path, end: int, start: int, parts: Iterable[Part]) -> None:
    """Raises unless parts, and zeros between them, are all that the file has."""
    inside = [each for each in parts if not each.ranges]
    whole, found = start + (inside[-1].end if inside else 0), os.fstat(file.fileno()).st_size
    if found != whole: raise BundleError(f"{path} has {found} bytes", f"{whole}, as its manifest says", FIX)
    gaps = [(end, start, "manifest"), *((start + each.offset + each.nbytes, start + each.end, each.name)
                                        for each in inside)]
    for first, last, name in gaps:
        if first == last: continue
        if any(os.pread(file.fileno(), last - first, first)):
            raise BundleError(f"{path}: bytes behind {name} are damaged", "zeros", FIX)


@dataclass(frozen=True)
class Source:
    """A part to be written: its name, its bytes or the file that has them. Of one that is in ranges of other
    files, size and hash are given; a hash that is known may be."""
    name: str
    data: bytes | Path
    ranges: tuple[FileRange, ...] = ()
    size: int = 0
    sha256: str = ""

    @property
    def nbytes(self) -> int:
        """Its size."""
        if self.ranges: return self.size
        return len(self.data) if isinstance(self.data, bytes) else self.data.stat().st_size

    def digest(self) -> str:
        """Its hash."""
        if self.sha256: return self.sha256
        if isinstance(self.data, bytes): return digest(self.data).hex()
        file = os.open(self.data, os.O_RDONLY)
        try: return digest_of(self.nbytes, lambda start, end: os.pread(file, end - start, start)).hex()
        finally: os.close(file)


def write_bundle(path: Path, kind: str, about: dict[str, Any], sources: Iterable[Source],
                 sign_key: Path | None = None, progress: Progress = lambda nbytes: None) -> Manifest:
    """Writes a bundle of these parts, in this order, beside `path`, and renames it when it is whole. Raises
    OSError."""
    sources, parts, end = list(sources), list[Part](), 0
    for each in sources:
        made = Part(each.name, each.nbytes, each.digest(), end, each.ranges)
        if not each.ranges: end = made.end
        else: made = replace(made, offset=0)
        parts.append(made)
    manifest = Manifest(kind, about, tuple(parts))
    data = manifest.encode()
    head = HEAD.pack(MAGIC, *FORMAT, len(data), 0 if sign_key is None else signing.SIGNATURE_BYTES)
    block = b"" if sign_key is None else signing.sign(_message(head, data), sign_key)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with written.open("xb") as file:
            file.write(head + hashlib.sha256(head + data + block).digest() + data + block)
            file.write(bytes(-file.tell() % PAGE))
            for each in sources:
                if each.ranges: continue
                _copy(each, file, progress)
                file.write(bytes(-each.nbytes % ALIGNMENT))
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return manifest


def _copy(source: Source, file: BinaryIO, progress: Progress) -> None:
    if isinstance(source.data, bytes):
        file.write(source.data)
        return progress(len(source.data))
    with source.data.open("rb") as opened:
        while chunk := opened.read(PAGE << 10):
            file.write(chunk)
            progress(len(chunk))
