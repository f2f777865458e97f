"""Tokenized records on disk, under a hash of their content.

Protocol: a key is a hash of the files' content, the tokenizer and what else decides the ids. `cached(key,
vocab_size, write)` gives the `Tokens` of a key; where there are none, it calls `write(writer)` first, which
adds documents. They are written beside and renamed when they are whole, so that a reader finds all or
nothing. One process writes a key; others that ask for it wait. A directory whose files have other sizes than
they should is written again. Tokens are mapped, not read: memory does not grow with the data.

Files of a key, in `tokens/<key>` of the cache directory: ids.bin (uint16, or uint32 for vocabularies above
65536), loss.bin (uint8, 1: loss; absent where all have loss), offsets.bin (int64, first token of each
document, and the end), facts.json.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tinygrad_nv import cache, private
from tinygrad_nv.errors import DataError
from tinygrad_nv.train.data.encode import Encoded
from tinygrad_nv.train.data.files import unreadable

FORMAT = 1          # of the files below, and of the rules by which records become ids
BLOCK = 1 << 20     # bytes that are hashed at a time
NAMES = ("ids.bin", "loss.bin", "offsets.bin")
MOST_FACTS = 1 << 16    # bytes of facts.json


@dataclass(frozen=True)
class Tokens:
    """Documents one after the other: `ids` [tokens], `loss` uint8 [tokens] (None: loss on all), `offsets`
    int64 [documents + 1]. `disagree`: documents whose prompt has other tokens alone than in front of its
    completion. Ids are below `vocab_size`."""
    ids: np.ndarray
    loss: np.ndarray | None
    offsets: np.ndarray
    disagree: int = 0
    vocab_size: int = 1 << 32

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64."""
        return np.diff(self.offsets)

    def piece(self, document: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids and loss mask (bool, None: loss on all) of tokens of a document."""
        where = slice(first := int(self.offsets[document]) + begin, first + count)
        if len(ids := self.ids[where]) and int(ids.max()) >= self.vocab_size:   # kernels read that row
            raise DataError(f"token {int(ids.max())} in the kept tokens of document {document}",
                            f"tokens below {self.vocab_size}",
                            f"remove {cache.directory() / 'tokens'}: its files are damaged")
        return ids, None if self.loss is None else self.loss[where].astype(bool)


@dataclass(frozen=True)
class _Facts:
    """facts.json: what the files hold, and their sizes in bytes."""
    format: int
    dtype: str
    disagree: int
    sizes: dict[str, int]


def hash_file(files: Iterable[Path], *more: Any) -> str:
    """A key: of the files' content, and of JSON values."""
    made = hashlib.sha256(json.dumps([FORMAT, *more], sort_keys=True).encode())
    for file in files:
        made.update(b"\0file" + file.suffix.lower().encode())
        try:
            with file.open("rb") as content:
                while block := content.read(BLOCK): made.update(block)
        except OSError as error: raise unreadable(file, error) from error
    return made.hexdigest()


class Writer:
    """Adds documents to the files of a directory. Not more than one document is held in memory."""

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self.directory, self.dtype = directory, np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self.tokens, self.disagree, self._all = 0, 0, True
        self._files: dict[str, BinaryIO] = {}
        self._put("offsets.bin", np.zeros(1, np.int64))
        self._put("ids.bin", np.zeros(0, self.dtype))

    def add(self, document: Encoded) -> None:
        """Appends a document; ids are below `vocab_size`."""
        if document.loss is not None and self._all:
            self._all = False
            for begin in range(0, self.tokens, BLOCK):      # of those before, which had loss on all
                self._put("loss.bin", np.ones(min(BLOCK, self.tokens - begin), np.uint8))
        if not self._all:
            loss = np.ones(len(document.ids)) if document.loss is None else document.loss
            self._put("loss.bin", loss.astype(np.uint8))
        self._put("ids.bin", document.ids.astype(self.dtype))
        self.tokens, self.disagree = self.tokens + len(document.ids), self.disagree + (not document.agrees)
        self._put("offsets.bin", np.array([self.tokens], np.int64))

    def close(self) -> None:
        """Writes the facts. What was added before is whole now."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        sizes = {name: (self.directory / name).stat().st_size for name in self._files}
        facts = _Facts(FORMAT, self.dtype.name, self.disagree, sizes)
        (self.directory / "facts.json").write_text(json.dumps(asdict(facts)))

    def _put(self, name: str, values: np.ndarray) -> None:
        if name not in self._files:
            self._files[name] = (self.directory / name).open("wb")
        self._files[name].write(values.tobytes())

    def abandon(self) -> None:
        """Closes the files, which are not whole."""
        for file in self._files.values():
            with contextlib.suppress(OSError): file.close()


def open_cached(key: str, vocab_size: int, write: Callable[[Writer], None]) -> Tokens:
    """The documents of a key, which `write` adds where they are not there. Raises `DataError` where they
    cannot be kept."""
    folder = cache.directory() / "tokens"
    try:
        folder = cache.folder("tokens")
        with private.lock_file(folder / f"{key}.lock"):
            if (found := _open(folder / key, vocab_size)) is not None: return found
            _write(folder, key, vocab_size, write)
            made = _open(folder / key, vocab_size)
            assert made is not None, "what was written cannot be read"
            return made
    except OSError as error:
        raise DataError(f"tokens cannot be kept in {folder}: {error.strerror or error}",
                        "room for 2 to 5 bytes a token", "make room, or set NV_CACHE_DIR to another directory"
                        ) from error


def _write(folder: Path, key: str, vocab_size: int, write: Callable[[Writer], None]) -> None:
    beside = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder))
    writer = None
    try:
        writer = Writer(beside, vocab_size)
        write(writer)
        writer.close()
        shutil.rmtree(folder / key, ignore_errors=True)     # damaged, or it would have been used
        os.replace(beside, folder / key)
    except BaseException:
        if writer is not None: writer.abandon()
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _open(directory: Path, vocab_size: int) -> Tokens | None:
    """Returns the tokens of a directory; None where it is not there, or damaged."""
    def map_array(name: str, dtype: str) -> np.ndarray:
        with private.open_private(directory / name) as file:
            if (size := os.fstat(file.fileno()).st_size) != facts.sizes[name]: raise ValueError(name)
            if not size: return np.zeros(0, dtype)      # an empty file cannot be mapped
            return np.memmap(file, dtype, "r")
    try:
        facts = _facts(json.loads(private.read(directory / "facts.json", MOST_FACTS)))
        ids, offsets = map_array("ids.bin", facts.dtype), map_array("offsets.bin", "int64")
        loss = map_array("loss.bin", "uint8") if "loss.bin" in facts.sizes else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError): return None
    if (loss is not None and len(loss) != len(ids)) or not len(offsets) or offsets[0] != 0 \
            or offsets[-1] != len(ids) or np.any(offsets[1:] < offsets[:-1]): return None
    return Tokens(ids, loss, offsets, facts.disagree, vocab_size)


def _facts(data: Mapping[str, Any]) -> _Facts:
    facts = _Facts(**data)
    if facts.format != FORMAT or facts.dtype not in ("uint16", "uint32") \
            or not {"ids.bin", "offsets.bin"} <= facts.sizes.keys() <= set(NAMES): raise ValueError(facts)
    return facts
