"""Cross entropy with the gradient in the same pass: of logits, or of hidden states and an output layer.

Protocol. A loss of "mean" or "sum" is one call of a function known by name (named.py), whose gradients are
made beside the losses, in the forward pass, and are multiplied by the gradient of the loss where that is not
1. Losses of "none" are a call without gradients; these are a second call, which computes the logits again,
with the gradient of each loss as its row's scale. What is not used is not computed.
"""
from __future__ import annotations

from dataclasses import replace
from math import isfinite, prod
from typing import Literal, TypeAlias

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.cross_entropy import lower as _kernels  # noqa: F401  registers them
from tinygrad_nv.patterns.cross_entropy.named import LinearLosses, RowLosses, linear_losses, row_losses
from tinygrad_nv.patterns.named import call, check_devices
from tinygrad_nv.tile.cross_entropy.spec import LOGITS, Loss
from tinygrad_nv.tile.expression import short

Reduction = Literal["mean", "sum", "none"]
Count: TypeAlias = int | Tensor | None


def cross_entropy(logits: Tensor, labels: Tensor, *, reduction: Reduction = "mean", ignore_index: int = -100,
                  label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                  divisor: float = 1.0, num_items: Count = None) -> Tensor:
    """Cross entropy of logits (…, V) and integer labels (…), in float32: (), or (…) with reduction "none".

    As torch.nn.functional.cross_entropy of rows: labels of `ignore_index` count nothing, "mean" divides by
    the number of the others, and is NaN where there are none; or by `num_items`, a number or a Tensor of one,
    which is that of a whole batch where this is one of its micro-batches (transformers' num_items_in_batch).
    `label_smoothing` is the share of the target that all V classes have; `z_loss` times LSE² is added; logits
    are divided by `divisor` and capped, softcap · tanh(x / softcap), before (Gemma 2). A label that is no
    class is a loss of NaN. Raises `SpecError`."""
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, divisor)
    _check_rows("logits", logits, labels)
    return _logit_loss(RowLosses(loss), logits, labels, [], reduction, num_items)


def distillation(logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None, *,
                 temperature: float = 1.0, reduction: Reduction = "mean", ignore_index: int = -100,
                 softcap: float | None = None, divisor: float = 1.0, num_items: Count = None) -> Tensor:
    """temperature² · KL(softmax(teacher / temperature) ‖ softmax(logits / temperature)) of rows of logits
    (…, V), in float32. Rows whose label is `ignore_index` count nothing; labels have no other use here. The
    rest as `cross_entropy`. The teacher has no gradient. Raises `SpecError`."""
    labels = _all_counted(logits, ignore_index) if labels is None else labels
    _check_rows("logits", logits, labels)
    _check_teacher(teacher_logits, (*logits.shape,))
    what = RowLosses(Loss(ignore_index, softcap=softcap, divisor=divisor), _temperature(temperature))
    return _logit_loss(what, logits, labels, [_flat(teacher_logits)], reduction, num_items)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
                         reduction: Reduction = "mean", ignore_index: int = -100,
                         label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
                         divisor: float = 1.0, num_items: Count = None, chunk: int = 0) -> Tensor:
    """`cross_entropy` of hidden weightᵀ + bias, of which only some rows are there at a time.

    hidden (…, H), weight (V, H), bias (V) of float32, bfloat16 or float16, hidden and weight of one dtype,
    labels integers (…). Matmuls add up in float32, and logits are float32. The gradients of hidden, weight
    and bias are made in the forward pass, where they are used, and are of the dtypes of these. `chunk` rows
    are at work at a time, 0: as many as have 32 MB of logits, 1 GB on a GPU, or 64 (1024) if that is more.
    Peak memory besides arguments and gradients: chunk · V · 4 bytes, 6 of 16-bit dtypes. Where no kernels
    are, all logits are there at once. Raises `SpecError`."""
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, divisor)
    _check_rows("hidden", hidden, labels)
    _check_weight("weight", weight, hidden, bias)
    what = LinearLosses(loss, biased=bias is not None, chunk=_check_chunk(chunk))
    return _linear_loss(what, hidden, weight, bias, labels, [], reduction, num_items)


