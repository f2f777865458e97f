"""Parts of a checkpoint's tensors: indices along one axis, of which no more of a file is read.

Protocol: `cut(entry, part)` is an entry of the part, `read_part(entry, part)` its elements, or those of the
whole tensor for a part of None. Rows lie one behind the other: only they are read. Of columns each row's part
is read, or all of the rows if there is little between (checkpoint.py: SKIP). `layer_bytes` counts what is
read.

`apart(config, entries, directory)` lists experts that a checkpoint stores as one tensor a layer as the
matrices of each expert. It replaces, of a layer's experts with I columns between hidden states of H,

    gate_up_proj [E, H, 2 I]    columns gate, up, gate, up … ("interleaved"), or gate | up ("halves")
    down_proj    [E, I, H]

or as "rows" [E, 2 I, H], gate | up, and [E, H, I], and their biases gate_up_proj_bias [E, 2 I] and
down_proj_bias [E, H] by what other checkpoints have:
gate_proj, up_proj [I, H] and down_proj [H, I] of each expert, which are strided views of the same bytes. Of
MXFP4, which has blocks and scales instead of the first two, only the biases are taken apart here.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.readers.reader import StoredMatrix, TensorPart

from .checkpoint import ITEM_BYTES, NUMPY_DTYPES, TensorEntry, read_array, read_strided, safetensors_dtype
from .config import ModelConfig
from .layer_config import MoEConfig

BIAS = "_bias"


class Stored(Protocol):
    """A matrix of a checkpoint, by its tensors: a `StoredMatrix`, or one of floats."""

    @property
    def tensors(self) -> tuple[str, ...]: ...


def cut(entry: TensorEntry, part: TensorPart) -> TensorEntry:
    """A part of an entry: of rows as they lie, of columns with strides."""
    strides = entry.strides or tuple(math.prod(entry.shape[i + 1:]) for i in range(len(entry.shape)))
    shape = (*entry.shape[:part.axis], part.count, *entry.shape[part.axis + 1:])
    path, offset = entry.file_offset
    whole = entry.strides is None and part.axis == 0
    return replace(entry, shape=shape, strides=None if whole else strides,
                   file_offset=(path, offset + part.first * strides[part.axis] * ITEM_BYTES[entry.dtype]))


def read_part(entry: TensorEntry, part: TensorPart | None) -> np.ndarray:
    """The elements of a part; bfloat16 and fp8 as unsigned integers of their bits. Raises `WeightError`."""
    if part is None or part.count == entry.shape[part.axis]: return read_array(entry)
    if entry.parts or entry.strides is not None:
        chosen = slice(part.first, part.first + part.count)
        return read_array(entry)[(*(slice(None),) * part.axis, chosen)]
    own = cut(entry, part)
    if own.strides is None: return read_array(own)
    return np.frombuffer(read_strided(own), NUMPY_DTYPES[safetensors_dtype(entry)]).reshape(own.shape)


def layer_bytes(layers: Iterable[Iterable[tuple[Stored, tuple[int, int]] | Tensor]],
                entries: Mapping[str, TensorEntry]) -> list[int]:
    """Bytes of the files that each quantised layer needs, by its matrices. Rows and columns count alone,
    without the bytes between."""
    made = []
    for layer in layers:
        stored = [part[0] for part in layer if not isinstance(part, Tensor)]
        used = {(name, each.parts.get(name) if isinstance(each, StoredMatrix) else None)
                for each in stored for name in each.tensors}
        made.append(sum(_nbytes(entries[name], part) for name, part in used))
    return made


def _nbytes(entry: TensorEntry, part: TensorPart | None) -> int:
    if part is None or entry.parts: return entry.nbytes
    return entry.nbytes // entry.shape[part.axis] * part.count


def apart(config: ModelConfig, entries: dict[str, TensorEntry], directory: Path) -> dict[str, TensorEntry]:
    """The entries of a checkpoint with each expert's own; as they are where a family has no such tensors, or
    experts have their own. Raises `WeightError` that lists what is missing or of another shape."""
    moe, names = config.moe, config.names
    if moe is None or not names.fused: return entries
    layers = [f"model.layers.{i}." for i, mixture in enumerate(moe.layers) if mixture
              and config.has_feed_forward(i)]
    first, *others, third = (f"{names.expert.format(0)}.{matrix}." for matrix in names.expert_matrices)
    if any(name.startswith(f"{layer}{first}") for layer in layers for name in entries): return entries
    rows, (gate_up, down) = names.fused == "rows", names.fused_tensors
    shapes = _shapes(moe, config.hidden_size, gate_up, down, rows)
    if (config.quantization or {}).get("quant_method") == "mxfp4":
        shapes = {name: shape for name, shape in shapes.items() if name.endswith(BIAS)}
    _require({f"{layer}{name}": shape for layer in layers for name, shape in shapes.items()}, entries,
             directory)
    made, (step, up) = dict(entries), (2, 1) if names.fused == "interleaved" else (1, moe.width)
    for layer in layers:
        for name, shape in shapes.items():
            entry, suffix = made.pop(f"{layer}{name}"), "bias" if name.endswith(BIAS) else "weight"
            parts = {first: (0, step, moe.width), **dict.fromkeys(others, (up, step, moe.width))}
            if not name.startswith(gate_up): parts = {third: (0, 1, shape[-2] if rows else shape[-1])}
            for i in range(moe.experts):
                for one, part in parts.items():
                    own = f"{layer}{one.replace(names.expert.format(0), names.expert.format(i), 1)}{suffix}"
                    made[own] = replace((_rows if rows else _columns)(entry, i, *part), name=own)
    return made


def _shapes(moe: MoEConfig, hidden: int, gate_up: str, down: str, rows: bool) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's tensors."""
    shapes: dict[str, tuple[int, ...]] = {gate_up: (moe.experts, hidden, moe.inner),
                                          down: (moe.experts, moe.width, hidden)}
    if rows: shapes = {name: (count, wide, tall) for name, (count, tall, wide) in shapes.items()}
    if moe.biased:
        shapes |= {f"{name}{BIAS}": (moe.experts, shape[-1]) for name, shape in shapes.items()}
    return shapes


