"""Tensors that a checkpoint must hold, and where in the network each is stored.

Protocol: `slots(model)` maps every Hugging Face name to a `WeightSlice`: rows [first, first + count) of one
parameter. `load(model, directory)` checks names and shapes of the whole checkpoint before it reads a byte,
raises on any gap, and then reads straight into the rows, in chunks of `CHUNK` bytes on `READERS` threads: one
copy from file to device. If the file's dtype is not the model's, chunks have `CONVERTED_CHUNK` bytes, and
each thread needs about six times that while it converts.
"""
from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.readers.reader import ONLINE, StoredMatrix, reader_of
from tinygrad_nv.quant.types import nbytes as matrix_bytes
from tinygrad_nv.runtime.memory import allocate_arena, write
from tinygrad_nv.runtime.memory_pool import label_allocations

from .attention import Attention
from .cache_scales import read_cache_scales
from .checkpoint import (
    FLOAT_BYTES,
    ITEM_BYTES,
    Checkpoint,
    TensorEntry,
    dtype_error,
    dtype_of,
    is_split_by_rows,
    open_checkpoint,
)
from .config import ModelConfig
from .feed_forward import MixtureOfExperts
from .fit import EMBEDDING, HEAD, decoder_sizes, require_sizes
from .latent import LatentAttention
from .llama import Llama
from .multimodal import language_entries
from .parts import apart, layer_bytes
from .quantised.layers import Plan, fill, make_plan, place, projections, read_layer, require_zeros
from .quantised.repacked import open_cache
from .tied import untie

# A second thread doubles the rate of page faults and copies; disks are faster with a queue of a few reads.
READERS = min(4, os.cpu_count() or 1)
CHUNK = 16 << 20
CONVERTED_CHUNK = 1 << 20  # NumPy makes about five temporaries of this size while it converts
FLOATS = tuple(FLOAT_BYTES)


@dataclass(frozen=True)
class WeightSlice:
    """Rows [first, first + shape[0]) of `tensor`; `shape` is that of the checkpoint's tensor."""
    tensor: Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def offset(self) -> int:
        """Byte offset of the first row in the parameter's memory."""
        return self.first * math.prod(self.shape[1:]) * self.tensor.dtype.itemsize


def _whole(tensor: Tensor) -> WeightSlice:
    return WeightSlice(tensor, 0, tuple(int(s) for s in tensor.shape))


def _of_vocabulary(model: Llama, tensor: Tensor) -> WeightSlice:
    """The rows of the vocabulary that a network has."""
    whole = _whole(tensor)
    if model.parallel is None: return whole
    return replace(whole, shape=(model.parallel.rows(model.config.vocab_size)[1], *whole.shape[1:]))


def slots(model: Llama) -> dict[str, WeightSlice]:
    """Every tensor the checkpoint must hold, by its Hugging Face name, layer by layer."""
    c = model.config
    out, stage = dict[str, WeightSlice](), model.parallel
    embeds, ends = stage is None or stage.first, stage is None or stage.last
    if embeds or (c.tied and ends): out[EMBEDDING] = _of_vocabulary(model, model.embedding)
    if ends: out[f"{c.names.last_norm}.weight"] = _whole(model.norm.weight)
    if ends and not c.tied: out[HEAD] = _of_vocabulary(model, model.head)
    for i, block in enumerate(model.blocks):
        layer, attention, names = f"model.layers.{i}", block.attention, c.names_of(i)
        for name, norm in ((names.attention_norm, block.attention_norm),
                           (names.attention_post_norm, block.attention_post_norm),
                           (names.feed_forward_norm, block.feed_forward_norm),
                           (names.feed_forward_post_norm, block.feed_forward_post_norm),
                           *(attention.norms.items() if attention is not None else ())):
            if norm is not None: out[f"{layer}.{name}.weight"] = _whole(norm.weight)
        if isinstance(attention, Attention) and attention.sinks is not None:
            out[f"{layer}.{names.sinks}"] = _whole(attention.sinks)
        for name, tensor in getattr(attention, "tensors", {}).items(): out[f"{layer}.{name}"] = _whole(tensor)
        for name, part in getattr(attention, "parts", {}).items():
            out[f"{layer}.{name}"] = WeightSlice(part.tensor, part.first,
                                                 (part.count, *_whole(part.tensor).shape[1:]))
        if isinstance(block.feed_forward, MixtureOfExperts): out |= _experts(model, i, block.feed_forward)
        for each in projections(model, i):
            out[f"{each.name}.weight"] = WeightSlice(each.linear.weight, each.first, each.shape)
            if (bias := each.linear.bias) is not None:
                out[f"{each.name}.bias"] = WeightSlice(bias, each.first, (each.rows,))
    return out


