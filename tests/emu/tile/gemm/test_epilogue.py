"""Epilogues in registers: every operation in every dtype against float64 rounded once (NaN, infinities, -0
and ties among the arguments), casts between all dtypes, and what instructions they take."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import TORCH, arguments, launched, product
from tests.support.tile.store_case import outer
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.epilogue import problems
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, nearest, where
from tinygrad_nv.tile.gemm.schedules import Mma

ONE = Mma().block(16, 16).warps(1, 1)
ARCHS = ["sm_80", "sm_90a"]
FLOATS = [dtypes.float32, dtypes.float16, dtypes.bfloat16]
FP8 = [dtypes.fp8e4m3, dtypes.fp8e5m2]
INTEGERS = [dtypes.int32, dtypes.int8, dtypes.uint8]
REAL = [0.0, -0.0, 1.0, -1.5, 3.0, math.inf, -math.inf, math.nan, 0.1, -7.3, 1 + 2**-7, 2**-9, 300.0, -2.0,
        1e-3, 40000.0]
WHOLE = [0, 1, -1, 2, 3, -7, 100, -100, 127, -128, 64, 50, -33, 90, 5, 11]


def numbers(dtype: DType) -> torch.Tensor:
    """Sixteen numbers of a dtype."""
    if dtype == dtypes.bool: return torch.tensor([i % 3 == 0 for i in range(16)])
    if dtypes.is_float(dtype): return torch.tensor(REAL, dtype=torch.float64).to(TORCH[dtype])
    return torch.tensor(WHOLE).to(TORCH[dtype])


def computed(node: Expression, arch: str, **tables: torch.Tensor) -> torch.Tensor:
    """An epilogue's 16 × 16 results, of tables x0, x1, … as they lie in memory."""
    spec = product(16, 16, 1, dtypes.bfloat16, out=node.dtype, epilogue=node)
    given = {**arguments(spec), **tables}
    storage, report = launched(outer(spec, ONE, arch), spec, given, arch)
    assert report.findings == []
    return storage.view(16, 16)


def rows(dtype: DType, parameter: int = 0) -> Load: return Load(parameter, dtype, 1, 0)


def columns(dtype: DType, parameter: int = 1) -> Load: return Load(parameter, dtype, 0, 1)


def rounded(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Float64 or whole numbers as the dtype has them: bytes wrap, 8-bit floats saturate."""
    if dtype in FP8:
        most = torch.finfo(TORCH[dtype]).max
        return torch.where(values.isnan(), values, values.clamp(-most, most)).to(TORCH[dtype])
    return values.to(TORCH[dtype])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit; any NaN is as good as another."""
    g, w = got.double(), want.double()
    equal = (g == w) & (torch.signbit(g) == torch.signbit(w)) | g.isnan() & w.isnan()
    assert equal.all(), [(i.tolist(), float(g[tuple(i)]), float(w[tuple(i)])) for i in (~equal).nonzero()][:5]


EXACT: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "max": torch.fmax, "min": torch.fmin,
    "less": torch.lt, "not_equal": torch.ne}
LOGIC = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("op", EXACT)
def test_arithmetic_rounds_once_and_wraps(op: str, dtype: DType, arch: str):
    kind = dtypes.bool if op in ("less", "not_equal") else dtype
    table = numbers(dtype)
    wide = table.double() if dtypes.is_float(dtype) else table.long()
    want = rounded(EXACT[op](wide[:, None], wide[None, :]), kind)
    got = computed(Apply(op, (rows(dtype), columns(dtype)), kind), arch, x0=table, x1=table)
    if op in ("max", "min"): got, want = got + 0, want + 0  # either zero
    same(got, want)
    # the same of two rows: once for all columns
    alone = rounded(EXACT[op](wide, wide.flip(0)), kind)[:, None].expand(16, 16)
    got = computed(Apply(op, (rows(dtype), rows(dtype, 1)), kind), arch, x0=table, x1=table.flip(0))
    if op in ("max", "min"): got, alone = got + 0, alone + 0
    same(got, alone)


