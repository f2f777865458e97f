"""Memory-mapped .npy and .bin files of token ids.

Protocol: `Shards.open(files, ...)` maps them; a window of `max_length` tokens is read when its row is asked
for, never a whole file. Window i is tokens i·max_length to (i+1)·max_length of its file, and windows are
numbered in the order of the files. No window goes from one file to the next: the tokens that are left at the
end of a file are not used.

.npy: uint16, uint32, or another type of integers, of one dimension. .bin: little-endian ids and nothing else,
uint16 where the vocabulary has at most 65536 tokens, else uint32, or `shard_dtype`; files with the header of
llm.c (256 int32: magic, version, number of tokens) say their type themselves.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from tinygrad_nv.errors import DataError
from tinygrad_nv.train.data.batch import Row, row
from tinygrad_nv.train.data.files import unreadable

ShardDtype = Literal["auto", "uint16", "uint32"]
HEADER = 256 * 4                                        # bytes of llm.c's
MAGIC = {20240520: "<u2", 20240801: "<u4"}              # of GPT-2's ids, of Llama 3's
SMALL = 1 << 16                                         # the largest vocabulary of uint16


@dataclass(frozen=True)
class Shards:
    """Windows of files. `document_end`: the token after which a segment ends, so that attention does not
    cross documents; None: a window is one segment."""
    files: tuple[Path, ...]
    tokens: tuple[np.ndarray, ...]
    max_length: int
    vocab_size: int
    document_end: int | None
    ends: np.ndarray        # windows up to the end of each file, int64

    @staticmethod
    def open(files: Sequence[Path], max_length: int, vocab_size: int, dtype: ShardDtype = "auto",
             document_end: int | None = None) -> Shards:
        """Maps the files. Raises `DataError` where one holds no token ids, or none has a window."""
        tokens = tuple(_map(file, vocab_size, dtype) for file in files)
        ends = np.cumsum([len(each) // max_length for each in tokens])
        if not ends[-1]:
            most = max(map(len, tokens))
            raise DataError(f"{files[0]} has {most} tokens" if len(files) == 1 else
                            f"the longest of {len(files)} files has {most} tokens",
                            f"{max_length} or more, the length of a window", "lower --max-length")
        return Shards(tuple(files), tokens, max_length, vocab_size, document_end, ends)

    def __len__(self) -> int: return int(self.ends[-1])

    def row(self, window: int) -> Row:
        """A window. Raises `DataError` for ids that are not in the vocabulary."""
        number = int(np.searchsorted(self.ends, window, "right"))
        begin = (window - (int(self.ends[number - 1]) if number else 0)) * self.max_length
        try: ids = np.array(self.tokens[number][begin:begin + self.max_length], np.int64)
        except OSError as error: raise unreadable(self.files[number], error) from error
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if len(wrong):
            raise DataError(f"{self.files[number]} has id {ids[wrong[0]]} as token {begin + wrong[0]}",
                            f"0 to {self.vocab_size - 1}, the vocabulary of the model",
                            "use the tokenizer of the model, or set --shard-dtype")
        return row(ids, None, self._lengths(ids))

    def _lengths(self, ids: np.ndarray) -> tuple[int, ...]:
        if self.document_end is None: return (len(ids),)
        ends = np.union1d(np.flatnonzero(ids == self.document_end) + 1, [len(ids)])
        return tuple(np.diff(ends, prepend=0).tolist())


def _map(file: Path, vocab_size: int, dtype: ShardDtype) -> np.ndarray:
    try: return _npy(file) if file.suffix.lower() == ".npy" else _bin(file, vocab_size, dtype)
    except OSError as error: raise unreadable(file, error) from error


def _npy(file: Path) -> np.ndarray:
    try: tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except OSError: raise
    except Exception as error:      # the header is a Python literal, which is parsed in many ways
        raise DataError(f"{file} is not an array of numpy: {error}", "a .npy file of token ids that is whole",
                        "write the file again") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise DataError(f"{file} holds {tokens.dtype} {list(tokens.shape)}",
                        "token ids, uint16 or uint32, of one dimension",
                        "write it with numpy.save of such an array")
    return tokens


def _bin(file: Path, vocab_size: int, dtype: ShardDtype) -> np.ndarray:
    size = file.stat().st_size
    with file.open("rb") as content: head = np.frombuffer(content.read(12).ljust(12, b"\0"), "<i4")
    auto: ShardDtype = "uint16" if vocab_size <= SMALL else "uint32"
    kind, offset = np.dtype(auto if dtype == "auto" else dtype).newbyteorder("<"), 0
    if int(head[0]) in MAGIC and size >= HEADER:
        offset, kind = HEADER, np.dtype(MAGIC[int(head[0])])
        if size != (said := HEADER + int(head[2]) * kind.itemsize):
            raise DataError(f"{file} has {size} bytes",
                            f"{said} bytes, for the {head[2]} tokens of its header",
                            "write or download the file again")
    if (size - offset) % kind.itemsize:
        raise DataError(f"{file} has {size} bytes", f"a multiple of {kind.itemsize}: ids are {kind.name}",
                        "write the file again, or set --shard-dtype")
    return np.memmap(file, kind, "r", offset)