def linear_distillation(hidden: Tensor, weight: Tensor, labels: Tensor | None = None, *,
                        teacher_logits: Tensor | None = None, teacher_hidden: Tensor | None = None,
                        teacher_weight: Tensor | None = None, bias: Tensor | None = None,
                        temperature: float = 1.0, reduction: Reduction = "mean", ignore_index: int = -100,
                        softcap: float | None = None, divisor: float = 1.0, num_items: Count = None,
                        chunk: int = 0) -> Tensor:
    """`distillation` of hidden weightᵀ + bias from a teacher's logits (…, V), or from its hidden states
    (…, H') and weight (V, H'), of which only some rows of logits are there at a time, too. The rest as
    `linear_cross_entropy`. Raises `SpecError`."""
    labels = _all_counted(hidden, ignore_index) if labels is None else labels
    _check_rows("hidden", hidden, labels)
    _check_weight("weight", weight, hidden, bias)
    given = [one for one in (teacher_logits, teacher_hidden, teacher_weight) if one is not None]
    linear = teacher_logits is None
    if len(given) != 1 + linear:
        raise SpecError("a teacher of " + (" and ".join(name for name, one in (
            ("logits", teacher_logits), ("hidden states", teacher_hidden), ("a weight", teacher_weight))
            if one is not None) or "nothing"), "teacher_logits, or teacher_hidden and teacher_weight")
    if linear:
        _check_rows("teacher_hidden", given[0], labels)
        _check_weight("teacher_weight", given[1], given[0], None, int(weight.shape[0]))
    else: _check_teacher(given[0], (*hidden.shape[:-1], weight.shape[0]))
    what = LinearLosses(Loss(ignore_index, softcap=softcap, divisor=divisor), _temperature(temperature),
                        biased=bias is not None, linear_teacher=linear, chunk=_check_chunk(chunk))
    teacher = [_flat(given[0]), *given[1:]]
    return _linear_loss(what, hidden, weight, bias, labels, teacher, reduction, num_items)


# **** losses and their gradients ****

def _logit_loss(what: RowLosses, logits: Tensor, labels: Tensor, teacher: list[Tensor], reduction: Reduction,
                num_items: Count) -> Tensor:
    flat = _flat(logits)
    check_devices(flat, labels, *teacher)
    if flat.shape[0] == 0: return _empty([flat], labels, reduction, num_items)
    own = _int32(labels)
    factors = _factors(what.loss, own, reduction, num_items)
    what = replace(what, factored=factors is not None)
    made = call(what, row_losses, flat, own, *teacher, *([] if factors is None else [factors]),
                grad=_gradient)[0]
    return made if factors is not None else made.reshape(labels.shape)


def _linear_loss(what: LinearLosses, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
                 teacher: list[Tensor], reduction: Reduction, num_items: Count) -> Tensor:
    flat, biases = _flat(hidden), [] if bias is None else [bias]
    check_devices(flat, weight, *biases, labels, *teacher)
    if flat.shape[0] == 0: return _empty([flat, weight, *biases], labels, reduction, num_items)
    own = _int32(labels)
    factors = _factors(what.loss, own, reduction, num_items)
    what = replace(what, factored=factors is not None)
    made = call(what, linear_losses, flat, weight, *biases, own, *teacher,
                *([] if factors is None else [factors]), grad=_gradient)[0]
    return made if factors is not None else made.reshape(labels.shape)


def _factors(loss: Loss, labels: Tensor, reduction: Reduction, num_items: Count) -> Tensor | None:
    """Returns what gradients are multiplied by, and the sum of losses, float32 (2); None where there is no
    sum."""
    if reduction not in ("mean", "sum", "none"):
        raise SpecError(f"reduction={reduction!r}", '"mean", "sum" or "none"')
    if num_items is not None and reduction != "mean":
        raise SpecError(f"num_items with reduction={reduction!r}", 'reduction="mean"', "leave one out")
    if reduction == "none": return None
    if reduction == "sum": return Tensor.ones(2, dtype=dtypes.float32, device=labels.device).contiguous()
    # a Tensor without a device is a number
    if isinstance(num_items, Tensor) and num_items.device is None: num_items = int(num_items.item())
    if num_items is not None and not isinstance(num_items, Tensor):
        if num_items < 1: raise SpecError(f"num_items={num_items}", "a number of labels, from 1 on")
        return Tensor.full((2,), 1 / num_items, dtype=dtypes.float32, device=labels.device).contiguous()
    count = (labels != loss.ignore_index).sum() if num_items is None else num_items.to(labels.device)
    count = count.cast(dtypes.float32).reshape(1).contiguous()
    return (count == 0).where(1, count).cat(count).reciprocal().contiguous()