def _experts(model: Llama, layer: int, block: MixtureOfExperts) -> dict[str, WeightSlice]:
    """Returns the slots of a mixture of experts: its router, and each expert's rows of the stacked
    matrices."""
    names, prefix, width, hidden = model.config.names, f"model.layers.{layer}", block.moe.width, block.inputs
    out = {f"{prefix}.{names.router}.weight": _whole(block.router)}
    if block.router_bias is not None: out[f"{prefix}.{names.router}.bias"] = _whole(block.router_bias)
    if block.choice_bias is not None: out[f"{prefix}.{names.choice_bias}"] = _whole(block.choice_bias)
    if block.shared_gate is not None:
        out[f"{prefix}.{names.shared_expert}_gate.weight"] = _whole(block.shared_gate)
    *inner, down = names.expert_matrices
    for i, number in enumerate(block.own):
        expert = f"{prefix}.{names.expert.format(number)}"
        for at, matrix in enumerate(inner):
            first = (len(inner) * i + at) * width
            out[f"{expert}.{matrix}.weight"] = WeightSlice(block.gate_up, first, (width, hidden))
        out[f"{expert}.{down}.weight"] = WeightSlice(block.down, i * hidden, (hidden, width))
        if block.gate_up_bias is not None and block.down_bias is not None:
            for at, matrix in enumerate(inner):
                first = (len(inner) * i + at) * width
                out[f"{expert}.{matrix}.bias"] = WeightSlice(block.gate_up_bias, first, (width,))
            out[f"{expert}.{down}.bias"] = WeightSlice(block.down_bias, i * hidden, (hidden,))
    return out


def check(wanted: Mapping[str, WeightSlice], entries: Mapping[str, TensorEntry], tied: bool,
          directory: Path) -> None:
    """Raises `WeightError` listing every missing, unexpected and mis-shaped tensor."""
    for name in wanted:
        if name in entries and entries[name].dtype not in FLOATS:
            raise dtype_error(entries[name].file_offset[0], name, entries[name].dtype)
    # a tied model may still store its head; `untie` compares it with the embedding
    surplus = {HEAD} if tied else set()
    missing = [n for n in wanted if n not in entries]
    unexpected = [n for n in entries if n not in wanted and n not in surplus]
    shapes = [f"{n}: {list(entries[n].shape)}, expected {list(slot.shape)}" for n, slot in wanted.items()
              if n in entries and entries[n].shape != slot.shape]
    if not (missing or unexpected or shapes): return
    lines = [f"the weights in {directory} do not fit the model of its config.json"]
    for title, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", shapes)):
        if names: lines.append(f"  {title} ({len(names)}): " + _some(names))
    raise WeightError("\n".join(lines),
                      "every tensor of the architecture, once, in the shape config.json implies",
                      "use the config.json that belongs to these weights, or download the directory again")


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


def main_dtype(directory: Path) -> str:
    """The dtype of most of a checkpoint's bytes, for a config.json that does not name one."""
    weight: Counter[str] = Counter()
    for entry in language_entries(open_checkpoint(directory).entries).values():
        if entry.dtype in FLOATS: weight[entry.dtype] += entry.nbytes
    return weight.most_common(1)[0][0] if weight else "float32"


