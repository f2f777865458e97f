"""Losses as functions known by name (patterns/named.py), and the same in plain tinygrad.

Protocol. Rows have a loss each (tile/cross_entropy/spec.py). With `factors`, two numbers, a function gives
the sum of losses times the second, float32 (), and its gradients, times the first; else the losses, float32
(T), and the gradients of the sum of each times its row's `scale`:

    RowLosses       logits (T, V)                          → loss or losses, gradient of logits
    LinearLosses    hidden (T, H), weight (V, H), bias (V) → loss or losses, gradients of hidden, weight, bias

Gradients are of the dtypes that `gradient_dtype` says: of float16 float32, since they are multiplied by the
loss scale, or by what else the loss is multiplied by, after they were made. Of an output layer a factor is
applied to sums, not to the gradient of logits, whose small numbers float16 would lose. The factors of a mean
are 1 / count, and differ where no row counts: the loss is NaN then, and gradients are 0, as torch has it.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.tile.cross_entropy.reference import compute_losses
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, Loss, RowsSpec

X = TypeVar("X")


@dataclass(frozen=True)
class RowLosses:
    """Tensors: logits (T, V); labels int32 (T); of a `temperature` the teacher's logits (T, V); `scaled`:
    scale float32 (T); `factored`: factors float32 (2)."""
    loss: Loss
    temperature: float | None = None
    scaled: bool = False
    factored: bool = False


@dataclass(frozen=True)
class LinearLosses:
    """Tensors: hidden (T, H); weight (V, H); `biased`: bias (V); labels int32 (T); of a `temperature` the
    teacher's logits (T, V), or where it is a `linear_teacher` its hidden states (T, H') and weight (V, H');
    `scaled`: scale float32 (T); `factored`: factors float32 (2). `chunk` rows have logits at a time, 0: as
    many as lower.py says."""
    loss: Loss
    temperature: float | None = None
    scaled: bool = False
    factored: bool = False
    biased: bool = False
    linear_teacher: bool = False
    chunk: int = 0


@dataclass(frozen=True)
class Operands(Generic[X]):
    """The tensors of a call, or their UOps; None of those there are not. `weight` is None of logits, which
    are `rows` then, as hidden states are."""
    rows: X
    weight: X | None
    bias: X | None
    labels: X
    teacher: X | None
    teacher_weight: X | None
    scale: X | None
    factors: X | None

    @staticmethod
    def of(what: RowLosses | LinearLosses, arguments: Iterable[X]) -> Operands[X]:
        """Returns the operands of a call."""
        rest: Iterator[X] = iter(arguments)

        def take(there: bool) -> X | None: return next(rest) if there else None
        linear = isinstance(what, LinearLosses)
        rows, weight = next(rest), take(linear)
        bias = take(isinstance(what, LinearLosses) and what.biased)
        labels, teacher = next(rest), take(what.temperature is not None)
        teacher_weight = take(isinstance(what, LinearLosses) and what.linear_teacher)
        return Operands(rows, weight, bias, labels, teacher, teacher_weight, take(what.scaled),
                        take(what.factored))


def gradient_dtype(dtype: DType) -> DType:
    """Returns the dtype of the gradient of a tensor, as a function gives it."""
    return dtypes.float32 if dtype == dtypes.float16 else dtype


def rows_spec(what: RowLosses | LinearLosses, shape: tuple[int, int], dtype: DType, teacher: DType | None,
              gradient: DType | None, in_place: bool = False) -> RowsSpec:
    """The spec of rows of logits, with or without a gradient."""
    given: dict[str, Any] = {"gradient": gradient, "in_place": in_place,
                             "scaled": what.scaled and gradient is not None}
    if what.temperature is None: return CrossEntropySpec(*shape, dtype, what.loss, **given)
    assert teacher is not None
    return DistillationSpec(*shape, dtype, what.loss, **given, teacher=teacher, temperature=what.temperature)


def total(losses: Tensor, factors: Tensor | None) -> Tensor:
    """Returns what a function gives of losses."""
    return losses if factors is None else losses.sum() * factors[1]


# **** in plain tinygrad ****

def row_losses(what: RowLosses, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Loss or losses, and the gradient of logits."""
    given = Operands.of(what, tensors)
    losses, gradient = _losses(what, given.rows, given, given.rows.dtype)
    if given.factors is not None: gradient = gradient * given.factors[0]
    return total(losses, given.factors), gradient.cast(gradient_dtype(given.rows.dtype))


def linear_losses(what: LinearLosses, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Loss or losses, and the gradients of hidden, weight and bias. All logits are there at once."""
    given = Operands.of(what, tensors)
    hidden, weight, bias = given.rows, given.weight, given.bias
    assert weight is not None
    logits = hidden.float() @ weight.float().T
    if bias is not None: logits = logits + bias.float()
    losses, gradient = _losses(what, logits.contiguous(), given, hidden.dtype)
    gradient = gradient.cast(hidden.dtype).contiguous().float()
    made = [gradient @ weight.float(), gradient.T @ hidden.float(), gradient.sum(0)]
    if given.factors is not None: made = [each * given.factors[0] for each in made]
    return total(losses, given.factors), *(each.cast(gradient_dtype(one.dtype)) for each, one in
                     zip(made, (hidden, weight, bias), strict=True) if one is not None)


def _losses(what: RowLosses | LinearLosses, logits: Tensor, given: Operands[Tensor],
            gradient: DType) -> tuple[Tensor, Tensor]:
    teacher = given.teacher
    if given.teacher_weight is not None and teacher is not None:
        teacher = (teacher.float() @ given.teacher_weight.float().T).contiguous()
    T, V = map(int, logits.shape)
    spec = rows_spec(what, (T, V), logits.dtype, None if teacher is None else teacher.dtype, gradient)
    return compute_losses(spec, logits, given.labels, teacher, given.scale)
