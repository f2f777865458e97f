"""Losses that cannot be: what was found, what is accepted."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import cross_entropy, distillation, linear_cross_entropy, linear_distillation

LOGITS, HIDDEN, WEIGHT = Tensor.zeros(4, 9), Tensor.zeros(4, 8), Tensor.zeros(9, 8)
LABELS = Tensor.zeros(4, dtype=dtypes.int32)


def linear(**options: Any) -> Tensor: return linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **options)


def taught(**options: Any) -> Tensor: return linear_distillation(HIDDEN, WEIGHT, LABELS, **options)


CASES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "labels' shape": (lambda: cross_entropy(LOGITS, LABELS[:3]), r"labels \(3,\) beside logits \(4, 9\)"),
    "labels' dtype": (lambda: cross_entropy(LOGITS, LABELS.float()), "labels of f32\n  expected: integers"),
    "logits' dtype": (lambda: cross_entropy(LOGITS.int(), LABELS), "logits of s32"),
    "reduction": (lambda: linear(reduction="max"), "reduction='max'\n  expected: \"mean\", \"sum\""),
    "items of a sum": (lambda: linear(reduction="sum", num_items=3), "num_items with reduction='sum'"),
    "no items": (lambda: linear(num_items=0), "num_items=0\n  expected: a number of labels, from 1 on"),
    "smoothing": (lambda: linear(label_smoothing=1.5), "label_smoothing=1.5\n  expected: 0 to 1"),
    "z-loss": (lambda: linear(z_loss=-1.0), "z_loss=-1.0"),
    "soft-cap": (lambda: linear(softcap=0.0), "softcap=0.0\n  expected: a finite number above 0"),
    "divisor": (lambda: linear(divisor=0.0), "divisor=0.0"),
    "ignored": (lambda: linear(ignore_index=1 << 40), "ignore_index=1099511627776\n  expected: an int32"),
    "chunk": (lambda: linear(chunk=-1), "chunk=-1\n  expected: a number of rows, or 0"),
    "bias": (lambda: linear(bias=Tensor.zeros(8)), r"bias of f32 \(8,\)\n  expected: floats \(9,\)"),
    "weight": (lambda: linear_cross_entropy(HIDDEN, WEIGHT.half(), LABELS), r"weight of f16 \(9, 8\)"),
    "temperature": (lambda: distillation(LOGITS, LOGITS, temperature=0.0), "temperature=0.0"),
    "teacher's logits": (lambda: distillation(LOGITS, LOGITS[:, :3]), r"a teacher's logits of f32 \(4, 3\)"),
    "no teacher": (lambda: taught(), "a teacher of nothing"),
    "half a teacher": (lambda: taught(teacher_hidden=HIDDEN), "a teacher of hidden states"),
    "two teachers": (lambda: taught(teacher_logits=LOGITS, teacher_weight=WEIGHT), "of logits and a weight"),
    "teacher's classes": (lambda: taught(teacher_hidden=HIDDEN, teacher_weight=WEIGHT[:5]),
                          r"teacher_weight of f32 \(5, 8\)\n  expected: f32 \(9, 8\)")}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str):
    made, words = CASES[name]
    with pytest.raises(SpecError, match=words): made()