def nbytes(config: ModelConfig, dtype: DType, directory: Path) -> int:
    """Bytes of all parameters in memory: quantised ones as they are stored, the others in `dtype`, sparse
    ones with their zeros."""
    if config.quantization is None: return config.parameters * dtype.itemsize
    if config.quantization["quant_method"] == ONLINE: return _online_nbytes(config, dtype)
    # blocks of a tied embedding are listed twice
    found = language_entries(open_checkpoint(directory).entries)
    entries = {(each.file_offset, each.shape): each for each in found.values()}
    def item(each: TensorEntry) -> int:
        return dtype.itemsize if each.dtype in FLOATS else ITEM_BYTES[each.dtype]
    return sum(math.prod(each.shape) * item(each) for each in entries.values())


def _online_nbytes(config: ModelConfig, dtype: DType) -> int:
    """Returns the bytes of weights that are quantised as they are read."""
    assert config.quantization is not None
    reader, model, made = reader_of(config.quantization, "config.json"), Llama(config, dtype), 0
    stored = {name: ("F32", slot.shape) for name, slot in slots(model).items()}
    for name, (_, shape) in stored.items():
        found = reader.matrix(name.removesuffix(".weight"), (shape[0], shape[-1]), stored)
        made += math.prod(shape) * dtype.itemsize if found is None else \
            matrix_bytes(found.type, shape[0], shape[1])
    return made


def load(model: Llama, directory: Path, progress: Callable[[int, int], None] | None = None,
         headless: bool = False) -> int:
    """Fills every parameter of `model` from `directory`; returns bytes read. `headless`: logits are not
    computed, so the head in the files of a tied model may differ, and one for classification is not read
    here (classifier.py).

    `progress(done, total)` is called with bytes. Raises `WeightError` before anything is read if the
    checkpoint lacks tensors, and while reading if a file is shorter than its header says."""
    if model.config.tied and not headless: untie(model, directory)
    found = open_for(model, directory, headless)
    checkpoint, plan, wanted = found.checkpoint, found.plan, found.wanted
    for slot in found.zeros: _fill_zeros(slot)
    require_zeros(plan, checkpoint.entries)
    if model.config.quantization is not None: model.cache_scales = _own_scales(model, checkpoint)
    with label_allocations("weights"):
        allocate_arena(tensors_of(wanted.values()))
    for name in wanted.keys() & {EMBEDDING, HEAD}: _fill_rest(wanted[name])
    sizes, done = layer_bytes([layer.parts for layer in plan.layers], checkpoint.entries), 0
    total = sum(checkpoint.entries[name].nbytes for name in wanted) + sum(sizes)
    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(_read, checkpoint, *chunk) for chunk in _chunks(wanted, checkpoint.entries)]
        try:
            for count in chain((future.result() for future in as_completed(reading)),
                               _fill(model, found, readers, sizes)):
                done += count
                if progress is not None: progress(done, total)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    for block in model.blocks:
        if isinstance(block.attention, LatentAttention): block.attention.dequantize()
    return total


@dataclass(frozen=True)
class Opened:
    """A checkpoint that fits a model: what is quantised, where the other tensors go, and slots that it has
    nothing for, which are zeros."""
    checkpoint: Checkpoint
    plan: Plan
    wanted: dict[str, WeightSlice]
    zeros: list[WeightSlice]


