"""What a step is given: fixed places on the device, filled from page-locked memory.

Protocol: `Feed` owns one region of the device. Each size of a batch has a layout of it, every input at a
multiple of 256 bytes. `put` writes rows and padding into page-locked memory, and sends the layout's bytes
with one upload; rows that are on the device already are copied there, over what was uploaded for them. There
are `depth` pieces of page-locked memory, used in turn, so the next step can be prepared while the device
still reads the last one's; a piece is written again when its event has come to pass.

A device without our driver interface (CPU) gets the same bytes through tinygrad's own copies.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import DType, _to_np_dtype, storage_fmt_for_dtype, to_storage_scalar
from tinygrad.helpers import suppress_finalizing
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import GraphError
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Copy, Event, HostMemory, Upload
from tinygrad_nv.runtime.memory_pool import labelled

ALIGN = 256     # bytes, as the memory planner's
LABEL = "graphs"


@dataclass(frozen=True)
class Input:
    """An input of a step: shape and dtype of one row, and the value of the rows that fill a batch up. It must
    mask the row: a length of 0, a position of 0, the number of a scrap page."""
    shape: tuple[int, ...] = ()
    dtype: DType = dtypes.int32
    pad: float = 0

    @property
    def row_bytes(self) -> int: return math.prod(self.shape) * self.dtype.itemsize

    def numpy_dtype(self) -> np.dtype | None:
        """What an array of this input must have; None where numpy has no such type (bfloat16, fp8)."""
        kind = _to_np_dtype(self.dtype)  # for bfloat16 and fp8 a wider one
        return None if kind is None or (made := np.dtype(kind)) != _storage(self) else made

    def check(self, name: str) -> None:
        """Raises `GraphError` for an input that cannot be."""
        if any(not isinstance(extent, int) or extent < 1 for extent in self.shape):
            raise GraphError(f"input {name!r} has rows of shape {self.shape}", "extents of 1 or more")
        whole = dtypes.is_int(self.dtype) or self.dtype is dtypes.bool
        if whole and (self.pad % 1 != 0 or not self.dtype.min <= self.pad <= self.dtype.max):
            raise GraphError(f"input {name!r} of {self.dtype} is padded with {self.pad}",
                             f"a value that {self.dtype} has")


def region(device: str, nbytes: int) -> Buffer:
    """Memory of the pool's own, given back to the driver when nobody refers to it."""
    with labelled(LABEL):
        return Buffer(device, nbytes, dtypes.uint8, options=BufferSpec(nolru=True)).allocate()


@dataclass(frozen=True)
class Place:
    """Where an input is, for one size: bytes from the region's start, and how many."""
    name: str
    given: Input
    offset: int
    nbytes: int


@dataclass
class _Slot:
    """Page-locked memory, each size's arrays and upload over it, and the event after the last upload."""
    host: HostMemory
    event: Event
    busy: bool = False
    arrays: dict[int, list[np.ndarray]] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)


