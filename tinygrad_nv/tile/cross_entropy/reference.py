"""Losses of rows in plain tinygrad (tile/reference.py): those of patterns/cross_entropy, too."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, Loss, RowsSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, gather, round_to

SOME_CLASSES = 4096     # that labels usually have, of many


def arguments(spec: RowsSpec) -> tuple[Argument, ...]:
    """gradient, losses, logits (before the losses where the gradient is in their place), labels, teacher,
    scale: those that there are."""
    whole, row = dense(spec.rows, spec.size), dense(spec.rows)
    losses = Argument("losses", dtypes.float32, (row,), "out")
    logits = Argument("logits", spec.dtype, (whole,), "inout" if spec.in_place else "in")
    if spec.in_place: made = [logits, losses]
    elif spec.gradient is None: made = [losses, logits]
    else: made = [Argument("gradient", spec.gradient, (whole,), "out"), losses, logits]
    step = max(1, spec.size // SOME_CLASSES)
    # the second row is ignored: the timing model looks at the first
    classes = [0, spec.loss.ignore_index, *range(0, spec.size, step), spec.size - 1]
    if spec.rows == 1: classes = classes[-1:]
    made.append(Argument("labels", dtypes.int32, (row,), values=range(spec.size), usual=classes))
    if isinstance(spec, DistillationSpec): made.append(Argument("teacher", spec.teacher, (whole,)))
    return (*made, *([Argument("scale", dtypes.float32, (row,))] if spec.scaled else []))


def reference(spec: RowsSpec, given: Given, exact: bool = False) -> Results:
    """The gradient, where there is one, and losses."""
    found = {each.name: gather(given[each.name], each.places[0]) for each in arguments(spec)
             if each.role != "out"}
    wide = compute_dtype(dtypes.float32, exact)
    losses, gradient = compute_losses(spec, found["logits"], found["labels"], found.get("teacher"),
                                found.get("scale"), wide)
    if spec.gradient is None: return losses,
    return gradient if exact else round_to(gradient, spec.gradient), losses


def compute_losses(spec: RowsSpec, logits: Tensor, labels: Tensor, teacher: Tensor | None = None,
             scale: Tensor | None = None, wide: DType = dtypes.float32) -> tuple[Tensor, Tensor]:
    """Losses [rows], and the gradient of logits [rows, size] before it is rounded."""
    x, slope = _cap(spec.loss, logits.cast(wide))
    counted = labels != spec.loss.ignore_index
    if isinstance(spec, DistillationSpec):
        assert teacher is not None
        losses, gradient = _distill(spec.temperature, x, teacher.cast(wide))
    else:
        assert isinstance(spec, CrossEntropySpec)
        losses, gradient = _cross_entropy(spec.loss, x, labels)
    gradient = gradient * slope
    if scale is not None: gradient = gradient * scale.cast(wide).unsqueeze(-1)
    return counted.where(losses, 0), counted.unsqueeze(-1).where(gradient, 0)


def _cap(loss: Loss, logits: Tensor) -> tuple[Tensor, Tensor]:
    """x, and its slope."""
    x = logits / loss.divisor
    if loss.softcap is None: return x, x.const_like(1 / loss.divisor)
    kept = (x / loss.softcap).tanh()
    return kept * loss.softcap, (1 - kept * kept) / loss.divisor


def _cross_entropy(loss: Loss, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of x."""
    size, smoothing = int(x.shape[-1]), loss.label_smoothing
    target = labels.unsqueeze(-1) == Tensor.arange(size, dtype=dtypes.int32).to(x.device)
    known = (labels >= 0) & (labels < size)
    most = x.max(-1, keepdim=True)
    # contiguous: tinygrad else has each element of the gradient add up its row again
    log = (x - most).exp().sum(-1).contiguous().log()
    own = known.where(target.where(most - x, 0).sum(-1), float("nan"))
    lse = most.squeeze(-1) + log
    losses = (own + log) * (1 - smoothing)
    if smoothing: losses = losses + ((most - x).mean(-1) + log) * smoothing
    if loss.z_loss: losses = losses + lse * lse * loss.z_loss
    p = (x - most - log.unsqueeze(-1)).exp()
    gradient = p - target.where(1 - smoothing, 0.0).cast(x.dtype) - smoothing / size
    return losses, gradient + p * (lse * (2 * loss.z_loss)).unsqueeze(-1) if loss.z_loss else gradient


def _distill(temperature: float, x: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Losses, and the gradient of x."""
    p, q = ((each / temperature).log_softmax(-1).contiguous() for each in (x, teacher))
    part = (q.exp() == 0).where(0, q.exp() * (q - p))
    return part.sum(-1) * temperature ** 2, (p.exp() - q.exp()) * temperature