def open_for(model: Llama, directory: Path, headless: bool = False) -> Opened:
    """The checkpoint of a directory, of which headers are read; of a rank's network its part. Raises
    `WeightError`, `ModelError`."""
    checkpoint, parallel = open_checkpoint(directory), model.parallel
    config, file = model.config if parallel is None else parallel.whole, str(directory / "config.json")
    entries = _without_draft_layers(config, language_entries(checkpoint.entries, config.names.spell))
    if config.tied and EMBEDDING not in entries and HEAD in entries: entries[EMBEDDING] = entries.pop(HEAD)
    if headless: entries = {name: each for name, each in entries.items() if not name.startswith("score.")}
    require_sizes(decoder_sizes(config), entries, directory)
    checkpoint.entries = apart(config, entries, directory)
    reader, elsewhere = None, set[str]()
    if parallel is not None:
        from .shares import cut_checkpoint
        whole = Llama(config, model.dtype, model.device)
        plan = make_plan(whole, checkpoint.entries, file)
        check_slots(whole, plan, checkpoint.entries, directory)
        reader, elsewhere = cut_checkpoint(model, parallel, checkpoint, plan, _shapes, file)
    plan = make_plan(model, checkpoint.entries, file, reader)
    wanted = check_slots(model, plan, checkpoint.entries, directory, elsewhere)
    every = slots(model)
    return Opened(checkpoint, plan, wanted, [every[name] for name in sorted(elsewhere)])


def _shapes(model: Llama) -> dict[str, tuple[int, ...]]:
    return {name: slot.shape for name, slot in slots(model).items()}


def own_nbytes(model: Llama, directory: Path) -> int:
    """Bytes of the weights of a rank's network. Raises as loading them does."""
    found = open_for(model, directory)
    tensors = tensors_of([*found.wanted.values(), *found.zeros])
    return sum(int(each.nbytes()) for each in tensors) + sum(
        matrix_bytes(part[0].type, *part[1]) for layer in found.plan.layers for part in layer.parts
        if isinstance(part, tuple) and isinstance(part[0], StoredMatrix))


def check_slots(model: Llama, plan: Plan, entries: Mapping[str, TensorEntry], directory: Path,
                elsewhere: Collection[str] = ()) -> dict[str, WeightSlice]:
    """The slots of tensors that are read as floats, without those of `elsewhere`. Raises `WeightError` as
    `check` does."""
    wanted = {name: slot for name, slot in slots(model).items()
              if name not in plan.replaced and name not in elsewhere}
    wanted |= {name: _whole(tensor) for name, tensor in plan.plain.items()}
    theirs = plan.tensors | plan.unread
    wanted |= _thirds(wanted, entries)
    check(wanted, {name: entry for name, entry in entries.items() if name not in theirs}, model.config.tied,
          directory)
    return wanted


def _thirds(wanted: Mapping[str, WeightSlice],
            entries: Mapping[str, TensorEntry]) -> dict[str, WeightSlice]:
    """The slices of convolutions that transformers saves in thirds, whatever the widths of their parts."""
    made, parts = dict[str, WeightSlice](), defaultdict[int, list[str]](list)
    for name, slot in wanted.items():
        if name.endswith("_conv1d.weight") and name in entries: parts[id(slot.tensor)].append(name)
    for names in parts.values():
        rows, first = [entries[name].shape[0] for name in names], 0
        if sum(rows) != int(wanted[names[0]].tensor.shape[0]): continue
        for name, count in zip(names, rows, strict=True):
            made[name], first = replace(wanted[name], first=first,
                                        shape=(count, *wanted[name].shape[1:])), first + count
    return made


def _own_scales(model: Llama, checkpoint: Checkpoint) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Scales of the cache, of a network's own heads."""
    if (parallel := model.parallel) is None: return read_cache_scales(model.config, checkpoint.entries)
    own = parallel.own_heads(heads := parallel.whole.num_kv_heads)
    found = read_cache_scales(replace(model.config, num_kv_heads=heads), checkpoint.entries)
    return {layer: (keys[own.start:own.stop], values[own.start:own.stop])
            for layer, (keys, values) in found.items()}


def _fill_rest(slot: WeightSlice) -> None:
    """Zeros behind the rows of a rank that has fewer of the vocabulary than others."""
    end = slot.offset + math.prod(slot.shape) * slot.tensor.dtype.itemsize
    if rest := int(slot.tensor.nbytes()) - end: write(slot.tensor, end, memoryview(bytes(rest)))