class Feed:
    """The inputs of a pool, on the device and on their way there."""

    def __init__(self, device: str, inputs: Mapping[str, Input], sizes: Sequence[int], depth: int) -> None:
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.slots: list[_Slot] = []    # there before anything can fail: __del__ looks at them
        self.turn, self.usable = 0, True  # until it is freed
        self.device, self.inputs = device, dict(inputs)
        self.places = {size: _layout(self.inputs, size) for size in sizes}
        self.pads = [np.array(to_storage_scalar(given.pad, given.dtype), _storage(given))
                     for given in inputs.values()]
        self.nbytes = max(map(_extent, self.places.values()))
        self.region = region(device, self.nbytes)
        self.host = np.empty(0 if self.driver else self.nbytes, np.uint8)
        try:
            for _ in range(depth if isinstance(opened, NVDevice) else 0):
                with labelled(LABEL): host = opened.pool.host(self.nbytes)
                self.slots.append(_Slot(host, opened.driver.event()))
        except BaseException:
            self.free()
            raise

    @property
    def staging_bytes(self) -> int: return self.nbytes * max(1, len(self.slots))

    def free(self) -> None:
        """Gives the page-locked memory back; the driver does so when what is on its way has been read."""
        slots, self.slots, self.usable = self.slots, [], False
        for slot in slots: slot.host.free()

    @suppress_finalizing
    def __del__(self) -> None: self.free()

    def settle(self) -> None:
        """Waits for all uploads: after an exception nobody knows which events stand for what."""
        if self.driver is not None: self.driver.synchronize()
        for slot in self.slots: slot.busy = False

    def tensors(self, size: int) -> dict[str, Tensor]:
        """The inputs of a batch of `size`, as the step gets them."""
        made = {}
        for place in self.places[size]:
            view = self.region.view(place.nbytes // place.given.dtype.itemsize, place.given.dtype,
                                    place.offset)
            made[place.name] = Tensor(UOp.from_buffer(view).reshape((size, *place.given.shape)))
        return made

    def put(self, size: int, rows: int, values: Sequence[np.ndarray | Buffer]) -> None:
        """Brings `rows` rows and the padding behind them to the device. `values` in the order of the inputs,
        checked by the caller; none for 0 rows."""
        if self.driver is None:
            self._put_by_tinygrad(size, rows, values)
            return
        slot = self.slots[self.turn]
        if slot.busy:
            self.driver.wait_for(slot.event)
            slot.busy = False
        if (arrays := slot.arrays.get(size)) is None: arrays = self._prepare(slot, size)
        if self._write(arrays, rows, values):
            slot.busy = True
            self.turn = (self.turn + 1) % len(self.slots)
            self.driver.submit(slot.uploads[size])
            self.driver.record(slot.event)
        for place, value in zip(self.places[size], values, strict=False):
            if not isinstance(value, Buffer): continue
            nbytes = rows * place.given.row_bytes
            self.driver.submit(Copy(self.region._buf + place.offset, value._buf, nbytes))

    def _prepare(self, slot: _Slot, size: int) -> list[np.ndarray]:
        """The arrays of a size in a piece of page-locked memory, and its upload."""
        places = self.places[size]
        slot.uploads[size] = Upload(self.region._buf, slot.host, 0, _extent(places))
        made = slot.arrays[size] = _arrays(np.frombuffer(slot.host.view, np.uint8), places)
        return made

    def _write(self, arrays: Sequence[np.ndarray], rows: int,
               values: Sequence[np.ndarray | Buffer]) -> bool:
        """Writes what the host knows; whether that was anything."""
        padded = False
        for array, pad in zip(arrays, self.pads, strict=True):
            if rows == len(array): break
            array[rows:] = pad
            padded = True
        for array, value in zip(arrays, values, strict=False):
            if isinstance(value, Buffer): continue
            array[:rows] = value
            padded = True
        return padded

    def _put_by_tinygrad(self, size: int, rows: int, values: Sequence[np.ndarray | Buffer]) -> None:
        places = self.places[size]
        self._write(_arrays(self.host, places), rows, values)
        sent = self.host[:(nbytes := _extent(places))].tobytes()
        source = Buffer("PYTHON", nbytes, dtypes.uint8, opaque=memoryview(bytearray(sent)))
        self.region.view(nbytes, dtypes.uint8, 0).allocate().copy_from(source)
        for place, value in zip(places, values, strict=False):
            if not isinstance(value, Buffer): continue
            target = self.region.view(rows * place.given.row_bytes, dtypes.uint8, place.offset).allocate()
            target.copy_from(value.view(target.nbytes, dtypes.uint8, 0).allocate())


def _storage(given: Input) -> np.dtype: return np.dtype(storage_fmt_for_dtype(given.dtype))


def _layout(inputs: Mapping[str, Input], size: int) -> tuple[Place, ...]:
    places, offset = [], 0
    for name, given in inputs.items():
        places.append(Place(name, given, offset, size * given.row_bytes))
        offset += -(-places[-1].nbytes // ALIGN) * ALIGN
    return tuple(places)


def _extent(places: Sequence[Place]) -> int: return places[-1].offset + places[-1].nbytes


def _arrays(memory: np.ndarray, places: Sequence[Place]) -> list[np.ndarray]:
    """Each input's rows, over bytes laid out so."""
    made: list[Any] = []
    for place in places:
        flat = memory[place.offset:place.offset + place.nbytes].view(_storage(place.given))
        made.append(flat.reshape(place.nbytes // place.given.row_bytes, *place.given.shape))
    return made
