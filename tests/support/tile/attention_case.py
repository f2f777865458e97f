"""Attentions for tests of the templates: operands in memory as a spec says, the answer in float64, and a run
on the emulator that allows no finding and no byte written outside the results.

Protocol: `attention(...)` makes a spec of dense operands, `arguments(spec, seed)` the storages (everything
between elements is NaN), `reference(spec, given)` the result and l in float64, `run(kernel, spec, given)` the
kernel's own. Extents below the spec's, of a symbolic one, are given by name: `run(…, s_q=5, s_kv=70)`.

`near` holds a result against float64 by the error of `plain`, an attention with scores and softmax in float32
(sums of float32 operands from first to last) and p rounded to v's dtype: an element may be off by twice the
largest such error of all elements, by the rounding of the result, and by 2⁻²³ of the largest l. That is for
rows of one column in float32: the exponent of their p is score · c − top, with top = score · c rounded, not
quite 0; p is rounded to 1, its sum is not. """
from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import GUARD, TORCH, bits, dense, evaluate, view
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import FULL, KEEP_ALL, SCALED, AttentionSpec, Band, Rows
from tinygrad_nv.tile.expression import Expression, Sum, loads
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.launch import MapArgument

C = 2.0  # of the plain implementation's error
SPREAD = 60.0  # of numbers of 8 bits
UNIT_OF_SUMS = 2.0**-9  # wgmma keeps 13 bits after the point of the largest product of 8-bit numbers
Extents = dict[str, int]


# **** specs ****

def rows(dtype: DType, extents: tuple[int, int, int, int], d: int, order: str = "bhr", gap: int = 0,
         offset: int = 0) -> Rows:
    """Operands of (batch, key heads, group, rows) dense in an order: "bhr" is [batch, heads, rows, d], "brh"
    [batch, rows, heads, d]. `gap` elements follow each row; a group of 0 has stride 0 (keys and values)."""
    _, heads, group, count = extents
    pitch, query = d + gap, max(group, 1)
    if order == "bhr": row, head, g = pitch, pitch * count * query, pitch * count
    else: row, head, g = pitch * heads * query, pitch * query, pitch
    return Rows(dtype, row, (pitch * count * heads * query, head, g if group else 0), offset)


def attention(s_q: int, s_kv: int, d: int = 64, dtype: DType = dtypes.bfloat16, batch: int = 1,
              heads: int = 1, group: int = 1, band: Band = FULL, score: Expression | None = None,
              start: int = 0, d_v: int | None = None, out: DType | None = None, order: str = "bhr",
              gap: int = 0, symbolic: tuple[str, ...] = (), lse: bool = False) -> AttentionSpec:
    """An attention of dense operands, scaled by 1/√d where no score is given."""
    d_v = d if d_v is None else d_v
    if score is None: score = Sum() * (1 / math.sqrt(d))
    q, o = (rows(kind, (batch, heads, group, s_q), width, order, gap)
            for kind, width in ((dtype, d), (out or dtype, d_v)))
    k, v = (rows(dtype, (batch, heads, 0, s_kv), width, order, gap) for width in (d, d_v))
    return AttentionSpec(s_q, s_kv, d, d_v, q, k, v, o, (batch, heads, group), score, band, start, symbolic,
                         lse)


# **** memory ****

Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, extents, strides