def _fill_zeros(slot: WeightSlice) -> None:
    write(slot.tensor, slot.offset, memoryview(bytes(math.prod(slot.shape) * slot.tensor.dtype.itemsize)))


def list_loaded(model: Llama) -> list[Tensor]:
    """The tensors that `load` filled of a model that is not quantised."""
    return tensors_of(slots(model).values())


def tensors_of(found: Iterable[WeightSlice]) -> list[Tensor]:
    """The tensors of slices, each once."""
    return list({id(each.tensor): each.tensor for each in found}.values())


def read_again(model: Llama, directory: Path) -> int:
    """Reads the weights of a model that is not quantised again, into the memory that they have; returns bytes
    read. Raises `WeightError` as `load` does."""
    found = open_for(model, directory)
    return fill_slots(found.checkpoint, found.wanted)


def _without_draft_layers(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Without layers that predict further tokens (MTP), which stand after the others, or beside them, and
    are not read."""
    after = tuple(f"model.layers.{config.num_layers + i}." for i in range(config.draft_layers))
    after += config.names.unread
    return {name: entry for name, entry in entries.items()
            if not (name.startswith(after) or name.endswith(config.names.unread_ends))}


def _fill(model: Llama, found: Opened, readers: ThreadPoolExecutor, sizes: list[int]) -> Iterator[int]:
    """Fills quantised layers: bytes of each. Those that are kept on disk `readers` read; while tinygrad
    repacks one of the others, in this thread, another is read."""
    layers, entries, ahead = found.plan.layers, found.checkpoint.entries, None
    with open_cache(model, found.plan, entries) as kept, ThreadPoolExecutor(1) as reader:
        left: list[int] = []
        for number, parts in enumerate(kept.restore(readers)):
            if parts is None: left.append(number)
            else:
                place(model, layers[number], parts)
                yield sizes[number]
        for number, after in zip_longest(left, left[1:]):
            arrived = (ahead or reader.submit(read_layer, layers[number], entries)).result()
            ahead = None if after is None else reader.submit(read_layer, layers[after], entries)
            kept.add(number, fill(model, layers[number], arrived))
            yield sizes[number]


def fill_slots(checkpoint: Checkpoint, wanted: Mapping[str, WeightSlice],
               progress: Callable[[int, int], None] | None = None) -> int:
    """Reads the tensors of `wanted`, which are allocated, into their slots; returns bytes read."""
    total, done = sum(checkpoint.entries[name].nbytes for name in wanted), 0
    with ThreadPoolExecutor(READERS) as readers:
        reading = [readers.submit(_read, checkpoint, *chunk) for chunk in _chunks(wanted, checkpoint.entries)]
        try:
            for future in as_completed(reading):
                done += future.result()
                if progress is not None: progress(done, total)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return total


def _chunks(wanted: Mapping[str, WeightSlice],
            entries: Mapping[str, TensorEntry]) -> Iterator[tuple[TensorEntry, int, int, WeightSlice]]:
    """Chunks of at most `CHUNK` bytes, `CONVERTED_CHUNK` where the dtype changes, in file order, so that a
    disk reads forward."""
    for name in sorted(wanted, key=lambda name: entries[name].file_offset):
        entry, count = entries[name], math.prod(entries[name].shape)
        same = dtype_of(entry.dtype) == wanted[name].tensor.dtype
        step = (CHUNK if same else CONVERTED_CHUNK) // ITEM_BYTES[entry.dtype]
        if entry.strides is not None:
            row = math.prod(entry.shape[1:])
            step = max(step // row, 1) * row if is_split_by_rows(entry) else max(count, 1)
        for begin in range(0, count, step): yield entry, begin, min(begin + step, count), wanted[name]


def _read(checkpoint: Checkpoint, entry: TensorEntry, begin: int, end: int, slot: WeightSlice) -> int:
    checkpoint.read_into(entry, begin, end, slot.tensor, slot.offset + begin * slot.tensor.dtype.itemsize)
    return (end - begin) * entry.nbytes // math.prod(entry.shape)
