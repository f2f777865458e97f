"""Expressions in C: random ones against float64 with every node rounded and against tinygrad's own kernels,
activations, loads at any stride; every level. All expressions of a test are cases of one kernel a level."""
from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_vector_case import LEVELS
from tests.support.tile.gemm_case import TORCH, evaluate, product
from tinygrad_nv.cpu import expression as cpu
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import C_TYPES, c_type, kernel
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile import expression
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, short, walk, where

F32, F16, BF16, S32, BOOL = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.bool
BATCH, M, N = 2, 3, 37
KINDS = [dtype for dtype in TORCH if dtype != dtypes.float64]  # the dtype of parameter i
SPEC = product(M, N, 1, F32, batch=(BATCH,))
STRIDES = {"everywhere": (M * N, N, 1), "columns": (0, 0, 1), "apart": (5, 1, 3), "rows": (1, 7, 0),
           "one": (0, 0, 0)}
levels = pytest.mark.parametrize("level", LEVELS, ids=str)


def loaded(dtype: DType, where: str = "everywhere", offset: int = 0) -> Load:
    batch, m, n = STRIDES[where]
    return Load(KINDS.index(dtype), dtype, m, n, (batch,), offset)


# **** running them ****

def arguments(most: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Small integers of every dtype, and the sums."""
    source = np.random.default_rng(seed)
    made = {}
    for i, dtype in enumerate(KINDS):
        low = 0 if dtypes.is_unsigned(dtype) or dtype == BOOL else -most
        values = source.integers(low, 2 if dtype == BOOL else most + 1, BATCH * M * N + 9)
        made[f"x{i}"] = torch.from_numpy(values).to(TORCH[dtype])
    made["sums"] = torch.from_numpy(source.integers(-most, most + 1, (BATCH, M, N))).float()
    return made


def run(level: ISA, roots: Sequence[Expression], given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The values of expressions [batch, m, n], each in its dtype. A row is vectors that are whole and a part
    of one."""
    cases = []
    for number, root in enumerate(roots):
        place = LanePlace(["z"], "m", "c", ["b0"], "left")
        lines, value = statements(root, place)
        to = f"({c_type(root.dtype)} *)out + (b0 * {M} + m) * {N} + c"
        cases.append(f"case {number}: {{ {' '.join(lines)} "
                     f"store_n_{short(root.dtype)}({to}, {value}, left); break; }}")
    body = f"""for (s64 b0 = 0; b0 < {BATCH}; b0++) for (s64 m = 0; m < {M}; m++)
    for (s64 c = 0; c < {N}; c += W) {{
      const s64 left = {N} - c;
      const vf z = load_n_f32(sums + (b0 * {M} + m) * {N} + c, left);
      switch (what) {{ {chr(10).join(cases)} }}
    }}"""
    inputs = [(c_type(dtype), f"x{i}") for i, dtype in enumerate(KINDS)]
    inputs.append(("float", "sums"))
    made = load(kernel("expressions", level, body, [("u8", "out")], inputs, ["what"]))
    results = []
    for number, root in enumerate(roots):
        out = np.zeros(BATCH * M * N * root.dtype.itemsize, np.uint8)
        made(out, *(x.contiguous().view(torch.uint8).numpy() for x in given.values()), number)
        results.append(torch.from_numpy(out).view(TORCH[root.dtype]).view(BATCH, M, N))
    return results


def answers(roots: Sequence[Expression], given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [evaluate(SPEC, root, [given["sums"].double()], given) for root in roots]


# **** random expressions ****

FLOATS, INTEGERS = (F32, F16, BF16), (S32, dtypes.int16, dtypes.int8, dtypes.uint8)


def made(source: random.Random, dtype: DType, depth: int) -> Expression:
    """An expression whose value float16 and bfloat16 hold exactly: of small integers, multiplied a few
    times."""
    if depth == 0: return leaf(source, dtype)
    kind = source.random()
    if kind < 0.2: return made(source, other(source, dtype), depth - 1).cast(dtype)
    if kind < 0.4:
        return where(made(source, BOOL, depth - 1), made(source, dtype, depth - 1), leaf(source, dtype))
    left, right = made(source, dtype, depth - 1), leaf(source, dtype)
    if dtype == BOOL:
        if source.random() < 0.5: return Apply(source.choice(["and", "or", "xor"]), (left, right), BOOL)
        compared = source.choice([*FLOATS, *INTEGERS, BOOL])
        both = made(source, compared, depth - 1), leaf(source, compared)
        return Apply(source.choice(["less", "not_equal"]), both, BOOL)
    ops = ["add", "sub", "mul", "max", "min"] + ["and", "or", "xor"] * dtypes.is_int(dtype)
    if dtypes.is_unsigned(dtype): ops.remove("sub")
    return Apply(source.choice(ops), (left, right) if source.random() < 0.5 else (right, left), dtype)


def other(source: random.Random, dtype: DType) -> DType:
    # a cast of a negative number to an unsigned one is nothing that C or torch define
    signed = [*FLOATS, *INTEGERS[:-1], BOOL]
    return source.choice([BOOL, dtypes.uint8] if dtypes.is_unsigned(dtype) else [*signed, dtypes.uint8])


def leaf(source: random.Random, dtype: DType) -> Expression:
    if dtype == F32 and source.random() < 0.3: return Sum()
    if dtype == S32 and source.random() < 0.3: return Position(source.choice(["m", 0]))
    if dtype != BOOL and source.random() < 0.2: return Constant(source.choice([0, 1, 2, 3]), dtype)
    return loaded(dtype, source.choice(list(STRIDES)), source.randrange(3))


def exact_expressions(count: int, seed: int) -> list[Expression]:
    source = random.Random(seed)
    return [made(source, source.choice([*FLOATS, *INTEGERS, BOOL]), 3) for _ in range(count)]


@pytest.mark.sampled(1)
@levels
def test_random_expressions_of_integers(level: ISA):
    """Exact in every dtype."""
    given, roots = arguments(), exact_expressions(16, LEVELS.index(level))
    for root, got, want in zip(roots, run(level, roots, given), answers(roots, given), strict=True):
        assert torch.equal(got.double(), want), expression.show(root)


def test_random_expressions_have_all_operations():
    roots = [root for seed in range(len(LEVELS)) for root in exact_expressions(16, seed)]
    assert {node.op for root in roots for node in walk(root) if isinstance(node, Apply)} == {
        "add", "sub", "mul", "max", "min", "and", "or", "xor", "less", "not_equal", "where", "cast"}
    assert {node.dtype for root in roots for node in walk(root)} == {*FLOATS, *INTEGERS, BOOL}


@pytest.mark.sampled(1)
@levels
def test_every_node_is_rounded(level: ISA):
    """Chains of 16-bit operations of any numbers have the bits of the definition."""
    given = arguments()
    wild = torch.Generator().manual_seed(3)
    for i, dtype in enumerate(KINDS):
        if dtype in FLOATS: given[f"x{i}"] = torch.randn(BATCH * M * N + 9, generator=wild).to(TORCH[dtype])
    roots: list[Expression] = []
    for dtype in (F16, BF16):
        x, y, z = (loaded(dtype, offset=i) for i in range(3))
        roots += [(x * y + z) * x, (x - y) * (x + z) * 0.3, x.maximum(y) * z - x, (x * y).cast(F32) * 1.7,
                  (loaded(F32) * 1.1).cast(dtype) + x, Apply("sqrt", (x * x,), dtype) + y,
                  (x * x + 1).reciprocal()]
    for root, got, want in zip(roots, run(level, roots, given), answers(roots, given), strict=True):
        if root.dtype == F32: torch.testing.assert_close(got.double(), want, rtol=2**-23, atol=0)
        else: assert torch.equal(got.double(), want), expression.show(root)


@pytest.mark.sampled(1)
@levels
def test_functions(level: ISA):
    """Exponentials, logarithms, roots and activations, near the definition in each dtype."""
    given = arguments()
    wild = torch.Generator().manual_seed(4)
    for i, dtype in enumerate(KINDS):
        if dtype in FLOATS:
            given[f"x{i}"] = (torch.randn(BATCH * M * N + 9, generator=wild) * 3).to(TORCH[dtype])
    roots = []
    for dtype in FLOATS:
        x = loaded(dtype)
        positive = x * x + 0.5
        roots += [x.exp2(), Apply("log2", (positive,), dtype), Apply("sqrt", (positive,), dtype),
                  positive.reciprocal()]
        roots += [getattr(expression, name)(x) for name in ("relu", "sigmoid", "silu", "quick_gelu", "tanh",
                                                            "gelu_tanh", "gelu", "exp")]
    for root, got, want in zip(roots, run(level, roots, given), answers(roots, given), strict=True):
        # float32 differs by a few units; a 16-bit node may be rounded to the other side, and what follows too
        close = {F32: 2.0**-19, F16: 2.0**-8, BF16: 2.0**-5}[root.dtype]
        torch.testing.assert_close(got.double(), want, rtol=close, atol=close / 4,
                                   msg=lambda words, root=root: f"{expression.show(root)}: {words}")


@levels
def test_unsigned_numbers(level: ISA):
    """32 bits are compared, chosen and made floats without a sign; 16 bits wrap."""
    given = arguments(1 << 20)
    name, u32, u16 = f"x{KINDS.index(S32)}", dtypes.uint32, dtypes.uint16
    given[name] *= 1021
    x, y = (loaded(S32, offset=i).cast(u32) for i in range(2))
    a, b = (given[name].numpy()[i:i + BATCH * M * N].view(np.uint32) for i in range(2))
    assert (a > 1 << 31).any()
    roots = [where(x < y, Constant(1.0), 0.0), x.maximum(y).cast(S32), Apply("min", (x, y), u32).cast(S32),
             (x * y + x).cast(S32), (x.cast(F32).cast(u32)).cast(S32), x.cast(F32),
             (x.cast(u16) * y.cast(u16)).cast(S32)]
    wide = a.astype(np.float32)
    assert wide.max() < 2.0**32
    words = [np.maximum(a, b), np.minimum(a, b), a * b + a, wide.astype(np.uint32)]
    wanted = [a < b, *(each.view(np.int32) for each in words), wide, (a * b) & 0xFFFF]
    for root, got, want in zip(roots, run(level, roots, given), wanted, strict=True):
        np.testing.assert_array_equal(got.numpy().reshape(-1), want, expression.show(root))


@levels
def test_numbers_that_are_none(level: ISA):
    """max and min keep a NaN that comes first, as tinygrad's C; a comparison with it is false; casts keep
    infinities."""
    given = arguments()
    for i, dtype in enumerate(KINDS):
        if dtype in FLOATS: given[f"x{i}"][:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    nothing, zero = loaded(F32), Constant(0.0)
    roots = [nothing.maximum(zero), zero.maximum(nothing), Apply("min", (nothing, zero), F32),
             Apply("min", (zero, nothing), F32), where(nothing < zero, zero + 1, zero + 2),
             where(Apply("not_equal", (nothing, nothing), BOOL), zero + 1, zero),
             loaded(F32).cast(BF16).cast(F32), loaded(BF16).cast(F16), loaded(F16).cast(F32)]
    nan, inf = float("nan"), float("inf")
    wanted = [[nan, inf, 0, 0], [0, inf, 0, 0], [nan, 0, -inf, 0], [0, 0, -inf, 0], [2, 2, 1, 2],
              [1, 0, 0, 0], [nan, inf, -inf, 0], [nan, inf, -inf, 0], [nan, inf, -inf, 0]]
    for root, got, want in zip(roots, run(level, roots, given), wanted, strict=True):
        np.testing.assert_array_equal(got.float()[0, 0, :4].numpy(), np.float32(want), expression.show(root))


# **** tinygrad ****

def tensor(node: Expression, given: dict[str, torch.Tensor]) -> Tensor:
    """An expression as tinygrad writes it."""
    if isinstance(node, Sum): return Tensor(given["sums"].numpy())
    if isinstance(node, Constant): return Tensor.full((BATCH, M, N), node.value, dtype=node.dtype)
    if isinstance(node, Position):
        shape = {0: (BATCH, 1, 1), "m": (1, M, 1), "n": (1, 1, N)}[node.axis]
        return Tensor.arange(max(shape), dtype=S32).reshape(shape).expand(BATCH, M, N)
    if isinstance(node, Load):
        values = given[f"x{node.parameter}"].float()
        taken = torch.as_strided(values, (BATCH, M, N), (*node.batch, node.m, node.n), node.offset)
        return Tensor(taken.contiguous().numpy()).cast(node.dtype)
    assert isinstance(node, Apply)
    args = [tensor(arg, given) for arg in node.args]
    if node.op == "cast": return args[0].cast(node.dtype)
    return METHODS[node.op](*args)


METHODS = {"add": Tensor.add, "sub": Tensor.sub, "mul": Tensor.mul, "max": Tensor.maximum,
           "min": Tensor.minimum, "less": Tensor.__lt__, "not_equal": Tensor.__ne__,
           "and": Tensor.bitwise_and, "or": Tensor.bitwise_or, "xor": Tensor.bitwise_xor,
           "where": Tensor.where}


@levels
def test_casts_of_what_integers_do_not_hold(level: ISA):
    """As x86's instructions: -2^31 of NaN and beyond int32, then the low bits; unsigned 0 from 2^32 on."""
    given = arguments()
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 2.0**31, -2.0**31, 2147483520.0,
                            -1.5, 3e9, 4294967040.0, 2.0**32])
    given[f"x{KINDS.index(F32)}"][:len(numbers)] = numbers
    got = run(level, [loaded(F32).cast(S32), loaded(F32).cast(dtypes.uint32).cast(S32),
                      loaded(F32).cast(dtypes.int8)], given)
    least = -2**31
    signed = [least, least, least, least, least, least, least, 2147483520, -1, least, least, least]
    assert got[0][0, 0, :len(numbers)].tolist() == signed
    unsigned = [2**31, 0, 2**31, 0, 2**31, 2**31, 2**31, 2147483520, 2**32 - 1, 3000000000, 4294967040, 0]
    assert [x & 0xffffffff for x in got[1][0, 0, :len(numbers)].tolist()] == unsigned
    assert got[2][0, 0, :len(numbers)].tolist() == [0] * 7 + [-128, -1] + [0] * 3


def beside_tinygrad(count: int, seed: int) -> None:
    given, roots = arguments(seed=seed), exact_expressions(count, seed)
    theirs = [tensor(root, given).cast(F32).contiguous() for root in roots]
    Tensor.realize(*theirs)
    for root, got, other in zip(roots, run(LEVELS[-2], roots, given), theirs, strict=True):
        np.testing.assert_array_equal(got.float().numpy(), other.numpy(), expression.show(root))


def test_tinygrads_kernels_say_the_same(): beside_tinygrad(5, 7)


@pytest.mark.slow
def test_tinygrads_kernels_say_the_same_at_length():
    for seed in range(100, 110): beside_tinygrad(20, seed)


def test_what_is_refused_is_said():
    assert cpu.problems(Apply("sin", (Sum(),), F32)) == ["sin in an epilogue"]
    assert cpu.problems(Sum().cast(dtypes.float64)) == ["an epilogue with double"]
    assert cpu.problems(Sum().cast(dtypes.int64).cast(F32)) == ["an epilogue with long"]
    assert all(cpu.problems(loaded(dtype)) == [] for dtype in KINDS)
    assert len(C_TYPES) == len(KINDS) + 2  # torch computes nothing in uint16 and uint32
