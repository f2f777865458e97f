"""Files that are read whole, within limits: a file of a model, of data or of a request may be hostile.

Protocol: `read_bytes` and `read_text` read a regular file of at most `most` bytes, and `read_json` one whose
values are counted before they are made. What is no regular file (a FIFO, a device, a directory), or is
larger, raises `FileRefused`: an OSError, so that callers say what they need the file for.
"""
from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinygrad_nv import collection

MAX_JSON_BYTES = 16 << 20       # limit: bytes of config.json and its like; the largest has 2 MB
MAX_JSON_VALUES = 4_000_000     # limit: values of a JSON file; the largest tokenizer.json has 2 million
MAX_JSON_DEPTH = 200            # limit: levels of objects and lists of a JSON file; config.json has 8
MAX_NAMED_BYTES = 64 << 20      # limit: bytes of a text that a command line names: options, prompts, PTX
MAX_TOKENIZER_BYTES = 96 << 20  # limit: bytes of tokenizer.json, vocab.json, vocab.txt and merges.txt; 34 MB
CHUNK = 1 << 20
KINDS: dict[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR, "a FIFO": stat.S_ISFIFO, "a device": stat.S_ISCHR,
    "a disk": stat.S_ISBLK, "a socket": stat.S_ISSOCK}


class FileRefused(OSError):
    """A file that is not read, for what it is or for its size; `strerror` says why."""

    def __init__(self, why: str, code: int = errno.EINVAL) -> None: super().__init__(code, why)

    def __str__(self) -> str: return self.strerror or ""


def regular_size(path: str | Path) -> int:
    """Returns the size of a regular file. Raises OSError for what is none."""
    found = os.stat(path)
    _require_regular(found)
    return found.st_size


def require_size(path: str | Path, most: int) -> None:
    """Raises OSError for what is no regular file of at most `most` bytes."""
    if (size := regular_size(path)) > most: raise _too_large(size, most)


def read_bytes(path: str | Path, most: int, pipes: bool = False) -> bytes:
    """Returns the content of a regular file of at most `most` bytes; with `pipes`, of a shell's pipe, too.
    Raises OSError."""
    # before it is opened: a FIFO would wait. A pipe of a shell, as /dev/stdin, has no name of its own
    if not pipes or (os.path.exists(os.path.realpath(path)) and stat.S_ISFIFO(os.stat(path).st_mode)):
        _require_regular(os.stat(path))
    with Path(path).open("rb") as file:
        found = os.fstat(file.fileno())
        if not pipes: _require_regular(found)
        if found.st_size > most: raise _too_large(found.st_size, most)
        data = file.read(found.st_size)         # nothing of a pipe
        while len(data) <= most and (more := file.read(CHUNK)): data += more
    if len(data) > most: raise _too_large(len(data), most)
    return data


def read_text(path: str | Path, most: int, pipes: bool = False) -> str:
    """Returns such a file's text. Raises OSError and UnicodeDecodeError."""
    return read_bytes(path, most, pipes).decode("utf-8")


def read_json(path: str | Path, most: int = MAX_JSON_BYTES) -> Any:
    """Returns the value in such a file. Raises OSError and ValueError."""
    value = parse_json(text := read_text(path, most))
    if "\\ud" in text or "\\uD" in text: _require_pairs(value)
    return value


def _require_pairs(value: Any) -> None:
    """Raises ValueError for texts with half of a surrogate pair: libraries take none."""
    try: json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has \\u{ord(error.object[error.start]):x}, which is no character") from error


def read_tokenizer_json(path: str | Path) -> str:
    """Returns the text of a tokenizer.json, whose values are few enough. Raises OSError and ValueError."""
    require_few_values(text := read_text(path, MAX_TOKENIZER_BYTES))
    return text


def parse_json(text: str, unique: bool = False) -> Any:
    """Returns a JSON value of at most `MAX_JSON_VALUES`; `unique`: names of objects must not repeat. Raises
    ValueError, also where it is too deep."""
    require_few_values(text)
    try:
        with collection.pause(): value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError as error: raise ValueError(str(error)) from error
    _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    """Raises ValueError for JSON of more than `MAX_JSON_DEPTH` levels: its readers call themselves for
    each."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [inner for each in level if isinstance(each, dict | list)
                 for inner in (each.values() if isinstance(each, dict) else each)
                 if isinstance(inner, dict | list)]
        if not level: return
    raise ValueError(f"it has more than {MAX_JSON_DEPTH} objects and lists, one inside the other")


def require_few_values(text: str | bytes) -> None:
    """Raises ValueError for JSON of more than `MAX_JSON_VALUES`."""
    marks: Any = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    if (count := sum(map(text.count, marks))) > MAX_JSON_VALUES:
        raise ValueError(f"it has {count} values, and at most {MAX_JSON_VALUES} are read")


def require_npy(path: str | Path) -> None:
    """Raises OSError and ValueError for what is no .npy file of numbers, or does not have all that its header
    says: numpy allocates before it reads."""
    import numpy as np
    size = regular_size(path)
    with open(path, "rb") as file:
        try:
            read_header = {(1, 0): np.lib.format.read_array_header_1_0,
                           (2, 0): np.lib.format.read_array_header_2_0}[np.lib.format.read_magic(file)]
            shape, _, dtype = read_header(file)
        except OSError: raise
        except Exception as error:      # the header is a Python literal, which is parsed in many ways
            raise ValueError(f"its header is damaged: {str(error)[:200]}") from error
        if dtype.kind not in "biufc": raise ValueError(f"it holds {dtype}, and numbers are expected"[:200])
        if min(shape, default=0) < 0 or max(shape, default=0) > size or \
                math.prod(shape) * dtype.itemsize > size - file.tell():
            raise ValueError(f"its header says shape {shape}"[:200] + f", and the file has {size} bytes")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) == len(pairs): return made
    seen = set[str]()
    for name, _ in pairs:
        if name in seen: break
        seen.add(name)
    raise ValueError(f"{name[:100]!r} is there twice")


def _require_regular(found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode): return
    what = next((name for name, is_kind in KINDS.items() if is_kind(found.st_mode)), "no regular file")
    raise FileRefused(f"it is {what}, and a regular file is expected",
                      errno.EISDIR if what == "a directory" else errno.EINVAL)


def _too_large(size: int, most: int) -> FileRefused:
    return FileRefused(f"it has {size} bytes, and at most {most} are read", errno.EFBIG)
