"""The header of a safetensors file: which tensors lie where, checked before anything is made of them.

Protocol: `read_layouts(path)` returns where the data begin, and the `Layout` of each tensor. Raises
`WeightError` for a file that is damaged, or above the limits below. Neither numbers nor names of a header are
believed: extents have a size that a file can have, and no byte belongs to two tensors.
"""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from tinygrad_nv.errors import WeightError
from tinygrad_nv.files import parse_json, regular_size

MAX_HEADER_BYTES = 32 << 20     # limit: bytes of a safetensors header or index; the largest has 21 MB
MAX_TENSORS = 300_000           # limit: tensors of a model's safetensors files; the largest has 140 000
MAX_DIMENSIONS = 64             # of a tensor, as NumPy has it
MAX_ELEMENTS = (1 << 63) - 1    # of a tensor, and bytes of a file
LENGTH = 8                      # bytes of a header's length, little-endian


class Layout(NamedTuple):
    """A tensor: its bytes are [begin, end) of the data."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def damage(path: Path, what: str) -> WeightError:
    """The error for a file that does not fit its header."""
    return WeightError(f"{path} is damaged: {what}", "a complete safetensors file", "download the file again")


def read_layouts(path: Path, ignored: tuple[str, ...]) -> tuple[int, list[Layout]]:
    """See above; tensors whose names end in one of `ignored` are left out. Raises OSError, too."""
    size = regular_size(path)
    if size < LENGTH: raise damage(path, f"{size} bytes long")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH), "little")
        if length > size - LENGTH:
            raise damage(path, f"its header of {length} bytes does not fit in {size} bytes")
        if length > MAX_HEADER_BYTES:
            raise WeightError(f"{path} has a header of {length} bytes", f"at most {MAX_HEADER_BYTES}",
                              "save the model in several files")
        text = file.read(length)
    try: header = parse_json(text.decode("utf-8"), unique=True)
    except ValueError as error: raise damage(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict): raise damage(path, "its header is not an object")
    if len(header) > MAX_TENSORS:
        raise WeightError(f"{path} has {len(header)} tensors", f"at most {MAX_TENSORS}",
                          "use a file as it was published")
    found = [_layout(path, name, info) for name, info in header.items()
             if name != "__metadata__" and not name.endswith(ignored)]
    _require_apart(path, found, LENGTH + length, size)
    return LENGTH + length, found


def _layout(path: Path, name: str, info: Any) -> Layout:
    try: dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise damage(path, f"tensor {name[:200]} has no layout") from error
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        what = f"{len(shape)} dimensions" if isinstance(shape, list) else f"shape {str(shape)[:60]}"
        raise damage(path, f"tensor {name[:200]} has {what}")
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise damage(path, f"tensor {name[:200]} has dtype {dtype!r:.60}, shape {_short(shape)} and "
                            f"offsets {_short([begin, end])}")
    if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS or max(begin, end) > MAX_ELEMENTS:
        raise damage(path, f"tensor {name[:200]} has shape {_short(shape)} and offsets "
                            f"{_short([begin, end])}, more than a file has")
    return Layout(name, dtype, tuple(shape), begin, end)


def _short(numbers: list[Any]) -> str:
    return f"{numbers}"[:100]


def _require_apart(path: Path, layouts: list[Layout], start: int, size: int) -> None:
    """Raises `WeightError` where tensors end behind the file, or share bytes."""
    last: Layout | None = None
    for each in sorted(layouts, key=lambda layout: layout.begin):
        if start + each.end > size:
            raise damage(path, f"tensor {each.name[:200]} ends at byte {start + each.end}, the file at "
                                f"{size} (truncated?)")
        if each.end <= each.begin: continue
        if last is not None and each.begin < last.end:
            raise damage(path, f"tensors {last.name[:200]} and {each.name[:200]} share bytes")
        last = each