def _empty(given: list[Tensor], labels: Tensor, reduction: Reduction, num_items: Count) -> Tensor:
    """The loss of no row: a sum of nothing of each argument, whose gradients are 0."""
    _factors(Loss(), _int32(labels), reduction, num_items)
    if reduction == "none": return given[0].float().sum(-1).reshape(labels.shape)
    made = sum((one[:0].float().sum() for one in given[1:]), given[0].float().sum())
    return made if reduction == "sum" or num_items is not None else made * float("nan")


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    """The gradients of a call's arguments, of that of its loss or losses."""
    what, arguments = call_.arg.aux, call_.src[1:]
    count = 1 if isinstance(what, RowLosses) else 2 + what.biased
    if what.factored:
        made, number = [call_.gettuple(1 + i) for i in range(count)], _constant(grad)
        factor = grad if number is None else number
        if number != 1: made = [one.cast(dtypes.float32) * factor for one in made]
    else:
        tensors = [Tensor(one) for one in (*arguments, grad)]
        compute = row_losses if isinstance(what, RowLosses) else linear_losses
        made = [one.uop for one in call(replace(what, scaled=True), compute, *tensors)[1:]]
    results = [one.cast(like.dtype) for one, like in zip(made, arguments, strict=False)]
    return (*results, *[None] * (len(arguments) - count))


def _constant(grad: UOp) -> float | None:
    """The number that a gradient is, where it is one: tinygrad gives it as storage that it was written to."""
    if grad.op is Ops.AFTER and len(grad.src) == 2 and grad.src[1].op is Ops.STORE: grad = grad.src[1].src[1]
    found = grad.simplify()
    while found.op in (Ops.RESHAPE, Ops.EXPAND, Ops.CAST): found = found.src[0]
    return float(found.arg) if found.op is Ops.CONST else None


# **** checks ****

def _flat(x: Tensor) -> Tensor: return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _int32(labels: Tensor) -> Tensor: return labels.reshape(-1).cast(dtypes.int32).contiguous()


def _all_counted(rows: Tensor, ignore_index: int) -> Tensor:
    """Labels where there are none: none is ignored."""
    counted = 0 if ignore_index != 0 else 1
    return Tensor.full(rows.shape[:-1], counted, dtype=dtypes.int32, device=rows.device)


def _temperature(temperature: float) -> float:
    if not (isfinite(temperature) and temperature > 0):
        raise SpecError(f"temperature={temperature}", "a finite number above 0")
    return float(temperature)


def _check_chunk(chunk: int) -> int:
    if type(chunk) is not int or chunk < 0: raise SpecError(f"chunk={chunk!r}", "a number of rows, or 0")
    return chunk


def _check_rows(name: str, rows: Tensor, labels: Tensor) -> None:
    """Raises `SpecError` for rows and labels that do not fit each other."""
    if rows.ndim < 1 or rows.dtype not in LOGITS:
        raise SpecError(f"{name} of {short(rows.dtype)} {rows.shape}",
                        "(…, size) of float32, bfloat16 or float16")
    if not dtypes.is_int(labels.dtype): raise SpecError(f"labels of {short(labels.dtype)}", "integers")
    if labels.shape != rows.shape[:-1]:
        raise SpecError(f"labels {labels.shape} beside {name} {rows.shape}", f"{rows.shape[:-1]}: one a row")


def _check_weight(name: str, weight: Tensor, hidden: Tensor, bias: Tensor | None, classes: int = 0) -> None:
    """Raises `SpecError` for the matrix of an output layer, or its bias, of a wrong shape or dtype."""
    wrong = weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.dtype != hidden.dtype
    if wrong or (classes and weight.shape[0] != classes):
        raise SpecError(f"{name} of {short(weight.dtype)} {weight.shape}",
                        f"{short(hidden.dtype)} ({classes or 'V'}, {hidden.shape[-1]})")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in LOGITS):
        raise SpecError(f"bias of {short(bias.dtype)} {bias.shape}", f"floats ({weight.shape[0]},)")


def _check_teacher(teacher: Tensor, shape: tuple[object, ...]) -> None:
    if teacher.shape != shape or teacher.dtype not in LOGITS:
        raise SpecError(f"a teacher's logits of {short(teacher.dtype)} {teacher.shape}",
                        f"{shape} of float32, bfloat16 or float16")
