"""Shapes of steps, and their inputs, uploaded in one copy.

Protocol: `BatchShape.of(batch)` selects the captured step for a batch. Sequences with one new token are
decodes; the others are split into groups of `GROUP` tokens. Decode tokens come first. Each shape is compiled
and captured, so there are few: decodes are padded to a power of two, and the groups so that a step with
groups has `STEP_GROUPS` times GROUP tokens in all. `InputBuffer` is one int32 region on the device. The
sampler's inputs are first, at offsets that depend on the number of samples alone, so that one captured
sampler serves all steps with as many samples. The step's inputs follow. The host writes all words to
page-locked memory and uploads them in stream order; the next step's upload may be queued while the device
computes.

A token id below 0 is not known to the host: −1 − i is number i of the tokens sampled last. Padding tokens
have id 0 and length 0, padding samples slot −1.

`ShapeChoice(captured).of(shape, warm)` is the captured shape that a batch runs in: the shape itself, or a
larger captured one that has room: always after a warm-up, else while the shape is rare. A capture takes as
long as hundreds of small steps (0.3 s against 1 ms with the bundled model). `kept` are shapes that a bundle
has, which count as captured.
"""
from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, ScheduledSeq, SchedulerOutput
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Event, HostMemory, Upload
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.tile.sequences import COLUMNS