@pytest.mark.parametrize("dtype", [*INTEGERS, dtypes.bool])
@pytest.mark.parametrize("op", LOGIC)
def test_logic(op: str, dtype: DType):
    table = numbers(dtype)
    same(computed(Apply(op, (rows(dtype), columns(dtype)), dtype), "sm_80", x0=table, x1=table),
         LOGIC[op](table[:, None], table[None, :]))


def test_arithmetic_of_booleans():
    table = numbers(dtypes.bool)
    a, b = table[:, None], table[None, :]
    for op, want in (("add", a | b), ("mul", a & b), ("not_equal", a ^ b), ("less", ~a & b), ("max", a | b)):
        same(computed(Apply(op, (rows(dtypes.bool), columns(dtypes.bool)), dtypes.bool), "sm_80",
                      x0=table, x1=table), want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, dtypes.bool])
def test_where_chooses_bits(dtype: DType, arch: str):
    table, flags = numbers(dtype), numbers(dtypes.bool)
    for condition in (rows(dtypes.bool, 2), columns(dtypes.bool, 2)):
        chosen = flags[:, None] if condition.m else flags[None, :]
        node = Apply("where", (condition, rows(dtype), columns(dtype)), dtype)
        same(computed(node, arch, x0=table, x1=table, x2=flags),
             torch.where(chosen, table[:, None], table[None, :]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_one_number(dtype: DType, arch: str):
    """Approximations are within 2^-22 of the result, or a rounding of it to 16 bits; special values exact."""
    table = numbers(dtype)
    unit = {dtypes.float32: 2.0**-22, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}[dtype]
    for op, made in (("reciprocal", torch.reciprocal), ("exp2", torch.exp2), ("sqrt", torch.sqrt),
                     ("log2", torch.log2), ("sin", torch.sin)):
        for load in (rows(dtype), Load(0, dtype, 0, 1)):
            exact = made(table.double())
            got = computed(Apply(op, (load,), dtype), arch, x0=table).double()
            got = got[:, 0] if load.m else got[0]
            want = exact.to(TORCH[dtype]).double()
            special = want.isnan() | want.isinf() | (want == 0)
            if op == "sin": special &= table.abs().double() < 4  # the hardware's range, in 2^-20 of 1
            same(got[special], want[special])
            least = 2.0**-20 if op in ("sin", "log2") else 2.0**-25 if dtype == dtypes.float16 else 0
            far = (got - exact).abs() > unit * 1.01 * exact.abs() + least
            if op == "sin": far &= table.abs().double() < 4
            assert not far[~special].any(), (op, got[far], exact[far])
            if op in ("reciprocal", "sqrt") and dtype == dtypes.float32: same(got, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", [*FLOATS, *FP8, *INTEGERS, dtypes.bool])
def test_casts(source: DType):
    table = numbers(source)
    for target in [*FLOATS, *FP8, *INTEGERS, dtypes.bool]:
        usable = table
        if dtypes.is_float(source) and dtypes.is_int(target):  # what no integer is has no meaning
            usable = torch.where(table.double().abs() < 100, table.double(), 5.75).to(TORCH[source])
            if target == dtypes.uint8: usable = usable.double().abs().to(TORCH[source])
        wide = usable.double()
        want = wide != 0 if target == dtypes.bool else \
            rounded(wide.trunc().long() if dtypes.is_int(target) else wide, target)
        for load in (Load(0, source, 0, 1), rows(source)):
            got = computed(Apply("cast", (load,), target), "sm_89", x0=usable)
            same(got, (want[:, None] if load.m else want[None, :]).expand(16, 16))


@pytest.mark.parametrize("dtype", FP8)
def test_arithmetic_of_8_bit_floats(dtype: DType):
    table = numbers(dtype)
    wide = table.double()
    got = computed(Apply("mul", (rows(dtype), columns(dtype)), dtype), "sm_89", x0=table, x1=table)
    same(got, rounded((wide[:, None] * wide[None, :]).float().double(), dtype))
    # a node in between is rounded as well
    node = Apply("add", (Apply("mul", (rows(dtype), columns(dtype)), dtype), columns(dtype)), dtype)
    inner = rounded(wide[:, None] * wide[None, :], dtype).double()
    same(computed(node, "sm_89", x0=table, x1=table), rounded(inner + wide[None, :], dtype))


def test_8_bit_floats_are_refused_before_sm_89():
    node = Sum().cast(dtypes.fp8e4m3)
    assert problems(node, "sm_89") == []
    assert "begin with sm_89" in problems(node, "sm_80")[0]
    assert problems(Sum().cast(dtypes.float64), "sm_90a") == ["an epilogue with double"]
    with pytest.raises(SpecError, match="conversions begin with sm_89, this is sm_80"): text_of(node, "sm_80")


def test_positions_mask():
    m, n = Position("m"), Position("n")
    node = where(m < n, Constant(0.0, dtypes.bfloat16), Constant(-2.5, dtypes.bfloat16))
    i = torch.arange(16)
    want = torch.where(i[:, None] < i[None, :], 0.0, -2.5).bfloat16()
    same(computed(node, "sm_80"), want)
    same(computed((m * 16 + n).cast(dtypes.float32), "sm_80"), torch.arange(256.0).view(16, 16))


def test_constants_are_rounded_and_folded():
    half = Constant(1.4142135623730951, dtypes.float16).reciprocal()
    got = computed(half + Load(0, dtypes.float16, 0, 1), "sm_80", x0=torch.zeros(16, dtype=torch.float16))
    assert (got.double() == nearest(1 / nearest(1.4142135623730951, dtypes.float16), dtypes.float16)).all()


def text_of(node: Expression, arch: str = "sm_90a") -> str:
    return outer(product(16, 16, 1, dtypes.bfloat16, out=node.dtype, epilogue=node), ONE, arch).ptx


def test_two_elements_at_a_time():
    """A bias and relu in bfloat16: a conversion, an addition and a maximum for each pair."""
    node = Sum().cast(dtypes.bfloat16) + Load(0, dtypes.bfloat16, 0, 1)
    x = where(node > 0.0, node, 0.0)
    body = text_of(x)
    pairs = 4  # of 16 × 16 elements and 32 lanes
    ops = ("cvt.rn.bf16x2.f32", "add.rn.bf16x2", "max.bf16x2", "selp")
    counts = {op: body.count(op) for op in ops}
    assert counts == {"cvt.rn.bf16x2.f32": pairs, "add.rn.bf16x2": pairs, "max.bf16x2": pairs,
                      "selp": 0}
    assert body.count("ld.global.b32") == 2  # the bias, once for both rows
    assert "fma.rn.bf16x2" in text_of(x, "sm_80")
    assert "add.rn.bf16x2" not in text_of(x, "sm_80")


def test_what_belongs_to_a_row_or_to_all_is_computed_once():
    scale = Load(0, dtypes.float32, 1, 0).exp2() * Load(1, dtypes.float32, 0, 0).reciprocal()
    body = text_of(Sum() * scale)
    assert (body.count("ex2.approx"), body.count("rcp.approx")) == (2, 1)


def test_roundings_that_change_nothing_are_left_out():
    half = Load(0, dtypes.float16, 16, 1)
    body = text_of(half.cast(dtypes.float32).maximum(1.0) * 2.0)
    assert "cvt.rn.f16" not in body
    body = text_of(Load(0, dtypes.int8, 16, 1).cast(dtypes.bfloat16).cast(dtypes.float32))
    assert "bf16" not in body.split("mul.f32")[-1]
