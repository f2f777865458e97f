"""Rows for tests of the norm template: specs, operands in memory, the answer in float64 and as float32 has
it, and a run on the emulator that allows no finding and no byte written outside the results.

Protocol: `checked(spec, arch, seed)` compares with float64: an element may be `C` times as far from it as the
largest error of the same expression with float32 sums, each node rounded to its dtype, plus two roundings of
the result. `exact=True` (whole numbers) allows no difference from that.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import GUARD, TORCH, bits, evaluate, view
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, loads, walk
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, S32, BF16, F16 = dtypes.float32, dtypes.int32, dtypes.bfloat16, dtypes.float16
C = 2.0
EPS = 1e-5
UNIT = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, S32: 0.0}
Given = dict[int, torch.Tensor]


# **** specs ****

def lies(dtype: DType, n: int, gap: int = 0, offset: int = 0, number: int = 0) -> Load:
    """Rows `gap` elements apart."""
    return Load(number, dtype, n + gap, 1, (), offset)


def of(m: int, n: int, statistics: tuple[Statistic, ...], value: Expression, gap: int = 0) -> NormSpec:
    one = not any(isinstance(node, Load | Position) for node in walk(value))
    out = Result(value.dtype, 1, 0) if one else Result(value.dtype, n + gap, 1)
    return NormSpec(m, n, statistics, (Computed(out, value),))


def rms(m: int, n: int, dtype: DType = F32, gap: int = 0, offset: int = 0, gemma: bool = False,
        residual: bool = False) -> NormSpec:
    """x / √(mean x² + eps) · w; of Gemma rounded after the product with 1 + w; of x + r with a residual."""
    x: Expression = lies(dtype, n, gap, offset)
    if residual: x = x + Load(2, dtype, n, 1)
    wide, w = x.cast(F32), Load(1, dtype, 0, 1)
    scaled = wide * Apply("sqrt", (Sum() * (1 / n) + EPS,), F32).reciprocal()
    value = (scaled * (w.cast(F32) + 1.0)).cast(dtype) if gemma else scaled.cast(dtype) * w
    return of(m, n, (Statistic("add", wide * wide),), value, gap)


def layer(m: int, n: int, dtype: DType = F32, gap: int = 0) -> NormSpec:
    x, w, b = lies(dtype, n, gap), Load(1, dtype, 0, 1), Load(2, dtype, 0, 1)
    centred = x.cast(F32) - Sum() * (1 / n)
    scale = Apply("sqrt", (Sum(part=1) * (1 / n) + EPS,), F32).reciprocal()
    value = (centred * scale).cast(dtype) * w + b
    return of(m, n, (Statistic("add", x.cast(F32)), Statistic("add", centred * centred)), value, gap)


def softmax(m: int, n: int, dtype: DType = F32, gap: int = 0) -> NormSpec:
    x = lies(dtype, n, gap)
    e = ((x.cast(F32) - Sum(dtype).cast(F32)) * 1.4426950408889634).exp2()
    return of(m, n, (Statistic("max", x), Statistic("add", e)),
              (e * Sum(part=1).reciprocal()).cast(dtype), gap)


def argmax(m: int, n: int, dtype: DType = F32, gap: int = 0) -> NormSpec:
    x = lies(dtype, n, gap)
    differs = Apply("not_equal", (x, Sum(dtype)), dtypes.bool)
    at = Apply("where", (differs, Constant(0, S32), Position("n") * -1 + n), S32)
    return of(m, n, (Statistic("max", x), Statistic("max", at)), Sum(S32, 1) * -1 + n)


def gated(m: int, n: int, dtype: DType = F32) -> NormSpec:
    """silu(gate) · up of one matrix [m, 2 n]."""
    g, u = Load(0, dtype, 2 * n, 1), Load(0, dtype, 2 * n, 1, (), n)
    silu = g * (1.0 + (g * -1.4426950408889634).exp2()).reciprocal()
    return of(m, n, (), silu * u)


# **** memory ****

def arguments(spec: NormSpec, seed: int = 0, integers: bool = False) -> Given:
    """Storages of parameters: normal numbers, NaN between rows."""
    random = torch.Generator().manual_seed(seed)
    made: dict[int, torch.Tensor] = {}
    for load in {load: None for root in spec.expressions for load in loads(root)}:
        extents, strides = _extents(spec), (*(load.batch or (0,) * len(spec.batch)), load.m, load.n)
        size = load.offset + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + 1
        old = made.get(load.parameter, torch.zeros(0, dtype=TORCH[load.dtype]))
        nothing = torch.nan if dtypes.is_float(load.dtype) else GUARD
        whole = torch.full((max(size, len(old)),), nothing, dtype=torch.float64)
        whole[:len(old)] = old.double()
        extents = tuple(e if stride else 1 for e, stride in zip(extents, strides, strict=True))
        numbers = torch.randint(-4, 5, extents, generator=random).double() if integers else \
            torch.randn(extents, generator=random, dtype=torch.float64)
        view(whole, extents, strides, load.offset).copy_(numbers)
        made[load.parameter] = whole.to(TORCH[load.dtype])
    return dict(sorted(made.items()))


def _extents(spec: NormSpec) -> tuple[int, ...]: return (*spec.batch, spec.m, spec.n)


# **** the answer ****

def reference(spec: NormSpec, given: Given, float32: bool = False) -> list[torch.Tensor]:
    """Results [*batch, m, n] in float64: nothing rounded, or each node to its dtype and sums in float32."""
    named = {f"x{i}": storage for i, storage in given.items()}

    def worth(root: Expression, sums: list[torch.Tensor]) -> torch.Tensor:
        return evaluate(spec, root if float32 else _widened(root, {}), sums, named)

    sums: list[torch.Tensor] = []
    for each in spec.statistics:
        term = worth(each.term, sums)
        if each.op == "max": made = term.nan_to_num(float("-inf"), float("inf")).amax(-1, keepdim=True)
        else: made = (term.float() if float32 else term).sum(-1, keepdim=True).double()
        sums.append(made.expand(term.shape))
    return [worth(each.value, sums) for each in spec.results]


def _widened(node: Expression, known: dict[Expression, Expression]) -> Expression:
    """The same in float64."""
    if node not in known:
        wide = dtypes.float64 if dtypes.is_float(node.dtype) else node.dtype
        if isinstance(node, Apply):
            known[node] = Apply(node.op, tuple(_widened(arg, known) for arg in node.args), wide)
        else: known[node] = node if isinstance(node, Load | Position) else replace(node, dtype=wide)
    return known[node]


# **** the kernel ****

def plan(spec: NormSpec, arch: str) -> Schedule:
    """The schedule, of rows that have a kernel."""
    schedule = TABLE.choose(spec, GPU(arch))
    assert schedule is not None
    return schedule


def built(spec: NormSpec, arch: str) -> TileKernel: return TABLE.build(spec, plan(spec, arch), GPU(arch))


def launched(spec: NormSpec, given: Given, arch: str, seed: int = 0, m: int | None = None,
             spoilt: tuple[str, str] = ("", "")) -> tuple[list[torch.Tensor], Report]:
    """Results [*batch, m, n or 1] in float64, and the report. Nothing may be found, nothing else written.
    `spoilt`: something of the text, and what takes its place."""
    made, emu = built(spec, arch), Emulator(arch, seed=seed)
    rows = spec.m if m is None else m
    if spoilt[0]:
        assert spoilt[0] in made.ptx
        made = replace(made, ptx=made.ptx.replace(*spoilt))
    outs, places = [], []
    for each in (computed.result for computed in spec.results):
        extents, strides = (*spec.batch, rows, spec.n if each.n else 1), (*each.batch, each.m, each.n)
        full = (*spec.batch, spec.m, spec.n if each.n else 1)
        size = each.offset + sum((e - 1) * s for e, s in zip(full, strides, strict=True)) + 3
        outs.append(emu.alloc(bits(torch.full((size,), GUARD, dtype=torch.float64).to(TORCH[each.dtype]))))
        places.append((extents, strides, each.offset))
    inputs = [emu.alloc(bits(storage)) for storage in given.values()]
    report = emu.launch(made.ptx, made.grid_for(rows), made.threads,
                        [*outs, *inputs, *([np.uint32(rows)] if spec.symbolic else [])], made.name,
                        made.cluster)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    found = []
    for each, out, lying in zip(spec.results, outs, places, strict=True):
        storage = torch.frombuffer(bytearray(out.numpy().tobytes()), dtype=TORCH[each.result.dtype])
        found.append(view(storage, *lying).double())
        view(storage, *lying).fill_(GUARD)
        guard = torch.tensor(GUARD).to(storage.dtype).double()
        assert (storage.double() == guard).all(), "elements beside the result were written"
    return found, report


def checked(spec: NormSpec, arch: str, seed: int = 0, exact: bool = False, m: int | None = None,
            given: Given | None = None, spoilt: tuple[str, str] = ("", "")) -> Report:
    """Asserts that the results are right; see the module."""
    if given is None: given = arguments(spec, seed, exact)
    found, report = launched(spec, given, arch, seed, m, spoilt)
    for each, got, right, plain in zip(spec.results, found, reference(spec, given),
                                       reference(spec, given, float32=True), strict=True):
        right, plain = (x[..., :got.shape[-2], :got.shape[-1]] for x in (right, plain))
        if exact: assert torch.equal(got, plain), (got - plain).abs().max()
        else:
            bound = C * (plain - right).abs().max() + 2 * UNIT[each.result.dtype] * right.abs()
            assert ((got - right).abs() <= bound).all(), ((got - right).abs() - bound).max()
    return report