def places(spec: AttentionSpec) -> dict[str, tuple[DType, Place]]:
    """Where the elements of each parameter lie, by the parameter's name, in the kernel's order."""
    def matrix(one: Rows, count: int, d: int) -> tuple[DType, Place]:
        return one.dtype, (one.offset, (*spec.batch, count, d), (*one.batch, one.row, 1))
    made = {"out": matrix(spec.out, spec.s_q, spec.d_v)}
    if spec.lse:
        made["l"] = dtypes.float32, (0, (*spec.batch, spec.s_q), (*dense(spec.batch, spec.s_q), 1))
    made |= {"q": matrix(spec.q, spec.s_q, spec.d), "k": matrix(spec.k, spec.s_kv, spec.d),
             "v": matrix(spec.v, spec.s_kv, spec.d_v)}
    for name, scales, count in zip("qkv", spec.scales or (), (spec.s_q, spec.s_kv, spec.s_kv), strict=False):
        made[f"scale_{name}"] = dtypes.float32, (scales.offset, (*spec.batch, -(-count // scales.rows)),
                                                 (*scales.batch, scales.block))
    if spec.sinks is not None: made["sinks"] = dtypes.float32, (0, spec.batch, spec.sinks)
    if spec.kept < KEEP_ALL: made["seed"] = dtypes.int32, (0, (2,), (1,))
    for load in sorted(loads(spec.score), key=lambda load: load.parameter):
        strides = (*(load.batch or (0, 0, 0)), load.m, load.n)
        made[f"x{load.parameter}"] = load.dtype, (load.offset, (*spec.batch, spec.s_q, spec.s_kv), strides)
    return made


def matrix(spec: AttentionSpec, given: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """An operand as [batch, heads, group, rows, d], to be read or written."""
    offset, shape, strides = places(spec)[name][1]
    return view(given[name], shape, strides, offset)


def arguments(spec: AttentionSpec, seed: int = 0, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Storages of every parameter, normal numbers times `scale` (conditions: half of them hold); those of
    results hold GUARD throughout. Numbers with scales are SPREAD times as large, their scales 1 / SPREAD, and
    up to about four times that."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, (dtype, (offset, extents, strides)) in places(spec).items():
        if name == "seed":
            made[name] = torch.from_numpy(np.array([0x243F6A88 + seed, 0x85A308D3], np.uint32).view(np.int32))
            continue
        size = offset + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + 1
        result = name in ("out", "l")
        floats = dtypes.is_float(dtype) and not result
        storage = torch.full((size,), torch.nan if floats else GUARD, dtype=torch.float64)
        if not result:
            once = tuple(e if s else 1 for e, s in zip(extents, strides, strict=True))
            values = torch.randn(once, generator=random, dtype=torch.float64) * scale
            if dtype == dtypes.bool: values = (values > 0).double()
            if dtype == SCALED: values = values * SPREAD
            if name.startswith("scale_"): values = (1 + values.abs() / scale) / SPREAD
            view(storage, once, strides, offset).copy_(values)
        made[name] = storage.to(TORCH[dtype])
    return made


# **** the answer ****

def actual(spec: AttentionSpec, extents: Extents) -> Extents:
    """s_q, s_kv and start of a launch."""
    assert set(extents) <= set(spec.symbolic)
    return {name: extents.get(name, getattr(spec, name)) for name in ("s_q", "s_kv", "start")}


def seen(spec: AttentionSpec, extents: Extents) -> torch.Tensor:
    """Which rows see which columns: [s_q, s_kv] of a launch."""
    at = actual(spec, extents)
    row = torch.arange(at["s_q"])[:, None] + at["start"]
    column = torch.arange(at["s_kv"])[None, :]
    made = torch.ones(at["s_q"], at["s_kv"], dtype=torch.bool)
    if spec.band.first is not None: made &= column >= row + spec.band.first
    if spec.band.last is not None: made &= column <= row + spec.band.last
    return made


def attended(spec: AttentionSpec, given: dict[str, torch.Tensor], wide: torch.dtype,
             rounded: torch.dtype | None = None, **extents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [*batch, s_q, d_v] and l [*batch, s_q] of a launch, computed in `wide`, with p rounded to
    `rounded`."""
    at = actual(spec, extents)
    s_q, s_kv = at["s_q"], at["s_kv"]

    q, k, v = (matrix(spec, given, name)[..., :count, :].to(wide)
               for name, count in (("q", s_q), ("k", s_kv), ("v", s_kv)))
    if spec.scales is not None:
        q, k, v = (x * worth(spec, given, name, x.shape[-2]).to(wide) for x, name in zip((q, k, v), "qkv",
                                                                                         strict=True))
    plainly = wide == torch.float32 and spec.q.dtype == dtypes.float32
    sums = one_by_one(q, k) if plainly else q @ k.transpose(-1, -2)
    small = SimpleNamespace(batch=spec.batch, m=s_q, n=s_kv)
    scores = evaluate(small, spec.score, [sums.double()], given).to(wide)
    scores = torch.where(seen(spec, extents), scores, -torch.inf)
    sinks = torch.full((*spec.batch, 1, 1), -torch.inf)
    if spec.sinks is not None: sinks = view(given["sinks"], spec.batch, spec.sinks, 0)[..., None, None]
    sinks = sinks.to(wide)
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    if spec.kept < KEEP_ALL: weights = weights * keep(spec, given, s_q, s_kv)
    lift = 256 if spec.scales is not None else 1
    if rounded is not None: weights = (weights * lift).to(rounded).to(wide) / lift
    out = weights @ v / torch.where(total == 0, torch.ones_like(total), total)
    return out.double(), (top + torch.log(total)).double().squeeze(-1)


def one_by_one(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q kᵀ, each sum from its first product to its last: BLAS sums in blocks, which of 256 products in
    float32 has a third of the error that any one order must be allowed."""
    sums = torch.zeros(*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
    for i in range(q.shape[-1]): sums = sums + q[..., :, None, i] * k[..., None, :, i]
    return sums


def worth(spec: AttentionSpec, given: dict[str, torch.Tensor], name: str, count: int) -> torch.Tensor:
    """Scales of `count` rows of q, k or v: [*batch, count, 1]."""
    assert spec.scales is not None
    rows_of = spec.scales["qkv".index(name)].rows
    return matrix(spec, given, f"scale_{name}").repeat_interleave(rows_of, -1)[..., :count, None]


def keep(spec: AttentionSpec, given: dict[str, torch.Tensor], s_q: int, s_kv: int) -> torch.Tensor:
    """What probabilities are multiplied by, [*batch, s_q, s_kv]. The first matrix has a number of its own
    where a batch is part of another."""
    matrix, row, column = (np.arange(n, dtype=np.uint64) for n in (spec.matrices, s_q, s_kv))
    if "first matrix" in given: matrix += np.uint64(given["first matrix"].item())
    found = keeps(row[:, None], column, matrix[:, None, None],
                  given["seed"].numpy().view(np.uint32).astype(np.uint64), spec.kept)
    return torch.from_numpy(found).view(*spec.batch, s_q, s_kv) * (KEEP_ALL / spec.kept)


def reference(spec: AttentionSpec, given: dict[str, torch.Tensor],
              **extents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result and l."""
    return attended(spec, given, torch.float64, **extents)


def plain(spec: AttentionSpec, given: dict[str, torch.Tensor],
          **extents: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and l with scores and softmax in float32."""
    return attended(spec, given, torch.float32, TORCH[spec.v.dtype], **extents)


# **** the kernel ****

def launched(made: AttentionKernel, spec: AttentionSpec, given: dict[str, torch.Tensor], arch: str,
             seed: int = 0, check: bool = True, **extents: int) -> tuple[dict[str, torch.Tensor], Report]:
    """The storages of the results after a launch, and the report."""
    emu, at = Emulator(arch, seed=seed, check=check), actual(spec, extents)
    pointers = {name: emu.alloc(bits(given[name])) for name in places(spec)}
    forget(spec, pointers, at)
    order, counts = list(pointers.values()), [at[name] for name in spec.symbolic]
    maps = [tensor_map(order, argument, counts) for argument in made.maps]
    report = emu.launch(made.ptx, made.grid_for(at["s_q"]), made.threads,
                        [*order, *map(np.uint32, counts), *maps], dynamic_smem=made.dynamic_smem,
                        cluster=made.cluster)
    results = [name for name in ("out", "l") if name in pointers]
    return {name: torch.frombuffer(bytearray(pointers[name].numpy().tobytes()), dtype=given[name].dtype)
            for name in results}, report


def forget(spec: AttentionSpec, pointers: dict[str, Buffer], at: Extents) -> None:
    """What belongs to rows beyond a launch's becomes memory that was never written: reads are found."""
    for name, count in (("q", at["s_q"]), ("k", at["s_kv"]), ("v", at["s_kv"])):
        dtype, (offset, extents, strides) = places(spec)[name]
        if count == extents[-2]: continue
        written = torch.ones(pointers[name].data.nbytes // dtype.itemsize, dtype=torch.bool)
        once = tuple(e if s else 1 for e, s in zip(extents, strides, strict=True))
        lies = view(written, once, strides, offset)
        lies[..., count:, :] = False
        lies[..., :count, :] = True
        pointers[name].valid = np.repeat(written.numpy(), dtype.itemsize).astype(np.uint8)


def tensor_map(order: list[Buffer], argument: MapArgument, counts: list[int]) -> TensorMap:
    """A kernel's tensor map over the emulator's buffers."""
    rows = max(1, counts[argument.integer]) if argument.dynamic >= 0 else 0
    dims = tuple(rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims))
    return TensorMap.of_tiles(order[argument.pointer].ptr + argument.offset_bytes, argument.box[::-1],
                           argument.swizzle, dims[::-1], argument.strides[::-1], argument.dtype)


def run(made: AttentionKernel, spec: AttentionSpec, given: dict[str, torch.Tensor], arch: str = "sm_80",
        seed: int = 0, **extents: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result [*batch, s_q, d_v] and l [*batch, s_q] in float64. Nothing may be found, and nothing beside
    them written."""
    storages, report = launched(made, spec, given, arch, seed, **extents)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    s_q, got = actual(spec, extents)["s_q"], []
    for name, storage in storages.items():
        offset, shape, strides = places(spec)[name][1]
        lies = view(storage, shape, strides, offset)
        mine = lies[..., :s_q, :] if name == "out" else lies[..., :s_q]
        got.append(mine.double())
        mine.fill_(GUARD)
        guard = torch.tensor(GUARD).to(storage.dtype).double()
        assert (storage.double() == guard).all(), f"elements beside {name} were written"
    return got[0], got[1] if spec.lse else None


UNIT = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}
# half a step between the smallest numbers of a dtype, which have less digits
LEAST = {dtypes.float32: 1e-30, dtypes.float16: 2.0**-25, dtypes.bfloat16: 1e-30}


def near(spec: AttentionSpec, given: dict[str, torch.Tensor], got: tuple[torch.Tensor, torch.Tensor | None],
         c: float = C, **extents: int) -> None:
    """Asserts |got − exact| ≤ c × the largest error of `plain` + the roundings of the result and of an
    exponent, and of 8 bits those of the reciprocal of the sum and of two scales, which the plain one has not;
    of l, c × the largest error of the plain one, whose sums a cap of scores hides, and 2⁻²⁰ (of 8 bits 2⁻⁹)
    of the largest score and of itself."""
    exact, l = reference(spec, given, **extents)
    usual, usual_l = plain(spec, given, **extents)
    top = torch.where(l == -torch.inf, 0, l.abs()).max()
    roundings = UNIT[spec.out.dtype] + 2.0**-23 * top + (0 if spec.scales is None else 3 * 2.0**-23)
    bound = c * (usual - exact).abs().max() + roundings * exact.abs() + LEAST[spec.out.dtype]
    worst = ((got[0] - exact).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound, a plain one is {(usual - exact).abs().max():g}"
    if got[1] is None: return
    assert torch.equal(got[1] == -torch.inf, l == -torch.inf)
    finite = l != -torch.inf
    if finite.any():
        unit = 2.0**-20 if spec.scales is None else UNIT_OF_SUMS
        bound_l = c * (usual_l - l)[finite].abs().max() + unit * (1 + l[finite].abs().max())
        assert ((got[1] - l)[finite].abs() <= bound_l).all()
