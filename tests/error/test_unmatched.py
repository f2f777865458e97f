"""Contractions that are left to tinygrad say why in explain(), and what explain() cannot explain."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tinygrad.dtype import DType

from tinygrad_nv import Context, Tensor, Variable, dtypes, explain
from tinygrad_nv.errors import NVError

ROWS = Variable("rows", 1, 32)


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def of(*shape: int, dtype: DType = dtypes.bfloat16) -> Tensor: return Tensor.empty(*shape, dtype=dtype)


def left(y: Tensor) -> list[str]:
    """Why each kernel is not ours; it must be none."""
    kernels = explain(y).kernels
    assert all(kernel.template is None for kernel in kernels)
    return [kernel.reason for kernel in kernels]


def test_float32():
    assert left(of(24, 48, dtype=dtypes.float) @ of(48, 40, dtype=dtypes.float)) == [
        "gemm: float32 without ALLOW_TF32"]


def test_float64():
    assert left(of(24, 48, dtype=dtypes.double) @ of(48, 40, dtype=dtypes.double)) == [
        "gemm: no kernel multiplies f64; they take f32, f16, bf16, e4m3, e5m2, and s8 and u8 summed in s32"]


def test_bytes_that_wrap():
    assert left(of(24, 48, dtype=dtypes.int8) @ of(48, 40, dtype=dtypes.int8)) == [
        "gemm: products of s8 wrap around before the sum; cast operands to int32"]


def test_integers():
    for dtype, name in ((dtypes.int, "s32"), (dtypes.int16, "s16"), (dtypes.int64, "s64")):
        reason, = left(of(24, 48, dtype=dtype) @ of(48, 40, dtype=dtype))
        assert reason.startswith(f"gemm: no kernel multiplies {name}; they take f32,")


def test_floats_that_are_summed_in_doubles():
    a, b = of(24, 1, 48, dtype=dtypes.float), of(1, 40, 48, dtype=dtypes.float)
    assert left((a * b).cast(dtypes.double).sum(2)) == [
        "gemm: products of f32 are summed in f64; kernels sum them in f32"]


@pytest.mark.parametrize("device", ["EMU", "CPU"])
def test_a_matmul_has_one_reason_and_no_notes(device: str):
    """Not what a later rewrite says of the same sum."""
    for dtype in (dtypes.float, dtypes.double, dtypes.bfloat16, dtypes.half, dtypes.int8, dtypes.int):
        a, b = (Tensor.empty(128, 128, dtype=dtype, device=device) for _ in range(2))
        for y in (a @ b, a @ b.T, a @ b @ a, (a @ b + b[0]).relu()):
            found = explain(y)
            assert found.notes == (), f"{dtype}: {found}"
            assert all(kernel.template or "gemm: " in kernel.reason for kernel in found.kernels)


@pytest.mark.parametrize("device", ["EMU", "CPU"])
def test_what_no_pattern_matched_says_whether_it_matters(device: str):
    a, b = (Tensor.empty(512, 512, dtype=dtypes.half, device=device) for _ in range(2))
    small, large = a[0, :8].contiguous() + 1, Tensor.empty(1 << 26, device=device).contiguous() + 1
    found = explain(a @ b, small, large)
    shares = {kernel.bytes: kernel.share for kernel in found.kernels if kernel.share is not None}
    assert len(shares) >= 2
    assert all(kernel.share is None for kernel in found.kernels if kernel.reason != "no pattern matched")
    assert shares[max(shares)] > 0.5 > shares[min(shares)]
    assert sum(shares.values()) < 1
    lines = [line for line in str(found).splitlines() if "no pattern matched" in line]
    assert all(line.endswith(" % of the predicted time") for line in lines)
    assert explain(large).kernels[0].share is None, "one kernel takes all of it"


def test_accumulation_in_half():
    a, b = of(24, 48, dtype=dtypes.half), of(48, 40, dtype=dtypes.half)
    assert left(a.matmul(b, dtype=dtypes.half)) == ["gemm: the sum is accumulated in f16"]


def test_products_that_are_rounded():
    a, b = of(24, 1, 48), of(1, 40, 48)
    y = (a.float() * b.float()).half().float().sum(2)
    assert left(y) == ["gemm: products of f32 are rounded before the sum"]


def test_two_dtypes():
    y = of(24, 48).float() @ of(48, 40, dtype=dtypes.half).float()
    assert left(y) == ["gemm: float32 without ALLOW_TF32"]


def test_products_that_are_padded():
    y = (of(24, 1, 48).float() * of(1, 40, 48).float()).pad(((0, 0), (0, 0), (0, 16))).sum(2)
    assert left(y) == ["gemm: padding"]


def test_a_condition():
    y = (of(24, 64, dtype=dtypes.float) > 0).cast(dtypes.bfloat16) @ of(64, 32)
    assert left(y) == ["gemm: an operand is a condition"]


def test_a_sum_of_one_operand_alone():
    y = Tensor.einsum("abc,cd,de->abe", of(2, 3, 5), of(5, 8), of(8, 9))
    assert left(y) == ["gemm: a dimension is in neither operand, or summed of one alone"]


def test_symbolic_sums():
    n = ROWS.bind(5)
    assert left(of(24, 32)[:, :n] @ of(32, 40)[:n]) == ["gemm: symbolic K"]


def test_symbolic_batches():
    n = ROWS.bind(5)
    assert left(of(32, 8, 16)[:n] @ of(32, 16, 24)[:n]) == ["gemm: a symbolic batch"]


def test_symbolic_rows_and_columns():
    x, n = of(32, 48), ROWS.bind(5)
    assert left(x[:n] @ x[:n].T) == ["gemm: more than one symbolic dimension"]


def test_rows_that_are_an_expression():
    n = ROWS.bind(5)
    assert left(of(33, 48)[:n + 1] @ of(48, 40)) == [
        "gemm: the number of rows is an expression, not a variable"]


def test_windows_that_overlap():
    y = of(1, 3, 6, 6).conv2d(of(24, 3, 3, 3), padding=1)
    assert left(y) == ["gemm: K lies in 3 dimensions, not one"]


def test_an_operand_without_strides_that_a_copy_would_multiply():
    y = of(6).expand(4, 6).reshape(3, 8) @ of(8, 40)
    assert left(y) == ["gemm: a copy of an operand would be 24 elements of 6"]


def test_an_operand_that_is_used_too_little_to_be_copied():
    y = of(2, 64) @ (of(64, 512) * 2 + 1)
    assert left(y) == ["gemm: an operand would be copied, and each element of it is used 2 times, not 16"]


def test_sums_that_are_no_product_of_matrices():
    """Nothing is said of these: they are not close to a matmul."""
    a, b = of(24, 48), of(24, 48)
    for y in ((a * b).sum(1), (a * a).sum(1), a.sum(1), (a * 2).sum(1), of(24, 1) @ of(1, 48)):
        assert not any("gemm" in reason for reason in left(y))
    assert not any("gemm" in (kernel.reason or "") for kernel in explain(a.softmax()).kernels)


def test_empty_products_are_zeros():
    y = of(4, 0) @ of(0, 5)
    assert not any(kernel.template for kernel in explain(y).kernels)
    np.testing.assert_array_equal(y.float().numpy(), np.zeros((4, 5)))


def test_each_of_several_alike_says_why_and_a_sum_of_as_many_does_not():
    n = ROWS.bind(5)
    products = [of(24, 32)[:, :n] @ of(32, 40)[:n] for _ in range(2)]
    other = of(24, 40, 7, dtype=dtypes.float).sum(2)
    kernels = explain(other, *products).kernels
    told = {kernel.name: kernel.reason for kernel in kernels}
    assert len(kernels) == 3
    assert told.pop(explain(other).kernels[0].name) == "no pattern matched"
    assert set(told.values()) == {"gemm: symbolic K"}


@pytest.mark.parametrize("thing", [3, [Tensor.ones(2)], None])
def test_something_that_is_no_tensor(thing):
    words = f"explain\\(\\) was given a {type(thing).__name__}"
    with pytest.raises(NVError, match=words) as caught:
        explain(thing)
    assert "call explain(a, b)" in str(caught.value)


def test_a_variable_without_a_value():
    rows = Tensor.ones(8, 4, device="CPU").contiguous().realize()[:Variable("n", 1, 8)]
    with pytest.raises(NVError, match="depends on a variable without a value"): explain(rows.sum(0))
