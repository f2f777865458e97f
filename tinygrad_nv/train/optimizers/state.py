"""The state of an optimiser: named tensors of each parameter.

Protocol. A parameter has slots, each a float32 number for every element (exp_avg) or of a shape of its own (a
row's variance), and an fp32_master where it is of 16 bits. How a slot is kept is its `Slot`:

    FloatSlot      float32, on the parameter's device
    BlockwiseSlot  8-bit codes with a scale a block
    PagedSlot      another slot on the host

`read()` gives the numbers; `write(value, go)` stores others, where `go` (bool, one element; None: always)
holds, and gives those that the update goes on with. `OptimizerState.tensors()` are all of them by flat names,
`state.<parameter>.<slot>` and `state.<parameter>.fp32_master`, codes and scales with a part more; `load`
takes such tensors back to the bit.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import WeightError

PREFIX, MASTER, HOST = "state", "fp32_master", "CPU"
BLOCK = 256
LEAST = 4096                    # elements of a parameter that has state of 8 bits
UNSIGNED = ("exp_avg_sq",)      # slots whose numbers are never negative
EXPONENTS = 7                   # sizes 10⁻⁶ to 1


class Slot(Protocol):
    """How numbers of a parameter's state are kept."""

    def read(self) -> Tensor:
        """The numbers, float32, on the parameter's device."""

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        """Stores the numbers where `go` holds; those that are there afterwards, before they are rounded."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns the stored tensors, by the end of their names: "" for a slot that is one tensor."""


@dataclass
class FloatSlot:
    """Float32 numbers."""
    tensor: Tensor

    @staticmethod
    def zeros(shape: tuple[int, ...], device: str | tuple[str, ...] | None) -> FloatSlot:
        """A slot of zeros."""
        return FloatSlot(Tensor.zeros(*shape, dtype=dtypes.float32, device=device).contiguous())

    def read(self) -> Tensor: return self.tensor.detach()   # as it is before it is written

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        return self.tensor.assign(keep(go, value, self.tensor)).detach()

    def tensors(self) -> dict[str, Tensor]: return {"": self.tensor}


@dataclass
class ParameterState:
    """State of one parameter: its slots by name, and its master weights, where it has them."""
    slots: dict[str, Slot]
    master: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that is stored, by the end of its name."""
        for name, slot in self.slots.items():
            for part, tensor in slot.tensors().items(): yield f"{name}.{part}" if part else name, tensor
        if self.master is not None: yield MASTER, self.master


@dataclass
class OptimizerState:
    """The state of all parameters, and `scalars`: of the optimiser as a whole (step, skipped)."""
    parameters: dict[str, ParameterState] = field(default_factory=dict)
    scalars: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by flat names, in a fixed order."""
        found = dict(self.scalars)
        for name, one in self.parameters.items():
            found |= {f"{PREFIX}.{name}.{end}": tensor for end, tensor in one.tensors()}
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(int(each.numel()) * each.dtype.itemsize for each in self.tensors().values())

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Writes tensors of the names, shapes and dtypes of `tensors()` into the state's memory. Raises
        `WeightError` before anything is written."""
        own = self.tensors()
        if strange := sorted(own.keys() ^ given.keys()):
            what = "without" if strange[0] in own else "with"
            raise WeightError(f"optimizer state {what} {strange[0]} ({len(strange)} names differ)",
                              "the state of this optimizer and these parameters",
                              "resume with the options that the checkpoint was written with")
        for name, tensor in own.items():
            there = given[name]
            if there.shape != tensor.shape or there.dtype != tensor.dtype:
                raise WeightError(f"{name} is {there.dtype.name} {there.shape}",
                                  f"{tensor.dtype.name} {tensor.shape}")
        Tensor.realize(*(tensor.assign(given[name].to(tensor.device)) for name, tensor in own.items()))


def keep(go: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new` where `go` holds, else `old`: a number that is not finite goes no further."""
    return new if go is None else go.where(new, old)


