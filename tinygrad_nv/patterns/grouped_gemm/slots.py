"""Tensors that functions of grouped matmuls take beside rows and matrices: offsets, and those there are of an
order, weights and a bias."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.tile.expression import short

Rest = tuple[Tensor | None, Tensor | None, Tensor | None]


class Slots(Protocol):
    """A function's constant, as far as it says which tensors there are."""
    @property
    def rows(self) -> int: ...
    @property
    def has_order(self) -> bool: ...
    @property
    def weighted(self) -> bool: ...
    @property
    def biased(self) -> bool: ...


def check_slots(what: Slots, groups: int, n: int, offsets: Tensor, order: Tensor | None,
                weights: Tensor | None, bias: Tensor | None) -> None:
    """Raises `SpecError` for tensors that do not fit groups with n columns of bias."""
    if offsets.shape != (groups + 1,) or offsets.dtype != dtypes.int32:
        raise SpecError(f"offsets of {short(offsets.dtype)} {offsets.shape}", f"int32 ({groups + 1},)")
    if what.has_order != (order is not None) or (order is not None and
                                               (order.ndim != 1 or order.dtype != dtypes.int32)):
        raise SpecError("no order" if order is None else f"order of {short(order.dtype)} {order.shape}",
                        "int32 (R,) with gather, scatter or weights, and only then")
    for name, one, shape in (("weights", weights, (what.rows,)), ("bias", bias, (groups, n))):
        if one is not None and one.shape != shape:
            raise SpecError(f"{name} of shape {one.shape}", str(shape))


def apart(what: Slots, more: Sequence[Tensor]) -> Rest:
    """order, weights, bias; None for those there are not."""
    rest = [*more]
    return tuple(rest.pop(0) if there else None  # type: ignore[return-value]
                 for there in (what.has_order, what.weighted, what.biased))


def require_kinds(what: Slots, given: Sequence[UOp], bias: DType) -> None:
    """Raises `Unsupported` where order, weights or bias are of a dtype that kernels do not read."""
    names = ["order"] * what.has_order + ["weights"] * what.weighted + ["bias"] * what.biased
    kinds = {"order": dtypes.int32, "weights": dtypes.float32, "bias": bias}
    for name, each in zip(names, given, strict=True):
        if each.dtype != kinds[name]:
            raise Unsupported(f"{name} of {short(each.dtype)}, not {short(kinds[name])}")
