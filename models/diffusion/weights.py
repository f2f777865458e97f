"""Tensors of a directory's parts, to the parameters of a network.

Protocol: `slots(network)` names every tensor that a file must hold, and where it goes; `load` checks names
and shapes of the whole file, then reads into the parameters, as models/weights.py does. What lies
differently in a file is told by its entry, so it is turned while it is read: filters (O, C, KH, KW), 1x1
filters of linear layers, and the halves of GEGLU.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.errors import WeightError
from tinygrad_nv.runtime.memory import allocate_arena
from tinygrad_nv.runtime.memory_pool import label_allocations

from ..checkpoint import ITEM_BYTES, Checkpoint, TensorEntry, open_checkpoint
from ..layers import LayerNorm
from ..weights import WeightSlice, check, fill_slots, tensors_of
from .layers import Conv2d, GatedLinear

STEMS = ("diffusion_pytorch_model", "diffusion_pytorch_model.fp16", "model", "model.fp16")
# names of autoencoders before diffusers 0.15, and what may stand before the names of a text encoder
OLD = {".query.": ".to_q.", ".key.": ".to_k.", ".value.": ".to_v.", ".proj_attn.": ".to_out.0."}
PREFIX, UNREAD = "text_model.", "embeddings.position_ids"
GATED_ROWS = (":value", ":gate")


def slots(network: Any) -> dict[str, WeightSlice]:
    """Every tensor a file must hold, by its name there."""
    return {name: slot for name, slot, _ in _walk(network, "")}


def _walk(module: Any, prefix: str) -> Iterator[tuple[str, WeightSlice, Any]]:
    """Names, slots, and the layer that each belongs to."""
    stored = getattr(type(module), "STORED", {})
    for attribute, value in vars(module).items():
        names = [_join_names(prefix, name) for name in stored.get(attribute, (attribute,))]
        if isinstance(value, Tensor): yield names[0], WeightSlice(value, 0, _shape(value)), module
        elif isinstance(value, list):
            for i, each in enumerate(value): yield from _walk(each, f"{names[0]}.{i}")
        elif isinstance(value, GatedLinear): yield from _swap_gate(value, names[0])
        elif len(names) > 1: yield from _split_stacked(value, names)
        elif isinstance(value, LayerNorm) or type(value).__module__.startswith(__package__ or "."):
            yield from _walk(value, names[0])


def _split_stacked(layer: Any, names: list[str]) -> Iterator[tuple[str, WeightSlice, Any]]:
    """Yields the stored layers, of as many rows each, that one linear layer holds."""
    for kind, tensor in vars(layer).items():
        if not isinstance(tensor, Tensor): continue
        rows, *rest = _shape(tensor)
        each = rows // len(names)
        for i, name in enumerate(names):
            yield f"{name}.{kind}", WeightSlice(tensor, i * each, (each, *rest)), layer


def _swap_gate(layer: GatedLinear, name: str) -> Iterator[tuple[str, WeightSlice, Any]]:
    """Yields the halves of GEGLU: the first half of a file's rows is the second here."""
    for kind, tensor in vars(layer).items():
        if not isinstance(tensor, Tensor): continue
        rows, *rest = _shape(tensor)
        for half, first in zip(GATED_ROWS, (rows // 2, 0), strict=True):
            yield f"{name}.{kind}{half}", WeightSlice(tensor, first, (rows // 2, *rest)), layer


def _join_names(prefix: str, name: str) -> str: return ".".join(each for each in (prefix, name) if each)


def _shape(tensor: Tensor) -> tuple[int, ...]: return tuple(int(extent) for extent in tensor.shape)


def load(network: Any, directory: Path, unread: tuple[str, ...] = (),
         progress: Callable[[int, int], None] | None = None) -> int:
    """Fills every parameter of a network from a directory, except for tensors whose names begin with one of
    `unread`; returns bytes read. Raises `WeightError`."""
    checkpoint, wanted = _open(directory), slots(network)
    layers = {name: layer for name, _, layer in _walk(network, "")}
    found = {name: entry for name, entry in _rename(checkpoint.entries).items()
             if not name.startswith((*unread, UNREAD))}
    checkpoint.entries = dict(_reorder(found, wanted, layers))
    check(wanted, checkpoint.entries, False, directory)
    with label_allocations("weights"):
        allocate_arena(tensors_of(wanted.values()))
    return fill_slots(checkpoint, wanted, progress)


def _open(directory: Path) -> Checkpoint:
    for stem in STEMS:
        if any((directory / f"{stem}.safetensors{index}").is_file() for index in ("", ".index.json")):
            return open_checkpoint(directory, stem)
    raise WeightError(f"{directory} holds no weights",
                      f"one of {', '.join(f'{stem}.safetensors' for stem in STEMS)}",
                      "download the safetensors files into the directory")


def _rename(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    made = {}
    for name, entry in entries.items():
        name = name.removeprefix(PREFIX)
        if "attentions" in name:
            for old, new in OLD.items(): name = name.replace(old, new)
        made[name] = replace(entry, name=name)
    return made


def _reorder(entries: dict[str, TensorEntry], wanted: Collection[str],
            layers: dict[str, Any]) -> Iterator[tuple[str, TensorEntry]]:
    """Entries as parameters lie."""
    for name, entry in entries.items():
        if name + GATED_ROWS[0] in wanted:
            rows, size = entry.shape[0] // 2, ITEM_BYTES[entry.dtype]
            for i, half in enumerate(GATED_ROWS):
                path, at = entry.file_offset
                at += i * rows * math.prod(entry.shape[1:]) * size
                yield name + half, replace(entry, shape=(rows, *entry.shape[1:]), file_offset=(path, at))
        elif len(entry.shape) == 4 and isinstance(layers.get(name), Conv2d):
            o, c, kh, kw = entry.shape
            yield name, replace(entry, shape=(o, kh, kw, c), strides=(c * kh * kw, kw, 1, kh * kw))
        elif len(entry.shape) == 4 and entry.shape[2:] == (1, 1):
            yield name, replace(entry, shape=entry.shape[:2])
        else: yield name, entry