@dataclass
class PagedSlot:
    """Another slot in memory of the CPU: `read` copies its numbers to the device, `write` copies the new ones
    back. Copies of a parameter depend on nothing of another parameter, so a device with a copy queue moves
    the next one's state while one is updated; the device has the state of those under way alone."""
    inner: FloatSlot
    device: str

    def read(self) -> Tensor: return self.inner.read().to(self.device)

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        value = keep(go, value, self.read()).contiguous()
        self.inner.tensor.assign(value.to(HOST))
        return value

    def tensors(self) -> dict[str, Tensor]: return self.inner.tensors()


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The numbers of all codes, float32 (256), in rising order."""
    found: list[float] = [0.0, 1.0]
    for i in range(EXPONENTS):
        tenths = np.linspace(0.1, 1, 2**(i if signed else i + 1) + 1)
        middles = (tenths[:-1] + tenths[1:]) / 2 * 10.0**(i - EXPONENTS + 1)
        found += [*middles, *(-middles if signed else [])]
    assert len(found) == 256, "a code for each"
    return np.sort(np.array(found)).astype(np.float32)


@dataclass
class BlockwiseSlot:
    """State of 8 bits: blockwise dynamic quantisation (Dettmers et al., arXiv 2110.02861), as of
    bitsandbytes. A block of 256 elements has a scale, its largest magnitude, and a code for each element: the
    nearest of 256 numbers in [−1, 1] (of second moments, which have no sign, in [0, 1]) times the scale. The
    numbers are a dynamic tree: leading zeros of a code say of which of 7 sizes, 10⁻⁶ to 1, a number is, and
    the bits that are left divide what lies between a tenth of the size and the size evenly. So small numbers
    keep their relative precision beside large ones. An update goes on with numbers that have not been
    rounded. `codes` are u8, of the parameter's shape, `scales` float32, one for each block of elements side
    by side."""
    codes: Tensor
    scales: Tensor
    signed: bool

    @staticmethod
    def zeros(shape: tuple[int, ...], device: str | tuple[str, ...] | None, signed: bool) -> BlockwiseSlot:
        """A slot of zeros."""
        count = int(np.prod(shape))
        zero = int(np.searchsorted(dynamic_map(signed), 0.0))
        return BlockwiseSlot(Tensor.full(shape, zero, dtype=dtypes.uint8, device=device).contiguous(),
                             Tensor.zeros(-(-count // BLOCK), device=device).contiguous(), signed)

    def read(self) -> Tensor:
        table = self._table()[self.codes.detach().cast(dtypes.int32)].reshape(-1)
        return (_blocks(table) * self.scales.detach().reshape(-1, 1)).reshape(-1)[:self._count()] \
            .reshape(self.codes.shape).contiguous()

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        value = keep(go, value, self.read()).contiguous()
        blocks = _blocks(value.reshape(-1))
        scales = blocks.abs().max(1)
        inverse = (scales > 0).where(scales, 1.0).reciprocal()
        codes = self._nearest(blocks * inverse.reshape(-1, 1)).reshape(-1)[:self._count()]
        self.codes.assign(keep(go, codes.reshape(self.codes.shape).cast(dtypes.uint8), self.codes))
        self.scales.assign(keep(go, scales, self.scales))
        return value

    def tensors(self) -> dict[str, Tensor]: return {"codes": self.codes, "scales": self.scales}

    def _nearest(self, x: Tensor) -> Tensor:
        """The code of the nearest number: eight steps of a search among the middles between numbers."""
        numbers = dynamic_map(self.signed)
        middles = Tensor(np.append((numbers[1:] + numbers[:-1]) / 2, np.float32(np.inf)), device=x.device)
        code = x.zeros_like(dtype=dtypes.int32)
        for bit in (128, 64, 32, 16, 8, 4, 2, 1):
            code = code + (x > middles[code + (bit - 1)]).where(bit, 0).cast(dtypes.int32)
        return code

    def _table(self) -> Tensor: return Tensor(dynamic_map(self.signed), device=self.codes.device)

    def _count(self) -> int: return int(self.codes.numel())


def _blocks(flat: Tensor) -> Tensor:
    """Rows of BLOCK elements, the last one with zeros at its end."""
    rest = -int(flat.numel()) % BLOCK
    return (flat.pad((0, rest)) if rest else flat).reshape(-1, BLOCK)


def make_slot(key: str, shape: tuple[int, ...], device: str | tuple[str, ...] | None, bits: int, paged: bool,
              count: int) -> Slot:
    """A slot of zeros. One of 8 bits has a number for each of the parameter's `count` elements, 0 for a slot
    of another shape; on a CPU nothing is paged."""
    if bits == 8 and count >= LEAST: return BlockwiseSlot.zeros(shape, device, key not in UNSIGNED)
    if paged and isinstance(device, str) and device.split(":")[0] != HOST:
        return PagedSlot(FloatSlot.zeros(shape, HOST), device)
    return FloatSlot.zeros(shape, device)
