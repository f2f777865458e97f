"""Tensors copied to host memory, bit for bit.

Protocol: `Snapshot.take(tensors)` copies elements as bytes, of any dtype, into memory that is used again by
the next `take`: what it returned before must have been written by then.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.runtime.memory import read_into
from tinygrad_nv.train.files import DTYPES, Source

BITS = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32, 8: dtypes.uint64}


def shape_of(tensor: Tensor) -> tuple[int, ...]: return tuple(int(extent) for extent in tensor.shape)


def dtype_of(name: str, tensor: Tensor) -> str:
    """The name of a tensor's dtype in safetensors. Raises `CheckpointError`."""
    if (found := DTYPES.get(tensor.dtype)) is None:
        raise CheckpointError(f"{name} has dtype {tensor.dtype}", f"one of: {', '.join(map(str, DTYPES))}",
                              "cast it, or leave it out")
    return found


def has_memory(tensor: Tensor) -> bool:
    """Whether a realized tensor has a buffer of its own, all of which is its elements in index order."""
    return isinstance(tensor.device, str) and tensor.uop.has_buffer_identity()


def _whole(data: bytearray) -> tuple[bytearray]: return (data,)


class Snapshot:
    """Host memory for the tensors of a checkpoint."""

    def __init__(self) -> None: self._held: dict[str, bytearray] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Source]:
        """Copies of tensors as they are now. Tensors that are not computed yet are realized. Raises
        `CheckpointError` for a dtype that cannot be stored."""
        dtypes_of = {name: dtype_of(name, tensor) for name, tensor in tensors.items()}
        if tensors: Tensor.realize(*tensors.values())
        self._held = {name: self._copy(name, tensor) for name, tensor in tensors.items()}
        return {name: Source(dtypes_of[name], shape_of(tensor), partial(_whole, self._held[name]))
                for name, tensor in tensors.items()}

    def _copy(self, name: str, tensor: Tensor) -> bytearray:
        nbytes = int(tensor.nbytes())
        made = self._held.get(name)
        if made is None or len(made) != nbytes: made = bytearray(nbytes)
        if not nbytes: return made
        if has_memory(tensor): read_into(tensor, 0, memoryview(made))
        else: made[:] = tensor.bitcast(BITS[tensor.dtype.itemsize]).numpy().tobytes()
        return made
