"""Products and schedules drawn together, for every template, on the emulator with all checks on.

A tile is drawn first, of any shape that the template may take; then a product that goes with it: extents
about the tile's own and K of at least two rounds more than the ring has stages, or both as short as they may
be; any majors, dtypes, gaps, offsets, batches (broadcast among them), rows known at launch, and an epilogue
of what models put there: scales by scalar, row and column, biases, residuals, masks by position, gates, casts
between. Integers must come out bit for bit; random values within a bound that is stated (`close`). CTAs that
stay are few, so that each has several tiles. What is drawn in CI is always the same; `-m slow` draws anew,
and more.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, bounds, operand, product, reference, result, run
from tinygrad_nv.tile.expression import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    silu,
)
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import FP8, INT8S, GemmSpec, Operand
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16, S8 = dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int8
DTYPES = (BF16, F16, S8, dtypes.uint8, F32, *FP8)
ARCHS = {"mma": ("sm_80", "sm_89", "sm_90a"), "wgmma": ("sm_90a",), "gemv": ("sm_80", "sm_89", "sm_90a")}
TIMES = 1         # bench/gpu/record.py draws more
MOST_WORK = 40e6  # multiply-adds of an example: half a second
SHORT = st.one_of(st.integers(1, 40), st.sampled_from([64, 72, 96, 128, 136, 200]))
EXAMPLES = {"mma": 16, "wgmma": 24, "gemv": 14}
Case = tuple[GemmSpec, GemmSchedule, str]


# **** schedules ****

@st.composite
def schedules(draw: st.DrawFn, template: str, size: int) -> GemmSchedule:
    """Of a template, legal or not, for elements of `size` bytes."""
    def pick(*choices: Any) -> Any: return draw(st.sampled_from(choices))

    if template == "gemv":
        made = Gemv().columns(pick(8, 16, 32, 64, 128)).warps(pick(1, 2, 4, 8))
        return replace(made, block_k=pick(32, 64, 128, 256, 512), splits=pick(1, 1, 2, 3),
                       swap=draw(st.booleans()))
    depth, splits = pick(2, 3, 4, 5), pick(1, 1, 1, 2, 3)
    if template == "mma":
        small = Mma().block(pick(16, 32, 64, 128), pick(16, 32, 64, 128)).k(pick(32, 64, 128) // size)
        return replace(small, warps_m=pick(1, 2, 4), warps_n=pick(1, 2, 4), depth=depth, splits=splits,
                       group=pick(1, 2, 8))
    consumers, turns = pick(1, 2, 3), draw(st.booleans())
    made = Wgmma().block(64 if turns else 64 * consumers, pick(*range(8, 257, 8)))
    made = replace(made, block_k=pick(128, 128, 64, 32, 256) // size, warps_m=4 + 4 * consumers, depth=depth,
                   group=pick(1, 2, 8), swap=pick(False, False, True),
                   swizzle_width=pick("", "", "", "32B", "64B"))
    if turns: made = replace(made.pingpong(), warps_m=12)
    shared = pick("", "cluster", "split", "stream")
    if shared == "cluster": return made.cluster(*pick((2, 1), (1, 2), (2, 2)))
    if turns or not shared: return made
    return made.split(pick(2, 4)) if shared == "split" else made.stream_k()


# **** products ****

EPILOGUES: dict[str, Callable[[Expression, DType, int, int, int], Expression]] = {
    "scalar": lambda x, kind, p, m, n: x * Load(p, x.dtype, 0, 0),
    "row": lambda x, kind, p, m, n: x * Load(p, x.dtype, 1, 0),
    "column": lambda x, kind, p, m, n: x * Load(p, x.dtype, 0, 1),
    "constant": lambda x, kind, p, m, n: x * 2,
    "bias": lambda x, kind, p, m, n: x.cast(kind) + Load(p, kind, 0, 1),
    "wide bias": lambda x, kind, p, m, n: x + Load(p, x.dtype, 0, 2, (), 1),
    "residual": lambda x, kind, p, m, n: x.cast(kind) + Load(p, kind, n + 3, 1),
    "turned residual": lambda x, kind, p, m, n: Load(p, x.dtype, 1, m) - x,
    "relu": lambda x, kind, p, m, n: relu(x),
    "least": lambda x, kind, p, m, n: Apply("min", (x, Constant(9, x.dtype)), x.dtype),
    "causal": lambda x, kind, p, m, n: Apply(
        "where", (Position("m") < Position("n"), Constant(-5, x.dtype), x), x.dtype),
    "marked": lambda x, kind, p, m, n: Apply("where", (Load(p, dtypes.bool, n, 1), x, Constant(0, x.dtype)),
                                             x.dtype)}
PARAMETERS = ("scalar", "row", "column", "bias", "wide bias", "residual", "turned residual", "marked")
ACTIVATIONS: dict[str, Callable[[Expression], Expression]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


def ended(names: tuple[str, ...], start: Expression, kind: DType, m: int, n: int) -> Expression:
    """The epilogue of these steps, in `kind` at the end."""
    made, parameter = start, 0
    if names and names[0] in ACTIVATIONS: return ACTIVATIONS[names[0]](made.cast(F32)).cast(kind)
    for name in names:
        made = EPILOGUES[name](made, kind, parameter, m, n)
        parameter += name in PARAMETERS
    return made.cast(kind)


def results(dtype: DType) -> list[DType]:
    """Dtypes that a result may have."""
    return [dtypes.int32, F32, BF16] if dtype in INT8S else [BF16, F16, F32]


@st.composite
def sides(draw: st.DrawFn, dtype: DType, mn: int, k: int, batch: tuple[int, ...], aligned: bool) -> Operand:
    """An operand of any major; where TMA must reach it, with rows of whole 16 bytes."""
    unit, major = 16 // dtype.itemsize if aligned else 1, draw(st.sampled_from(["K", "MN"]))
    inner = k if major == "K" else mn
    gap = -inner % unit + unit * draw(st.sampled_from([0, 0, 0, 1, 3]))
    made = operand(dtype, mn, k, major, gap, batch, unit * draw(st.sampled_from([0, 0, 1, 5])))
    return replace(made, batch=tuple(0 if draw(st.integers(0, 3)) == 3 else stride for stride in made.batch))


def extents(draw: st.DrawFn, block: int) -> int:
    """About one or two tiles."""
    near = st.sampled_from([block, block + 1, 2 * block, block - 1])
    return draw(st.one_of(st.integers(1, 2 * block), near))


@st.composite
def products(draw: st.DrawFn, schedule: GemmSchedule, dtype: DType, steps: tuple[str, ...]) -> GemmSpec:
    """A product for a schedule; the epilogue is one activation, or up to three of the other `steps`."""
    smooth = steps[0] in ACTIVATIONS
    s, tile = schedule, schedule.tile(product(1, 1, 1))
    m = draw(st.integers(1, 16)) if isinstance(s, Gemv) else extents(draw, tile.rows)
    n = extents(draw, tile.columns)
    if s.swap: m, n = n, m
    shares = 2 if s.stream else s.splits
    steps_of_k = (s.depth or 3) + 2 + draw(st.integers(0, 3))
    k = s.block_k * shares * steps_of_k - draw(st.integers(0, s.block_k - 1))
    if draw(st.integers(0, 2)):
        n, k = draw(SHORT), draw(SHORT)
        if not isinstance(s, Gemv): m = draw(SHORT)
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3 if m * n * k < MOST_WORK / 12 else 0)))
    assume(m * n * k < MOST_WORK)
    other = draw(st.sampled_from(next((kinds for kinds in (FP8, INT8S) if dtype in kinds), (dtype,))))
    if isinstance(s, Gemv): other = dtype
    a, b = (draw(sides(each, rows, k, batch, isinstance(s, Wgmma)))
            for each, rows in ((dtype, m), (other, n)))
    kind = draw(st.sampled_from([one for one in results(dtype) if not smooth or one != dtypes.int32]))
    gap, offset = (draw(st.sampled_from([0, 0, 1, 8])) for _ in range(2))
    out = replace(result(kind, m, n, draw(st.sampled_from(["N", "N", "M"])), gap, batch), offset=offset)
    names = tuple(draw(st.lists(st.sampled_from(steps), min_size=smooth, max_size=1 if smooth else 3)))
    total, ends = Sum(dtypes.int32 if dtype in INT8S else F32), {}
    if not s.swap and not smooth and draw(st.integers(0, 3)) == 1:  # gate and up, side by side in one matrix
        b = draw(sides(other, 2 * n, k, batch, isinstance(s, Wgmma)))
        ends = {"parts": 2, "part": n * b.mn}
        total = relu(total) * Sum(total.dtype, 1)
    return GemmSpec(m, n, k, a, b, out, batch, ended(names, total, kind, m, n), tf32=dtype == F32,
                    symbolic=not s.swap and draw(st.integers(0, 3)) == 1, **ends)


@st.composite
def cases(draw: st.DrawFn, template: str, steps: tuple[str, ...]) -> Case:
    """A product, a legal schedule for it and an architecture."""
    arch, dtype = draw(st.sampled_from(ARCHS[template])), draw(st.sampled_from(DTYPES))
    schedule = draw(schedules(template, dtype.itemsize))
    spec = draw(products(schedule, dtype, steps))
    assume(not TABLE.problems(spec, schedule, GPU(arch)))
    return spec, schedule, arch


# **** what must hold ****

def launched(case: Case, values: dict[str, torch.Tensor], seed: int, rows: int,
             sm_count: int) -> torch.Tensor:
    """The result. Nothing has written the rows beyond those of the launch."""
    spec, schedule, arch = case
    made = TABLE.build(spec, schedule, GPU(arch, sm_count))
    return run(made, spec, values, arch, seed, rows if spec.symbolic else None)


def exactly(case: Case, seed: int = 0, rows: int = 0, sm_count: int = 3) -> None:
    """Integers come out bit for bit. Of symbolic rows, `rows` + 1 are there, counted round."""
    spec, rows = case[0], rows % case[0].m + 1 if case[0].symbolic else case[0].m
    values = arguments(spec, seed, most=2)
    want = reference(spec, values)[..., :rows, :]
    assert torch.equal(launched(case, values, seed, rows, sm_count), want)


def close(case: Case, seed: int, rows: int, sm_count: int) -> None:
    """|got - exact| is within what `bounds` allows."""
    spec = replace(case[0], symbolic=False)
    values = arguments(spec, seed, integers=False)
    got = launched((spec, *case[1:]), values, seed, spec.m, sm_count)
    exact, bound = bounds(spec, values)
    worst = ((got - exact).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound"


def generated(template: str, count: int, holds: Callable[..., None], steps: tuple[str, ...],
              always_same: bool) -> None:
    """`count` products of a template, `TIMES` over."""
    @settings(max_examples=TIMES * count, deadline=None, suppress_health_check=list(HealthCheck),
              derandomize=always_same, database=None)
    @given(cases(template, steps), st.integers(0, 3), st.integers(0, 1000),
           st.sampled_from([1, 3, 132]))
    def drawn(case: Case, seed: int, rows: int, sm_count: int) -> None:
        note(f"{case[0]}; {case[1]}; {case[2]}")
        holds(case, seed, rows, sm_count)

    drawn()


EXACT = tuple(sorted(EPILOGUES))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("template", sorted(ARCHS))
def test_integers_come_out_exactly_whatever_the_product(template: str):
    generated(template, EXAMPLES[template], exactly, EXACT, True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("template", sorted(ARCHS))
def test_random_values_come_out_closely_with_activations(template: str):
    generated(template, 6, close, tuple(ACTIVATIONS), True)


@pytest.mark.slow
@pytest.mark.parametrize("template", sorted(ARCHS))
def test_integers_come_out_exactly_a_thousand_times(template: str):
    generated(template, 1500, exactly, EXACT, False)


@pytest.mark.slow
@pytest.mark.parametrize("template", sorted(ARCHS))
def test_random_values_come_out_closely_hundreds_of_times(template: str):
    generated(template, 300, close, tuple(ACTIVATIONS), False)


# **** what must be among them ****

WGMMA = Wgmma().block(128, 64).stages(3)
NAMED = {"ping-pong": WGMMA.block(64, 64).pingpong(), "multicast of B": WGMMA.cluster(2, 1),
         "multicast of A": WGMMA.cluster(1, 2), "multicast of both": WGMMA.cluster(2, 2),
         "ping-pong in clusters": WGMMA.block(64, 64).pingpong().cluster(2, 1),
         "three consumers": WGMMA.block(192, 64).warps(16), "swapped": WGMMA.swap_operands(),
         "split": WGMMA.split(2), "stream-K": WGMMA.stream_k(),
         "mma.sync": Mma().block(64, 64).k(32).stages(4),
         "mma.sync, split": Mma().block(64, 64).k(32).split(2), "gemv": Gemv()}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMED)
def test_each_kind_of_schedule_goes_round_its_ring(name: str, seed: int):
    """Five tiles, edges on all sides, two CTAs that stay: two rounds more than the ring has stages, then a
    bias, a scale of rows and a residual."""
    s = NAMED[name]
    tile, cluster = s.tile(product(1, 1, 1)), s.cluster_shape
    m, n = (13, 100) if isinstance(s, Gemv) else (2 * tile.rows + 9, tile.columns * cluster[1] + 8)
    k = s.block_k * 2 * ((s.depth or 3) + 2) - 8
    ends = ended(("bias", "row", "residual"), Sum(), BF16, m, n)
    spec = product(m, n, k, BF16, F32, epilogue=ends.cast(F32))
    assert TABLE.problems(spec, s, GPU("sm_90a")) == []
    exactly((spec, s, "sm_90a"), seed, sm_count=2 * prod(cluster))


@pytest.mark.sampled(15)
@pytest.mark.parametrize("rows", [1, 65, 200])
@pytest.mark.parametrize("name", [name for name in NAMED if name not in ("swapped", "gemv")])
def test_rows_known_at_launch_with_each_kind_of_schedule(name: str, rows: int):
    """Of 200; the rows of A beyond those of the launch are never read into the result."""
    s = NAMED[name]
    n = s.tile(product(1, 1, 1)).columns * s.cluster_shape[1] + 8
    spec = product(200, n, s.block_k * 2 * (s.depth + 2), F16, F32, symbolic=True)
    exactly((spec, s, "sm_90a"), rows % 4, rows - 1, sm_count=2 * prod(s.cluster_shape))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", ["ping-pong", "multicast of B", "stream-K", "split"])
@pytest.mark.parametrize("dtype", [*FP8, S8, F32, F16])
def test_every_dtype_with_what_only_wgmma_has(name: str, dtype: DType):
    """128 bytes of K a stage; 8-bit floats are summed apart every 128 of K."""
    s = replace(NAMED[name], block_k=128 // dtype.itemsize)
    spec = product(s.block_m + 16, 80, s.block_k * 2 * (s.depth + 2), dtype, results(dtype)[0])
    exactly((spec, s, "sm_90a"), 1, sm_count=2)
