"""Inputs of a step: fixed device memory, filled from page-locked memory.

Protocol: `InputStaging` owns one region on the device. Each batch size has a layout of it, every input at a
multiple of 256 bytes. `put` writes rows and padding into page-locked memory, and sends the layout with one
upload. Rows that are already on the device are then copied over their part of the upload. There are `depth`
page-locked buffers, used in turn, so the next step can be prepared while the device reads the last one's. A
buffer is rewritten when the event after its upload is done.

A device without a driver interface (CPU) gets the same bytes through tinygrad's copies.
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
from tinygrad_nv.runtime.memory_pool import label_allocations

ALIGN = 256     # bytes, as the memory planner's
LABEL = "graphs"


@dataclass(frozen=True)
class Input:
    """An input of a step: shape and dtype of one row, and the value of padding rows. The value must mask the
    row: a length of 0, a position of 0, the number of a scrap page."""
    shape: tuple[int, ...] = ()
    dtype: DType = dtypes.int32
    pad: float = 0

    @property
    def row_bytes(self) -> int: return math.prod(self.shape) * self.dtype.itemsize

    def numpy_dtype(self) -> np.dtype | None:
        """The dtype that an array of this input must have; None if numpy lacks it (bfloat16, fp8)."""
        storage = _to_np_dtype(self.dtype)  # a wider dtype for bfloat16 and fp8
        return None if storage is None or (made := np.dtype(storage)) != _storage(self) else made

    def check(self, name: str) -> None:
        """Raises `GraphError` for an invalid shape or padding value."""
        if any(not isinstance(extent, int) or extent < 1 for extent in self.shape):
            raise GraphError(f"input {name!r} has rows of shape {self.shape}", "extents of 1 or more")
        whole = dtypes.is_int(self.dtype) or self.dtype is dtypes.bool
        if whole and (self.pad % 1 != 0 or not self.dtype.min <= self.pad <= self.dtype.max):
            raise GraphError(f"input {name!r} of {self.dtype} is padded with {self.pad}",
                             f"a value of {self.dtype}")


def region(device: str, nbytes: int) -> Buffer:
    """Uncached device memory, freed when its last reference goes."""
    with label_allocations(LABEL):
        return Buffer(device, nbytes, dtypes.uint8, options=BufferSpec(nolru=True)).allocate()


@dataclass(frozen=True)
class InputPlacement:
    """Place of an input for one batch size: byte offset in the region, and bytes."""
    name: str
    given: Input
    offset: int
    nbytes: int


@dataclass
class _BatchStaging:
    """Page-locked memory, the arrays and the upload of each batch size over it, and the event after the last
    upload."""
    host: HostMemory
    event: Event
    busy: bool = False
    arrays: dict[int, list[np.ndarray]] = field(default_factory=dict)
    uploads: dict[int, Upload] = field(default_factory=dict)


class InputStaging:
    """The inputs of a pool, on the device and in page-locked memory."""

    def __init__(self, device: str, inputs: Mapping[str, Input], sizes: Sequence[int], depth: int) -> None:
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.staging: list[_BatchStaging] = []    # set before anything can fail: __del__ reads it
        self.next_buffer, self.open = 0, True  # False after `free`
        self.device, self.inputs = device, dict(inputs)
        self.placements = {size: _layout(self.inputs, size) for size in sizes}
        self.pads = [np.array(to_storage_scalar(given.pad, given.dtype), _storage(given))
                     for given in inputs.values()]
        self.nbytes = max(map(_extent, self.placements.values()))
        self.region = region(device, self.nbytes)
        self.host = np.empty(0 if self.driver else self.nbytes, np.uint8)
        try:
            for _ in range(depth if isinstance(opened, NVDevice) else 0):
                with label_allocations(LABEL): host = opened.pool.host(self.nbytes)
                self.staging.append(_BatchStaging(host, opened.driver.event()))
        except BaseException:
            self.free()
            raise

    @property
    def staging_bytes(self) -> int: return self.nbytes * max(1, len(self.staging))

    def free(self) -> None:
        """Frees the page-locked memory; the driver does so once pending uploads have read it."""
        staging, self.staging, self.open = self.staging, [], False
        for buffer in staging: buffer.host.free()

    @suppress_finalizing
    def __del__(self) -> None: self.free()

    def sync(self) -> None:
        """Waits for all uploads: after an exception the state of the events is unknown."""
        if self.driver is not None: self.driver.synchronize()
        for buffer in self.staging: buffer.busy = False

    def tensors(self, size: int) -> dict[str, Tensor]:
        """The inputs of a batch of `size`, as passed to the step."""
        made = {}
        for placement in self.placements[size]:
            view = self.region.view(placement.nbytes // placement.given.dtype.itemsize, placement.given.dtype,
                                    placement.offset)
            made[placement.name] = Tensor(UOp.from_buffer(view).reshape((size, *placement.given.shape)))
        return made

    def put(self, size: int, rows: int, values: Sequence[np.ndarray | Buffer]) -> None:
        """Sends `rows` rows, and padding behind them, to the device. `values` in the order of the inputs,
        checked by the caller; empty for 0 rows."""
        if self.driver is None:
            self._put_by_tinygrad(size, rows, values)
            return
        buffer = self.staging[self.next_buffer]
        if buffer.busy:
            self.driver.wait_for(buffer.event)
            buffer.busy = False
        if (arrays := buffer.arrays.get(size)) is None: arrays = self._prepare(buffer, size)
        if self._write(arrays, rows, values):
            buffer.busy = True
            self.next_buffer = (self.next_buffer + 1) % len(self.staging)
            self.driver.submit(buffer.uploads[size])
            self.driver.record(buffer.event)
        for placement, value in zip(self.placements[size], values, strict=False):
            if not isinstance(value, Buffer): continue
            nbytes = rows * placement.given.row_bytes
            self.driver.submit(Copy(self.region._buf + placement.offset, value._buf, nbytes))

    def _prepare(self, buffer: _BatchStaging, size: int) -> list[np.ndarray]:
        """The arrays of a batch size in a page-locked buffer, and its upload."""
        placements = self.placements[size]
        buffer.uploads[size] = Upload(self.region._buf, buffer.host, 0, _extent(placements))
        made = buffer.arrays[size] = _arrays(np.frombuffer(buffer.host.view, np.uint8), placements)
        return made

    def _write(self, arrays: Sequence[np.ndarray], rows: int,
               values: Sequence[np.ndarray | Buffer]) -> bool:
        """Writes values and padding that come from the host. Returns whether there were any."""
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
        placements = self.placements[size]
        self._write(_arrays(self.host, placements), rows, values)
        sent = self.host[:(nbytes := _extent(placements))].tobytes()
        source = Buffer("PYTHON", nbytes, dtypes.uint8, opaque=memoryview(bytearray(sent)))
        self.region.view(nbytes, dtypes.uint8, 0).allocate().copy_from(source)
        for placement, value in zip(placements, values, strict=False):
            if not isinstance(value, Buffer): continue
            nbytes = rows * placement.given.row_bytes
            target = self.region.view(nbytes, dtypes.uint8, placement.offset).allocate()
            target.copy_from(value.view(target.nbytes, dtypes.uint8, 0).allocate())


def _storage(given: Input) -> np.dtype: return np.dtype(storage_fmt_for_dtype(given.dtype))


def _layout(inputs: Mapping[str, Input], size: int) -> tuple[InputPlacement, ...]:
    placements, offset = [], 0
    for name, given in inputs.items():
        placements.append(InputPlacement(name, given, offset, size * given.row_bytes))
        offset += -(-placements[-1].nbytes // ALIGN) * ALIGN
    return tuple(placements)


def _extent(placements: Sequence[InputPlacement]) -> int: return placements[-1].offset + placements[-1].nbytes


def _arrays(memory: np.ndarray, placements: Sequence[InputPlacement]) -> list[np.ndarray]:
    """Each input's rows, as views of bytes in this layout."""
    made: list[Any] = []
    for placement in placements:
        flat = memory[placement.offset:placement.offset + placement.nbytes].view(_storage(placement.given))
        made.append(flat.reshape(placement.nbytes // placement.given.row_bytes, *placement.given.shape))
    return made
