"""The state of an optimiser: named tensors of each parameter.

Protocol. A parameter has slots, each a float32 number for every element (exp_avg) or of a shape of its own (a
row's variance), and an fp32_master where it is of 16 bits. How a slot is kept is its `Slot`:

    FloatSlot      float32, on the parameter's device
    BlockwiseSlot  8-bit codes with a scale a block (quantised.py)
    PagedSlot      another slot on the host (paged.py)

`read()` gives the numbers; `write(value, go)` stores others, where `go` (bool, one element; None: always)
holds, and gives those that the update goes on with. `OptimizerState.tensors()` are all of them by flat names,
`state.<parameter>.<slot>` and `state.<parameter>.fp32_master`, codes and scales with a part more; `load`
takes such tensors back to the bit.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import WeightError

PREFIX, MASTER = "state", "fp32_master"


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