def _rows(entry: TensorEntry, expert: int, first: int, step: int, count: int) -> TensorEntry:
    """Rows first, first + 1 … of an expert."""
    assert step == 1, "rows that lie one after the other"
    strides = entry.strides or tuple(math.prod(entry.shape[i + 1:]) for i in range(len(entry.shape)))
    path, offset = entry.file_offset
    begin = expert * strides[0] + first * strides[1]
    return replace(entry, shape=(count, entry.shape[2]), strides=entry.strides and strides[1:],
                   file_offset=(path, offset + begin * ITEM_BYTES[entry.dtype]))


def _columns(entry: TensorEntry, expert: int, first: int, step: int, count: int) -> TensorEntry:
    """Columns first, first + step … of an expert, as rows; of a bias its elements."""
    strides = entry.strides or tuple(math.prod(entry.shape[i + 1:]) for i in range(len(entry.shape)))
    path, offset = entry.file_offset
    begin = expert * strides[0] + first * strides[-1]
    return replace(entry, shape=(count, *entry.shape[1:-1]), strides=(step * strides[-1], *strides[1:-1]),
                   file_offset=(path, offset + begin * ITEM_BYTES[entry.dtype]))


def _require(wanted: Mapping[str, tuple[int, ...]], entries: Mapping[str, TensorEntry],
             directory: Path) -> None:
    def fits(name: str, shape: tuple[int, ...]) -> bool:
        return name in entries and entries[name].shape == shape

    def shape_words(name: str) -> str:
        return f": found {list(entries[name].shape)}" if name in entries else ""
    lines = [f"  {name} {list(shape)}{shape_words(name)}" for name, shape in wanted.items()
             if not fits(name, shape)]
    if not lines: return
    more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    title = f"experts in {directory} are missing or of another shape"
    raise WeightError("\n".join([title, *lines[:8], *more]),
                      "the experts of every layer, in the shape config.json implies",
                      "use the config.json that belongs to these weights, or download the directory again")