ALIGN = 64      # words: 256 bytes
STAGING_BUFFERS = 3     # steps whose uploads may be in flight
# sizes of a step with prefill, in groups; decodes count as groups of 8. From 8 on, at most a third is
# padding. 5, 17 and 33: prompts of 32, 128 and 256 tokens beside a few decodes, else 1.4 to 1.6 times as long
STEP_GROUPS = (1, 2, 4, 5, 8, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
NO_STATES = (0, 0, -1, 0, -1, -1)   # a sequence without tokens
SAMPLER = ("slots", "positions")   # inputs of the sampler, int32 [samples] each
CAPTURE_AFTER = 8   # uses of a shape before it is captured, if a larger captured shape serves it
MAX_PADDING = 4     # a larger shape serves a batch if it has at most so many times its tokens


@dataclass(frozen=True)
class BatchShape:
    """Shape of a step: decode tokens, groups, and samples, padded. `direct`: the samples are the decode
    tokens, in order. `adapted`: some of the tokens have an adapter."""
    decode: int
    groups: int
    samples: int
    direct: bool
    adapted: bool = False

    @property
    def num_tokens(self) -> int: return self.decode + GROUP * self.groups

    def __str__(self) -> str:
        groups = f" + {self.groups}·{GROUP}" if self.groups else ""
        return f"{self.decode}{groups} tokens, {self.samples} samples{', adapters' * self.adapted}"

    def has_room_for(self, other: BatchShape) -> bool:
        """Whether a batch of the other shape can be padded to this one."""
        if self.direct: return other.direct and self.decode >= other.decode and self.adapted == other.adapted
        return self.decode >= other.decode and self.groups >= other.groups \
            and self.samples >= other.samples and self.adapted == other.adapted

    @staticmethod
    def of(batch: SchedulerOutput) -> BatchShape:
        """The numbers of a batch, without padding."""
        decode = groups = 0
        direct, adapted = True, False
        for seq in batch.seqs:
            num_tokens, adapted = seq.num_tokens, adapted or seq.adapter >= 0
            direct = direct and len(seq.samples) == 1 and num_tokens == 1
            if num_tokens == 1: decode += 1
            else: groups += -(-num_tokens // GROUP)
        return BatchShape(decode, groups, batch.num_samples, direct, adapted)

    @property
    def capture_shape(self) -> BatchShape:
        """The shape that is captured for a batch with such numbers."""
        made = BatchShape.at_least(self.decode, self.groups, self.samples, self.direct)
        return replace(made, adapted=True) if self.adapted else made

    @staticmethod
    def at_least(decode: int, groups: int, samples: int, direct: bool) -> BatchShape:
        """The smallest shape with at least so many decodes, groups and samples."""
        if direct: return BatchShape(next_power_of_two(decode), 0, next_power_of_two(decode), True)
        if not groups: return BatchShape(next_power_of_two(decode), 0, next_power_of_two(samples), False)
        decode_tokens = max(GROUP, next_power_of_two(decode)) if decode else 0
        decode_groups = decode_tokens // GROUP
        whole = bisect_left(STEP_GROUPS, decode_groups + groups)
        # the model runner refuses shapes beyond the largest step
        groups = (STEP_GROUPS[whole] if whole < len(STEP_GROUPS) else decode_groups + groups) - decode_groups
        samples = 1 if samples < 2 else max(GROUP, next_power_of_two(samples))
        return BatchShape(decode_tokens, groups, samples, False)


def next_power_of_two(num_tokens: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, num_tokens - 1).bit_length()


@dataclass(frozen=True)
class InputField:
    """An input: its name, shape, and offset in words."""
    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int: return math.prod(self.shape)


@dataclass(frozen=True)
class InputLayout:
    """Offsets of the inputs of a shape, with block tables of `entries` pages for each of `groups` groups of
    layers. A token without an adapter has number `adapters`, that of the adapter slots. With `images` there
    are the rows that stand for tokens, and three positions a token (image_inputs.py); with `states` the
    sequences of layers that have such, of single tokens and of groups (tile/sequences.py)."""
    shape: BatchShape
    entries: int
    groups: int = 1
    adapters: int = 0
    images: bool = False
    states: bool = False

    @cached_property
    def fields(self) -> tuple[InputField, ...]:
        """All inputs, the sampler's first."""
        s, n, g = self.shape, self.entries, self.groups
        extents: dict[str, tuple[int, ...]] = dict.fromkeys(SAMPLER, (s.samples,))
        extents |= {"tokens": (s.num_tokens,)}
        if self.images: extents |= {"image_rows": (s.num_tokens,), "rope_positions": (3, s.num_tokens)}
        if s.adapted: extents["adapters"] = (s.num_tokens,)
        if not s.direct: extents["logits_indices"] = (s.samples,)
        for kind, rows in (("decode", s.decode), ("group", s.groups)):
            if not rows: continue
            extents |= {f"{kind}_lengths": (rows,), **dict.fromkeys(table_names(kind, g), (rows, n))}
            if self.states: extents[f"{kind}_states"] = (rows, len(COLUMNS))
        sizes = [-(-math.prod(extent) // ALIGN) * ALIGN for extent in extents.values()]
        offsets = accumulate(sizes, initial=0)
        return tuple(InputField(*each) for each in zip(extents, extents.values(), offsets, strict=False))

    @cached_property
    def spans(self) -> tuple[tuple[InputField, int, int], ...]:
        """Each input with its first word and its end."""
        return tuple((each, each.offset, each.offset + each.size) for each in self.fields)

    @cached_property
    def num_words(self) -> int:
        """Words to upload."""
        return self.fields[-1].offset + self.fields[-1].size


def table_names(kind: str, groups: int) -> list[str]:
    """Names of the inputs with block tables, one for each group of layers. `kind`: "decode" for single
    tokens, "group" for groups of tokens."""
    return [f"{kind}_table_{i}" for i in range(groups)]


class _StagingBuffer:
    """Page-locked memory, and the event after its last upload."""

    def __init__(self, host: HostMemory, event: Event) -> None:
        self.host, self.event, self.busy = host, event, False
        self.words = np.frombuffer(host.view, np.int32)


class InputBuffer:
    """The inputs of steps, on the device and in page-locked memory."""

    def __init__(self, device: str, limit: int) -> None:
        """`limit`: the capacity in words."""
        self.device, self.limit = device, limit
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.region: Buffer = region(device, 4 * self.limit)
        self.slots: list[_StagingBuffer] = []
        self._given_back = weakref.finalize(self, _give_back, self.slots)
        if isinstance(opened, NVDevice):
            with label_allocations("activations"):
                for _ in range(STAGING_BUFFERS):
                    self.slots.append(_StagingBuffer(opened.pool.host(4 * self.limit), opened.driver.event()))
        self.next_slot = 0

    def tensors(self, fields: Iterable[InputField], dtype: DType = dtypes.int32) -> dict[str, Tensor]:
        """Inputs of 32 bits as tensors over the region."""
        return {each.name: self._tensor(each, dtype) for each in fields}

    def _tensor(self, each: InputField, dtype: DType) -> Tensor:
        view = self.region.view(each.size, dtype, 4 * each.offset)
        return Tensor(UOp.from_buffer(view).reshape(each.shape))

    def open(self) -> np.ndarray:
        """The host's words, to be written now. Waits until their last upload is done."""
        if self.driver is None:
            Device[self.device].synchronize()
            return np.frombuffer(self.region.as_memoryview(force_zero_copy=True), np.int32)
        slot = self.slots[self.next_slot]
        if slot.busy: self.driver.wait_for(slot.event)
        slot.busy = False
        return slot.words

    def send(self, num_words: int) -> None:
        """Uploads the first `num_words` words, ahead of later launches."""
        if self.driver is None: return
        slot = self.slots[self.next_slot]
        self.driver.submit(Upload(self.region._buf, slot.host, 0, 4 * num_words))
        self.driver.record(slot.event)
        slot.busy = True
        self.next_slot = (self.next_slot + 1) % len(self.slots)

    def close(self) -> None:
        """Frees page-locked memory."""
        self._given_back()


def _give_back(slots: list[_StagingBuffer]) -> None:
    for slot in slots: slot.host.free()
    slots.clear()


class HostBlockTables:
    """Block tables by group of layers and slot, on the host. Rows are rewritten only when a table changed."""

    def __init__(self, slots: int, entries: int, groups: int = 1) -> None:
        self.array = np.full((groups, slots + 1, entries), -1, np.int32)     # the last slot: for padding
        self.written: list[Sequence[int]] = [()] * (slots + 1)

    def update(self, seq: ScheduledSeq) -> None:
        """Copies a sequence's block table if it changed: the same object has the same pages."""
        pages, written = seq.block_table, self.written[seq.slot]
        if pages is written: return
        groups, rows = len(self.array), self.array[:, seq.slot]
        now, before = len(pages) // groups, len(written) // groups
        rows[:, :now] = np.reshape(pages, (groups, now))
        rows[:, now:before] = -1
        self.written[seq.slot] = pages


def write_batch(words: np.ndarray, layout: InputLayout, batch: SchedulerOutput, tables: HostBlockTables,
                last_token: Callable[[int], int]) -> None:
    """Writes a batch in the layout of its shape. `last_token` returns the token that a slot sampled last."""
    shape, padding_slot = layout.shape, tables.array.shape[1] - 1
    into = {each.name: words[first:end].reshape(each.shape) for each, first, end in layout.spans}
    tokens, lengths, slot_of_token = [0] * shape.num_tokens, [0] * shape.decode, [padding_slot] * shape.decode
    group_lengths, slot_of_group = list[int](), list[int]()
    slots, positions, logits_indices = list[int](), list[int](), list[int]()
    token = 0
    for seq in batch.seqs:
        tables.update(seq)
        count = len(seq.tokens)
        if count < 2:
            first, token = token, token + 1
            tokens[first] = seq.tokens[0] if count else last_token(seq.slot)
            lengths[first], slot_of_token[first] = seq.start + 1, seq.slot
        else:
            first = shape.decode + GROUP * len(group_lengths)
            tokens[first:first + count] = seq.tokens
            num_groups = -(-count // GROUP)
            group_lengths += range(seq.start + GROUP, seq.start + GROUP * num_groups + 1, GROUP)
            slot_of_group += [seq.slot] * num_groups
        for sample in seq.samples:
            slots.append(sample.slot)
            positions.append(sample.position)
            logits_indices.append(first + sample.token_index)
    if layout.states: _write_states(into, batch)
    fill = shape.samples - len(slots)
    into["tokens"][:] = tokens
    if shape.adapted: into["adapters"][:] = _adapters(batch, shape, layout.adapters)
    into["slots"][:] = slots + [-1] * fill
    into["positions"][:] = positions + [0] * fill
    if not shape.direct: into["logits_indices"][:] = logits_indices + [0] * fill
    if shape.decode:
        into["decode_lengths"][:] = lengths
        for name, rows in zip(table_names("decode", layout.groups), tables.array, strict=True):
            np.take(rows, slot_of_token, axis=0, out=into[name])
    if shape.groups:
        none = shape.groups - len(group_lengths)
        into["group_lengths"][:] = group_lengths + [0] * none
        slot_of_group += [padding_slot] * none
        for name, rows in zip(table_names("group", layout.groups), tables.array, strict=True):
            np.take(rows, slot_of_group, axis=0, out=into[name])


def _write_states(into: dict[str, np.ndarray], batch: SchedulerOutput) -> None:
    """Writes the tables of sequences, as `write_batch` lays tokens out. Rows without tokens are padding."""
    rows: dict[str, list[tuple[int, ...]]] = {"decode_states": [], "group_states": []}
    first = 0
    for seq in batch.seqs:
        count, states = len(seq.tokens), seq.states
        assert states is not None, "a sequence without pages of states"
        if count < 2: rows["decode_states"].append((len(rows["decode_states"]), 1, *states))
        else:
            rows["group_states"].append((first, count, *states))
            first += -(-count // GROUP) * GROUP
    for name, found in rows.items():
        if name not in into: continue
        into[name][:] = NO_STATES
        if found: into[name][:len(found)] = found


def _adapters(batch: SchedulerOutput, shape: BatchShape, none: int) -> list[int]:
    """The adapter slot of each token, as `write_batch` lays tokens out; that of padding is `none`."""
    decode, groups = list[int](), list[int]()
    for seq in batch.seqs:
        own, count = none if seq.adapter < 0 else seq.adapter, len(seq.tokens)
        if count < 2: decode.append(own)
        else: groups += [own] * count + [none] * (-count % GROUP)
    decode += [none] * (shape.decode - len(decode))
    return decode + groups + [none] * (shape.num_tokens - shape.decode - len(groups))


class ShapeChoice:
    """The choice among `captured` shapes, which grow, and `kept` ones."""

    def __init__(self, captured: Collection[BatchShape], kept: Collection[BatchShape] = ()) -> None:
        self.captured, self.kept = captured, kept
        self.uses: Counter[BatchShape] = Counter()     # of shapes that are not captured

    def of(self, batch: BatchShape, warm: bool) -> BatchShape:
        """The shape that a batch with such numbers runs in."""
        shape = batch.capture_shape
        if shape.direct and (shape in self.captured or shape in self.kept): return shape
        most = math.inf if warm else MAX_PADDING * shape.num_tokens
        larger = [each for each in {*self.captured, *self.kept}
                  if each.num_tokens <= most and each.has_room_for(batch)]
        best = min(larger, key=lambda each: (each.num_tokens, each.samples), default=shape)
        if best == shape or best.num_tokens < shape.num_tokens: return best
        if not warm and (shape.direct or self.uses[shape] >= CAPTURE_AFTER): return shape
        self.uses[shape] += 1
        return best
