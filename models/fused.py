"""Experts that a checkpoint stores as one tensor a layer, listed as the matrices of each expert.

Protocol: `apart(config, entries, directory)` replaces, of a layer's experts with I columns between hidden
states of H,

    gate_up_proj [E, H, 2 I]    columns gate, up, gate, up … ("interleaved"), or gate | up ("halves")
    down_proj    [E, I, H]

and their biases gate_up_proj_bias [E, 2 I] and down_proj_bias [E, H] by what other checkpoints have:
gate_proj, up_proj [I, H] and down_proj [H, I] of each expert, which are strided views of the same bytes. Of
MXFP4 a checkpoint has instead

    gate_up_proj_blocks [E, 2 I, H / 32, 16], gate_up_proj_scales [E, 2 I, H / 32]    and so of down_proj

of which each expert's matrix is listed as bfloat16, which holds its numbers exactly (mxfp4.py). Raises
`WeightError` that lists what is missing or of another shape.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tinygrad_nv.errors import WeightError

from .checkpoint import ITEM_BYTES, TensorEntry
from .config import ModelConfig
from .moe_config import MoEConfig
from .mxfp4 import GROUP

DOWN, GATE_UP, BIAS = "down_proj", "gate_up_proj", "_bias"


def apart(config: ModelConfig, entries: dict[str, TensorEntry], directory: Path) -> dict[str, TensorEntry]:
    """The entries of a checkpoint with each expert's own; as they are where a family has no such tensors."""
    moe, fused = config.moe, config.names.fused
    if moe is None or not fused: return entries
    prefixes = [f"model.layers.{i}.{config.names.expert.removesuffix('.{}')}"
                for i, mixture in enumerate(moe.layers) if mixture]
    shapes = _shapes(moe, config.hidden_size)
    quantised = (config.quantization or {}).get("quant_method") == "mxfp4"
    stored = {name: _packed(shape) if quantised and not name.endswith(BIAS) else {"": shape}
              for name, shape in shapes.items()}
    _require({f"{prefix}.{name}{suffix}": shape for prefix in prefixes for name, each in stored.items()
              for suffix, shape in each.items()}, entries, directory)
    made, (gate, up, down) = dict(entries), config.names.expert_matrices
    step, second = (2, 1) if fused == "interleaved" else (1, moe.width)
    for prefix in prefixes:
        for name, shape in shapes.items():
            found, kind = [made.pop(f"{prefix}.{name}{suffix}") for suffix in stored[name]], "weight"
            if name.endswith(BIAS): kind = "bias"
            parts = {gate: (0, step, moe.width), up: (second, step, moe.width)}
            if not name.startswith(GATE_UP): parts = {down: (0, 1, shape[-1])}
            for i in range(moe.experts):
                for one, which in parts.items():
                    view = _columns(found[0], i, *which) if len(found) == 1 else \
                        _matrix(found, i, *which, shape[1])
                    own = f"{prefix}.{i}.{one}.{kind}"
                    made[own] = replace(view, name=own)
    return made


def _shapes(moe: MoEConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors."""
    shapes: dict[str, tuple[int, ...]] = {GATE_UP: (moe.experts, hidden, 2 * moe.width),
                                          DOWN: (moe.experts, moe.width, hidden)}
    if moe.biased:
        shapes |= {f"{name}{BIAS}": (moe.experts, shape[-1]) for name, shape in shapes.items()}
    return shapes


def _packed(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors of matrices of MXFP4 that would be of a shape [experts, inputs, outputs]."""
    experts, inputs, outputs = shape
    groups = -(-inputs // GROUP)
    return {"_blocks": (experts, outputs, groups, GROUP // 2), "_scales": (experts, outputs, groups)}


def _matrix(found: Sequence[TensorEntry], expert: int, first: int, step: int, count: int,
            inputs: int) -> TensorEntry:
    """Rows first, first + step … of an expert's matrix of MXFP4."""
    parts = []
    for entry in found:
        (path, offset), width = entry.file_offset, math.prod(entry.shape[2:])
        begin = (expert * entry.shape[1] + first) * width
        parts.append(replace(entry, shape=(count, width), strides=(step * width, 1),
                             file_offset=(path, offset + begin)))
    return TensorEntry("", "bfloat16", (count, inputs), parts[0].file_offset, None, tuple(parts))


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
        return name in entries and entries[name].shape == shape \
            and (entries[name].dtype == "U8") == name.endswith(("_blocks", "_scales"))

    def found(name: str) -> str:
        return f": found {entries[name].dtype} {list(entries[name].shape)}" if name in entries else ""
    lines = [f"  {name} {list(shape)}{found(name)}" for name, shape in wanted.items()
             if not fits(name, shape)]
    if not lines: return
    more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
    title = f"experts in {directory} are missing or of another shape"
    raise WeightError("\n".join([title, *lines[:8], *more]),
                      "the experts of every layer, in the shape config.json implies",
                      "use the config.json that belongs to these weights, or download the directory again")
