"""Policies of dtypes: what they are, print and come to where operands meet."""
from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from tinygrad import dtypes

from tinygrad_nv.numerics.meet import meet
from tinygrad_nv.numerics.policy import (
    NARROW,
    REACH,
    Policied,
    accum,
    deterministic,
    holds,
    loss_scale,
    saturate,
    stochastic_round,
)

f16, bf16, f32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
e4m3, e5m2, int8, int32 = dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int8, dtypes.int32


def test_a_policied_dtype_is_a_value():
    made = bf16 @ accum(f32) @ stochastic_round
    assert str(made) == "bf16 @accum(f32) @stochastic_round"
    assert made == bf16 @ stochastic_round @ accum(f32)
    assert len({made, bf16 @ stochastic_round @ accum(f32), bf16 @ accum(f32)}) == 2
    assert (made.dtype, made.accumulator) == (bf16, f32)
    assert made @ accum(f32) == made
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(("made", "text"), [
    (bf16 @ stochastic_round(seed=3) @ deterministic, "bf16 @stochastic_round(seed=3) @deterministic"),
    (f16 @ loss_scale(2.0 ** 16) @ accum(f16), "f16 @accum(f16) @loss_scale(65536)"),
    (e5m2 @ saturate @ loss_scale(8), "e5m2 @saturate @loss_scale(8)"),
    (int8 @ accum(int32), "s8 @accum(s32)"),
    (f32 @ deterministic, "f32 @deterministic"), (Policied(bf16), "bf16")])
def test_print(made: Policied, text: str):
    assert str(made) == text


def test_what_holds_what_is_what_values_say():
    """Over every value of 8 and 16 bits."""
    torch = pytest.importorskip("torch")
    kinds = {e4m3: torch.float8_e4m3fn, e5m2: torch.float8_e5m2, f16: torch.float16, bf16: torch.bfloat16}
    for narrow in NARROW:
        bits = torch.arange(2 ** (8 * narrow.itemsize), dtype=torch.int32)
        bits = bits.to(torch.uint8 if narrow.itemsize == 1 else torch.uint16)
        values = bits.view(kinds[narrow]).double()
        values = values[values.isfinite()]
        for wide in NARROW:
            same = bool((values.to(kinds[wide]).double() == values).all())
            assert holds(wide, narrow) is same, (wide, narrow)
        assert all(holds(wide, narrow) for wide in REACH if wide not in NARROW)


@pytest.mark.parametrize(("a", "b", "operation", "text"), [
    (bf16 @ accum(f32), bf16, "multiply", "bf16 @accum(f32)"),
    (bf16 @ accum(f32), bf16 @ accum(f32) @ saturate, "multiply", "bf16 @accum(f32) @saturate"),
    (bf16 @ stochastic_round, f32, "add", "f32"), (e4m3 @ accum(f32), e5m2, "multiply", "f16 @accum(f32)"),
    (f16 @ loss_scale(8), f16, "multiply", "f16 @loss_scale(8)"),
    (f16 @ loss_scale(8), f16 @ loss_scale(8), "add", "f16 @loss_scale(8)"),
    (int8 @ accum(int32), int8, "multiply", "s8 @accum(s32)"), (bf16 @ deterministic, e4m3, "add",
                                                                 "bf16 @deterministic")])
def test_meet(a: Policied, b: Policied, operation: str, text: str):
    assert str(meet(a, b, operation)) == str(meet(b, a, operation)) == text


def test_importing_policies_loads_no_numpy():
    text = ("import sys, tinygrad_nv, tinygrad_nv.numerics.meet\n"
            "assert 'numpy' not in sys.modules, 'numpy'")
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
