"""Tensor.scaled_dot_product_attention refuses in our words, as an error that code written for tinygrad
catches."""
from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from tinygrad_nv import Context, Tensor, disabled, dtypes
from tinygrad_nv.errors import NVError, SpecError

KEYS = (2, 9, 16), (2, 9, 16)

PLAIN = (ArithmeticError, AttributeError, IndexError, RuntimeError, ValueError)


def zeros(*shape: int, dtype=dtypes.float32, device: str = "CPU") -> Tensor:
    return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous()


def attended(*shapes: tuple[int, ...], mask: Tensor | None = None, **how: object) -> Callable[[], Tensor]:
    return lambda: Tensor.scaled_dot_product_attention(*(zeros(*shape) for shape in shapes), mask, **how)


CASES = {
    "heads": attended((1, 8, 4, 16), (1, 2, 9, 16), (1, 2, 9, 16)),
    "heads of a group": attended((1, 31, 16, 64), (1, 8, 16, 64), (1, 8, 16, 64), enable_gqa=True),
    "heads of keys and values": attended((1, 4, 4, 16), (1, 4, 9, 16), (1, 2, 9, 16)),
    "widths": attended((4, 16), (9, 8), (9, 8)),
    "keys and values": attended((2, 4, 16), (2, 9, 16), (2, 7, 16)),
    "batches": attended((2, 1, 4, 16), (3, 1, 9, 16), (3, 1, 9, 16)),
    "a vector of keys": attended((4, 16), (16,), (9, 16)),
    "a vector of values": attended((4, 16), (9, 16), (16,)),
    "a number": attended((), *KEYS),
    "no heads": attended((2, 4, 4, 16), (2, 0, 9, 16), (2, 0, 9, 16), enable_gqa=True),
    "a mask of another shape": attended((2, 4, 16), *KEYS, mask=zeros(4, 8)),
    "a mask of another batch": attended((2, 4, 16), *KEYS, mask=zeros(3, 4, 9)),
    "a mask and is_causal": attended((2, 4, 16), *KEYS, mask=zeros(4, 9), is_causal=True),
    "a mask elsewhere": attended((2, 4, 16), *KEYS, mask=zeros(4, 9, device="CPU:1")),
    "keys elsewhere": lambda: zeros(2, 4, 16).scaled_dot_product_attention(
        zeros(2, 9, 16, device="CPU:1"), zeros(2, 9, 16)),
    "no tensor": lambda: zeros(2, 4, 16).scaled_dot_product_attention(3, zeros(2, 9, 16)),
    "dropout": attended((2, 4, 16), *KEYS, dropout_p=1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_what_tinygrad_raises_catches_what_we_raise(name):
    with Context(TRAINING=1):
        with disabled(), pytest.raises(PLAIN) as plain: CASES[name]().realize()
        with pytest.raises(plain.type): CASES[name]().realize()


def test_the_words_are_ours():
    with pytest.raises(IndexError, match="8 query heads and 2 key heads") as caught: CASES["heads"]()
    error = caught.value
    assert isinstance(error, SpecError)
    assert isinstance(error, NVError)
    assert (type(error).__name__, error.fix) == ("SpecError", "pass enable_gqa=True")
    with pytest.raises(RuntimeError, match="query heads of 16 elements, key heads of 8"): CASES["widths"]()


def test_it_travels_between_processes():
    with pytest.raises(IndexError) as caught: CASES["heads"]()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_a_matmul_of_several_devices_is_refused_by_tinygrad():
    for how in (disabled, lambda: Context(NOOPT=0)):
        with how(), pytest.raises(RuntimeError, match="all buffers must be on the same device"):
            (Tensor.rand(16, 32).realize() @ Tensor.rand(32, 8, device="CPU:1").realize()).realize()
