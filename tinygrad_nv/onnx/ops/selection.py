"""Ops whose values decide how many results there are, or where they come from.

Protocol: NonMaxSuppression, Unique and labels are computed on the host: their results have extents that
depend on values. ReverseSequence gathers on the device."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import Value, from_numpy
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op

PAIRS = 1 << 31     # limit: pairs of boxes that one NonMaxSuppression compares: some seconds
STEP = 2048         # pairs in the time that a box takes besides
CLASSES = 4         # classes that limits count as one node


@op("NonMaxSuppression", host=(0, 1, 2, 3, 4))
def non_max_suppression(boxes: np.ndarray, scores: np.ndarray, most: np.ndarray | None = None,
                        overlap: np.ndarray | None = None, least: np.ndarray | None = None,
                        center_point_box: int = 0) -> Value:
    """The boxes of each class with the highest scores that do not overlap a better one too much: rows of
    (batch, class, box)."""
    limit, shared = 0 if most is None else int(most.item()), 0.0 if overlap is None else overlap.item()
    made = []
    budget().expect(math.prod(scores.shape[:2]) // CLASSES, 1)
    pairs = 0
    for batch, group in np.ndindex(*scores.shape[:2]):
        corners, ranked = _corners(boxes[batch], center_point_box), scores[batch, group]
        order = np.argsort(-ranked, kind="stable")
        if least is not None: order = order[ranked[order] > least.item()]
        kept: list[int] = []
        taken = np.empty((4, min(max(limit, 0), len(corners))), corners.dtype)
        for i in order:
            if (n := len(kept)) >= limit: break
            if (pairs := pairs + n + STEP) > PAIRS:
                raise OnnxError(f"more than {PAIRS} pairs of boxes to compare", "fewer boxes, or fewer to "
                                "keep", "lower max_output_boxes_per_class, or raise score_threshold")
            box = corners[i]
            near = np.flatnonzero((taken[2, :n] > box[0]) & (taken[0, :n] < box[2]))
            # of a negative threshold others are too near, too
            if near.size < n and not shared >= 0: continue
            if not near.size or (_overlaps(box, taken[:, near].T) <= shared).all():
                taken[:, n] = box
                kept.append(int(i))
        made += [(batch, group, i) for i in kept]
    return from_numpy(np.array(made, dtype=np.int64).reshape(-1, 3))


def _corners(boxes: np.ndarray, centred: int) -> np.ndarray:
    """Boxes as low and high corners."""
    a, b = boxes[:, :2], boxes[:, 2:]
    if centred: return np.concatenate([a - b / 2, a + b / 2], axis=1)
    return np.concatenate([np.minimum(a, b), np.maximum(a, b)], axis=1)


def _overlaps(a: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The area of the intersection of a box with each of others over that of the union, in float64."""
    made = np.zeros(len(others))
    sides = np.minimum(a[2:], others[:, 2:]) - np.maximum(a[:2], others[:, :2])
    there = np.flatnonzero((sides[:, 0] > 0) & (sides[:, 1] > 0))
    both = np.prod(sides[there], axis=1).astype(np.float64)
    own, theirs = (np.prod(each[..., 2:] - each[..., :2], axis=-1).astype(np.float64)
                   for each in (a, others[there]))
    made[there] = both / (own + theirs - both)
    return made


@op("Unique", host=(0,))
def unique(x: np.ndarray, axis: int | None = None, sorted: int = 1) -> tuple[Value, ...]:
    """Distinct elements, where each first occurs, which one each element is, and how often."""
    y, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True,
                                          axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        y = np.take(y, order, axis=0 if axis is None else axis)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    numbers = (from_numpy(each.astype(np.int64)) for each in (first, inverse, counts))
    return from_numpy(np.asarray(y)), *numbers


@op("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """The first elements of each sequence of a batch in the opposite order."""
    shape = [1] * x.ndim
    steps = Tensor.arange(int(x.shape[time_axis]))
    steps = steps.reshape([-1 if i == time_axis else 1 for i in range(x.ndim)])
    shape[batch_axis] = int(x.shape[batch_axis])
    n = lengths.reshape(shape)
    return x.gather(time_axis, (steps < n).where(n - 1 - steps, steps).expand(x.shape))


@op("LabelEncoder", domain="ai.onnx.ml", raw=True)
def label_encoder(x: Value, default_float: float = -0.0, default_int64: int = -1,
                  default_string: str = "_Unused", default_tensor: np.ndarray | None = None,
                  **tables: Sequence[Any] | np.ndarray) -> Value:
    """A label for each key."""
    keys = next(each for name, each in tables.items() if name.startswith("keys_"))
    kind, values = next((name, each) for name, each in tables.items() if name.startswith("values_"))
    usual: Any = {"values_floats": np.float32(default_float), "values_int64s": np.int64(default_int64),
                  "values_strings": default_string}.get(kind)
    if default_tensor is not None: usual = default_tensor.reshape(-1)[0]
    from tinygrad_nv.onnx.elements import to_numpy
    known = np.asarray(x if isinstance(x, np.ndarray) else to_numpy(x))
    table = dict(zip(_plain(keys), _plain(values), strict=True))
    made = [table.get(each, usual) for each in known.reshape(-1).tolist()]
    dtype = object if isinstance(usual, str) else np.asarray(usual).dtype
    return from_numpy(np.array(made, dtype=dtype).reshape(known.shape))


def _plain(x: Sequence[Any] | np.ndarray) -> list[Any]:
    """Keys or values as Python objects."""
    return list(x.reshape(-1).tolist() if isinstance(x, np.ndarray) else x)
