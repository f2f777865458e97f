"""What gated activations, rotations of heads and sums of columns refuse."""
from __future__ import annotations

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import gate_up, rotate_heads
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.rope.spec import Angles, RopeSpec

F32, BF16 = dtypes.float32, dtypes.bfloat16
X, COS = Tensor.empty(2, 7, 5 * 32), Tensor.empty(7, 16)


@pytest.mark.parametrize(("both", "activation", "words"), [
    (Tensor.empty(2, 8), "relu", ("activation='relu'", "one of silu, gelu_tanh, gelu")),
    (Tensor.empty(2, 7), "silu", ("gate | up of shape (2, 7)", "gate, then up")),
    (Tensor.empty(2, 8, dtype=dtypes.int32), "silu", ("gate | up of int", "float32, bfloat16 or float16"))])
def test_gated_activations(both: Tensor, activation: str, words: tuple[str, ...]):
    with pytest.raises(SpecError) as refused: gate_up(both, activation)
    assert all(each in str(refused.value) for each in words), refused.value


@pytest.mark.parametrize(("x", "cos", "sin", "heads", "words"), [
    (X, COS, COS, 0, ("0 and 1 heads", "one or more")),
    (X[0], COS, COS, 3, ("q|k|v of shape", "(B, T, 5 D)")),
    (X, COS[1:], COS[1:], 3, ("cos (6, 16)", "(7, half) or (2, 7, half)", "half ≤ 16")),
    (X, COS, COS.cast(BF16), 3, ("of both",)), (X.cast(dtypes.int32), COS, COS, 3, ("q|k|v of int",))])
def test_rotated_heads(x: Tensor, cos: Tensor, sin: Tensor, heads: int, words: tuple[str, ...]):
    with pytest.raises(SpecError) as refused: rotate_heads(x, cos, sin, heads, 1)
    assert all(each in str(refused.value) for each in words), refused.value


def test_specs():
    x = Load(0, F32, 4, 1)
    for term, words in ((x.cast(BF16), "terms of bf16"), (x * Sum(), "a statistic in a term"),
                        (Load(0, F32, 4, 1, (8,)), "loads of a batch")):
        with pytest.raises(SpecError, match=words): ColumnSumSpec(8, 4, term)
    with pytest.raises(SpecError, match="no more rotated"): RopeSpec(1, 1, 1, 1, 8, 5, F32, Angles(F32, 5))
    with pytest.raises(SpecError, match="s32"): RopeSpec(1, 1, 1, 1, 8, 4, dtypes.int32, Angles(F32, 4))
