"""What a step is given: shapes of steps, and the words that reach the device in one upload.

Protocol: `Shape.of(batch)` says which captured step serves a batch. Works of one row are decode rows; others
are groups of `GROUP` rows. Rows of both are `rows` together, decode rows first. Few shapes exist, since each
is compiled and captured: decode rows are rounded up to a power of two, groups so that a step with some has
`STEPS` times GROUP rows in all. `Inbox` is one region of int32 of the device. Its first words are the
sampler's, at places that depend on the number of samples alone, so that one captured sampler serves all
steps with as many; then come the step's. Words are written on the host, then sent in stream order: the next
step's may be on their way while the device computes.

A token below 0 is one that the host does not know: −1 − i is number i of those the device chose last. Rows
that fill a step up have token 0 and length 0, samples slot -1.
"""
from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.engine.scheduling.batch import GROUP, Batch, Work
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Event, HostMemory, Upload
from tinygrad_nv.runtime.memory_pool import labelled

ALIGN = 64      # words: 256 bytes
DEPTH = 3       # steps whose words may be on their way
# groups of a step that has some, decode rows counted by eights; from 8 on the waste is a third at most
STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SAMPLER = ("slots", "places")   # inputs of the sampler, int32 [samples] each


@dataclass(frozen=True)
class Shape:
    """A step: decode rows, groups, and samples. `direct`: samples are of the decode rows, in order."""
    decode: int
    groups: int
    samples: int
    direct: bool

    @property
    def rows(self) -> int: return self.decode + GROUP * self.groups

    def __str__(self) -> str:
        groups = f" + {self.groups}·{GROUP}" if self.groups else ""
        return f"{self.decode}{groups} rows, {self.samples} samples"

    def holds(self, other: Shape) -> bool:
        """Whether a batch of the other shape can be written as one of this."""
        return not self.direct and self.decode >= other.decode and self.groups >= other.groups \
            and self.samples >= other.samples

    @staticmethod
    def of(batch: Batch) -> Shape:
        """The shape that serves a batch."""
        decode = groups = 0
        direct = True
        for work in batch.works:
            rows = work.rows
            direct = direct and len(work.samples) == 1 and rows == 1
            if rows == 1: decode += 1
            else: groups += -(-rows // GROUP)
        return Shape.fitting(decode, groups, batch.samples, direct)

    @staticmethod
    def fitting(decode: int, groups: int, samples: int, direct: bool) -> Shape:
        """The least shape with as many rows, groups and samples at least."""
        if direct: return Shape(_power(decode), 0, _power(decode), True)
        if not groups: return Shape(_power(decode), 0, _power(samples), False)
        beside = max(GROUP, _power(decode)) if decode else 0
        eights = beside // GROUP
        whole = bisect_left(STEPS, eights + groups)
        # what is beyond all steps is refused by whoever runs it
        groups = (STEPS[whole] if whole < len(STEPS) else eights + groups) - eights
        return Shape(beside, groups, 1 if samples < 2 else max(GROUP, _power(samples)), False)


def _power(rows: int) -> int: return 1 << max(0, rows - 1).bit_length()


@dataclass(frozen=True)
class Field:
    """An input: its name, extents, and place in words from the region's start."""
    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int: return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where the inputs of a shape are, with block tables of `entries` pages."""
    shape: Shape
    entries: int

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """All of them, the sampler's first."""
        s, n = self.shape, self.entries
        extents: dict[str, tuple[int, ...]] = dict.fromkeys(SAMPLER, (s.samples,))
        extents |= {"tokens": (s.rows,)}
        if not s.direct: extents["wanted"] = (s.samples,)
        if s.decode: extents |= {"decode_lengths": (s.decode,), "decode_table": (s.decode, n)}
        if s.groups: extents |= {"group_lengths": (s.groups,), "group_table": (s.groups, n)}
        sizes = [-(-math.prod(extent) // ALIGN) * ALIGN for extent in extents.values()]
        offsets = accumulate(sizes, initial=0)
        return tuple(Field(*each) for each in zip(extents, extents.values(), offsets, strict=False))

    @cached_property
    def places(self) -> tuple[tuple[Field, int, int], ...]:
        """Each with its words' first and end."""
        return tuple((each, each.offset, each.offset + each.size) for each in self.fields)

    @cached_property
    def words(self) -> int:
        """How many are sent."""
        return self.fields[-1].offset + self.fields[-1].size


class _Slot:
    """Page-locked memory, and the event after its last upload."""

    def __init__(self, host: HostMemory, event: Event) -> None:
        self.host, self.event, self.busy = host, event, False
        self.words = np.frombuffer(host.view, np.int32)


class Inbox:
    """The words of steps, on the device and on their way there."""

    def __init__(self, device: str, limit: int) -> None:
        """`limit`: the most words."""
        self.device, self.limit = device, limit
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.region: Buffer = region(device, 4 * self.limit)
        self.slots: list[_Slot] = []
        self._given_back = weakref.finalize(self, _give_back, self.slots)
        if isinstance(opened, NVDevice):
            with labelled("activations"):
                for _ in range(DEPTH):
                    self.slots.append(_Slot(opened.pool.host(4 * self.limit), opened.driver.event()))
        self.turn = 0

    def tensors(self, fields: Iterable[Field], dtype: DType = dtypes.int32) -> dict[str, Tensor]:
        """Inputs as a step gets them, of 32 bits."""
        return {each.name: self._tensor(each, dtype) for each in fields}

    def _tensor(self, each: Field, dtype: DType) -> Tensor:
        view = self.region.view(each.size, dtype, 4 * each.offset)
        return Tensor(UOp.from_buffer(view).reshape(each.shape))

    def open(self) -> np.ndarray:
        """The host's words, to be written now."""
        if self.driver is None:
            Device[self.device].synchronize()
            return np.frombuffer(self.region.as_memoryview(force_zero_copy=True), np.int32)
        slot = self.slots[self.turn]
        if slot.busy: self.driver.wait_for(slot.event)
        slot.busy = False
        return slot.words

    def send(self, words: int) -> None:
        """Brings the first words that `open` gave to the device, before what is launched from now on."""
        if self.driver is None: return
        slot = self.slots[self.turn]
        self.driver.submit(Upload(self.region._buf, slot.host, 0, 4 * words))
        self.driver.record(slot.event)
        slot.busy = True
        self.turn = (self.turn + 1) % len(self.slots)

    def close(self) -> None:
        """Gives page-locked memory back."""
        self._given_back()


def _give_back(slots: list[_Slot]) -> None:
    for slot in slots: slot.host.free()
    slots.clear()


class Tables:
    """Block tables by slot, on the host: a step's are copied of them, and written when pages change."""

    def __init__(self, slots: int, entries: int) -> None:
        self.rows = np.full((slots + 1, entries), -1, np.int32)     # the last: nobody's
        self.known: list[Sequence[int]] = [()] * (slots + 1)

    def update(self, work: Work) -> None:
        """Takes over a work's pages: the same object is the same pages."""
        pages, known = work.pages, self.known[work.slot]
        if pages is known: return
        self.rows[work.slot, :len(pages)] = pages
        self.rows[work.slot, len(pages):len(known)] = -1
        self.known[work.slot] = pages


def write(words: np.ndarray, layout: Layout, batch: Batch, tables: Tables,
          last: Callable[[int], int]) -> None:
    """Writes a batch as a step of the layout's shape reads it; `last` gives the token that a slot chose."""
    shape, nobody = layout.shape, len(tables.rows) - 1
    into = {each.name: words[first:end].reshape(each.shape) for each, first, end in layout.places}
    tokens, ends, owners = [0] * shape.rows, [0] * shape.decode, [nobody] * shape.decode
    group_ends, group_owners = list[int](), list[int]()
    slots, places, wanted = list[int](), list[int](), list[int]()
    row = 0
    for work in batch.works:
        tables.update(work)
        count = len(work.tokens)
        if count < 2:
            first, row = row, row + 1
            tokens[first] = work.tokens[0] if count else last(work.slot)
            ends[first], owners[first] = work.start + 1, work.slot
        else:
            first = shape.decode + GROUP * len(group_ends)
            tokens[first:first + count] = work.tokens
            many = -(-count // GROUP)
            group_ends += range(work.start + GROUP, work.start + GROUP * many + 1, GROUP)
            group_owners += [work.slot] * many
        for sample in work.samples:
            slots.append(sample.slot)
            places.append(sample.place)
            wanted.append(first + sample.row)
    fill = shape.samples - len(slots)
    into["tokens"][:] = tokens
    into["slots"][:] = slots + [-1] * fill
    into["places"][:] = places + [0] * fill
    if not shape.direct: into["wanted"][:] = wanted + [0] * fill
    if shape.decode:
        into["decode_lengths"][:] = ends
        np.take(tables.rows, owners, axis=0, out=into["decode_table"])
    if shape.groups:
        none = shape.groups - len(group_ends)
        into["group_lengths"][:] = group_ends + [0] * none
        np.take(tables.rows, group_owners + [nobody] * none, axis=0, out=into["group_table"])
