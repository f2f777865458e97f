"""AdamW of many tensors, and sums of squares of many, as functions known by name.

Protocol. `adamw_update` changes the Tensors that it is given, as `Tensor.assign` does: all of it is done when
any of them is realized. Tensors of one kind (dtypes of parameter and gradient) are one launch, as many as a
kernel can have pointers: 4000 on a GPU, 60 on a CPU. Where no kernel takes them (several devices, storage
that is part of a larger one), tinygrad's own kernels compute the same. There is no gradient.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose, target_of
from tinygrad_nv.tile.optimizer import reference
from tinygrad_nv.tile.optimizer.spec import AdamWSpec, SquaresSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "optimizer"
T = TypeVar("T")
ANY = 1 << 12   # tensors of a call where no kernel is made


@dataclass(frozen=True)
class AdamWUpdate:
    """Tensors: all parameters, exp_avg, exp_avg_sq, masters where parameters are of 16 bits; gradients;
    control (tile/optimizer/spec.py)."""
    groups: tuple[int, ...]
    beta1: float
    beta2: float
    eps: float

    def spec(self, given: Sequence[UOp]) -> AdamWSpec:
        """Returns the spec for such tensors."""
        count = len(self.groups)
        counts = tuple(int(x.max_numel()) for x in given[:count])
        return AdamWSpec(counts, self.groups, self.beta1, self.beta2, self.eps, given[0].dtype,
                         given[-2].dtype)


@dataclass(frozen=True)
class Squares:
    """Tensors: any number, of one dtype."""

    def spec(self, given: Sequence[UOp]) -> SquaresSpec:
        """Returns the spec for such tensors."""
        return SquaresSpec(tuple(int(x.max_numel()) for x in given), given[0].dtype)


@dataclass(frozen=True)
class Entry:
    """A parameter of an update: its storage, that of its state, its gradient, and its group's number."""
    x: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    group: int
    master: Tensor | None = None

    @property
    def precision(self) -> tuple[DType, DType]:
        """Dtypes that all tensors of one launch have in common."""
        return self.x.dtype, self.grad.dtype

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that an update changes."""
        masters = () if self.master is None else (self.master,)
        return self.x, self.exp_avg, self.exp_avg_sq, *masters


def adamw_update(entries: Sequence[Entry], control: Tensor, beta1: float, beta2: float, eps: float) -> None:
    """One step of AdamW, in place. `control`: float32 (tile/optimizer/spec.py). Raises `SpecError`."""
    for each in entries:
        if any(x.shape != each.x.shape for x in (*each.outputs, each.grad)):
            raise SpecError(f"state and gradient {[x.shape for x in (*each.outputs, each.grad)]}",
                            "one shape")
        if any(x.dtype != dtypes.float32 for x in each.outputs[1:]):
            raise SpecError("state that is not float32", "float32")
        if (each.x.dtype == dtypes.float32) != (each.master is None):
            raise SpecError(f"{each.x.dtype.name} {'without' if each.master is None else 'with'} masters",
                            "masters of parameters of 16 bits")
    for precision in dict.fromkeys(each.precision for each in entries):
        alike = [each for each in entries if each.precision == precision]
        for some in _launches(alike, 4 + (alike[0].master is not None), control.device):
            what = AdamWUpdate(tuple(each.group for each in some), beta1, beta2, eps)
            written = [x for column in zip(*(each.outputs for each in some), strict=True) for x in column]
            made = call(what, _update, *written, *(each.grad for each in some), control)
            for x, new in zip(written, made, strict=True): x.assign(new)


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Returns sums of squares, float32 (sums), of chunks of tensors: what is left to add up."""
    made = []
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        alike = [each for each in tensors if each.dtype == dtype]
        made += [call(Squares(), _squares, *some)[0] for some in _launches(alike, 1, tensors[0].device)]
    return made[0] if len(made) == 1 else made[0].cat(*made[1:])


def _launches(entries: list[T], pointers: int, device: str | tuple[str, ...] | None) -> Iterator[list[T]]:
    """Yields as many entries at a time as a kernel has pointers for."""
    target = target_of(device)
    most = ANY if target is None else (target.pointers - 1) // pointers
    for first in range(0, len(entries), most): yield entries[first:first + most]


def _update(what: AdamWUpdate, *given: Tensor) -> tuple[Tensor, ...]:
    spec = what.spec([x.uop for x in given])
    made = reference.update(spec, *(x.float() for x in given))
    return tuple(new.cast(old.dtype) for new, old in zip(made, given, strict=False))


def _squares(what: Squares, *given: Tensor) -> tuple[Tensor, ...]:
    return (reference.squares(what.spec([x.uop for x in given]), *(x.float() for x in given)),)


def lower_update(what: AdamWUpdate, target: Target, *given: UOp) -> tuple[UOp, ...] | None:
    """Returns what is written, by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    if TABLE.family(target.kind, AdamWSpec) is None: return None
    spec = what.spec(given)
    written, read = given[:-1 - len(spec.counts)], given[-1 - len(spec.counts):]
    if not all(map(program.is_whole, written)):
        raise Unsupported("parameters or state are no storage of their own, to be written in place")
    return choose(spec, target).call(given[0].device, written, read, NAME, flops=spec.flops,
                                       nbytes=spec.nbytes)


def lower_squares(what: Squares, target: Target, *given: UOp) -> tuple[UOp, ...] | None:
    """Returns the sums, by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    if TABLE.family(target.kind, SquaresSpec) is None: return None
    spec = what.spec(given)
    out = program.Output((sum(spec.chunks),), dtypes.float32)
    return choose(spec, target).call(given[0].device, [out], given, NAME, flops=spec.flops,
                                       nbytes=spec.nbytes)


lower(AdamWUpdate, NAME, lower_update)
lower(Squares, NAME, lower_squares)
