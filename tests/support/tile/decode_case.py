"""Decode attentions for tests of the template: pages in memory as a spec says, the answer in float64, and
runs on the emulator that allow no finding and no byte written outside the result.

Protocol: `decode(...)` makes a spec, `requests(spec, lengths, seed)` its storages: pages that requests own
hold normal numbers in the tokens that rows see and NaN (127 for int8) elsewhere; other pages are of NaN too.
`reference(spec, given)` is the result in float64, `run(spec, given)` the kernel's own. `near` holds it
against float64 by the error of `plain`, an attention with scores and softmax in float32 and p rounded to
q's dtype: an element may be off by twice the largest such error of all, and by the rounding of the result.

Memory that no row sees has not been written as far as the emulator knows: tokens, pages, entries of the table
and scales.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.attention_case import LEAST, UNIT, rows
from tests.support.tile.gemm_case import GUARD, TORCH, bits, evaluate, view
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.decode.schedules import Decode, KeySplits
from tinygrad_nv.tile.decode.spec import DecodeSpec, Length, Pages, Scales
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, Sum, loads
from tinygrad_nv.tile.kernel import DecodeKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

C = 2.0  # of the plain implementation's error
SMALL = Decode().keys(64).warps(1, 4).stages(2).split(4, 128)


# **** specs ****

def pages_of(dtype: DType, size: int, heads: int, d: int, order: str, gap: int = 0) -> Pages:
    """Pages with `gap` elements before all and after each token of a head: "ths" is [pages, page_size, heads,
    d], "hts" [pages, heads, page_size, d]; "both" as "ths" with keys and values of a token side by side."""
    d += gap
    if order == "hts": return Pages(dtype, heads * size * d, d, size * d, gap)
    wide = 2 if order == "both" else 1
    return Pages(dtype, wide * size * heads * d, wide * heads * d, d, gap)


def decode(batch: int = 1, heads: int = 1, group: int = 1, s_q: int = 1, d: int = 64, page_size: int = 16,
           pages: int = 8, dtype: DType = dtypes.bfloat16, kv: DType | None = None, d_v: int | None = None,
           window: int | None = None, score: Expression | None = None, order: str = "ths",
           rows_order: str = "brh", gap: int = 0, **more: Any) -> DecodeSpec:
    """A decode attention, scaled by 1/√d where no score is given. `gap` elements follow each row of q and of
    the result, and 16 · gap each token; all but q begin after one gap."""
    d_v, kv = d if d_v is None else d_v, kv or dtype
    if score is None: score = Sum() * (1 / math.sqrt(d))
    q, out = (rows(dtype, (batch, heads, group, s_q), width, rows_order, gap, offset)
              for width, offset in ((d, 0), (d_v, gap)))
    keys, values = (pages_of(kv, page_size, heads, width, order, 16 * gap) for width in (d, d_v))
    if order == "both": values = replace(values, offset=heads * d)
    scale = Scales(heads, 1) if kv.itemsize == 1 else None
    return DecodeSpec(batch, heads, group, s_q, d, d_v, page_size, pages, q, keys, values, out, scale, scale,
                      window, score, **more)


def contiguous(longest: int, length: Length = "argument", **more: Any) -> DecodeSpec:
    """One of a contiguous cache, of at most so many tokens."""
    return decode(pages=1, page_size=longest, table=False, length=length, **more)


# **** memory ****

@dataclass
class Given:
    """Storages of a launch by name; `written` says which elements exist, of those where not all do. With
    `together` values lie in the storage of keys."""
    storages: dict[str, torch.Tensor]
    written: dict[str, torch.Tensor]
    lengths: list[int]
    together: bool = False


def seen(spec: DecodeSpec, length: int) -> range:
    """Keys that some row of a request sees."""
    first = 0 if spec.window is None else max(0, length - spec.reach)
    if spec.chunked: first = first // spec.window * spec.window
    return range(first, length)


def requests(spec: DecodeSpec, lengths: list[int], seed: int = 0, spare: int = 3, together: bool = False,
             scale: float = 1.0) -> Given:
    """Requests of these lengths, whose pages lie anywhere among all of them and `spare` more."""
    random = torch.Generator().manual_seed(seed)
    needed = [-(-length // spec.page_size) if spec.table else 1 for length in lengths]
    total = sum(needed) + spare
    order = torch.randperm(total, generator=random).tolist() if spec.table else list(range(total))[::-1]
    table = torch.full((spec.batch, spec.pages), 1 << 30, dtype=torch.int32)
    known = torch.zeros(spec.batch, spec.pages, dtype=torch.bool)
    for b, (count, length) in enumerate(zip(needed, lengths, strict=True)):
        mine = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(mine, dtype=torch.int32)
        for number in {key // spec.page_size for key in seen(spec, length)}: known[b, number] = True
    storages = {"q": garbage(size_of(spec, spec.q, spec.d), spec.q.dtype)}
    lies = view(storages["q"], *place(spec, spec.q, spec.d))
    lies.copy_(values(random, lies.shape, spec.q.dtype, scale))
    written: dict[str, torch.Tensor] = {"table": known}
    for name, pages, d in (("k", spec.k, spec.d), ("v", spec.v, spec.d_v)):
        shape, strides = (total, spec.page_size, spec.heads, d), (pages.page, pages.token, pages.head, 1)
        size = pages.offset + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + 1
        if together: size = total * pages.page
        if not (together and name == "v"):
            storages[name] = garbage(size, pages.dtype)
            written[name] = torch.zeros(size, dtype=torch.bool)
        storage, there = (made["k" if together else name] for made in (storages, written))
        lies, valid = (view(each, shape, strides, pages.offset) for each in (storage, there))
        for b, length in enumerate(lengths):
            for key in seen(spec, length):
                token = int(table[b, key // spec.page_size]), key % spec.page_size
                lies[token] = values(random, (spec.heads, d), pages.dtype, scale)
                valid[token] = True
        if spec.is_quantised:
            scales = torch.rand(total, spec.heads, generator=random) * 0.05 + 0.01
            exists = torch.zeros(total, spec.heads, dtype=torch.bool)
            exists[table[known].long()] = True
            storages[f"{name}_scale"] = torch.where(exists, scales, torch.nan).reshape(-1)
            written[f"{name}_scale"] = exists.reshape(-1)
    for i, dtype in enumerate(spec.parameters):
        one, sizes = next(load for load in loads(spec.score) if load.parameter == i), extents_of(spec)
        size = one.offset + sum((e - 1) * s for e, s in zip(sizes, strides_of(one), strict=True)) + 1
        storages[f"x{i}"] = (torch.rand(size, generator=random) < 0.7) if dtype == dtypes.bool else \
            torch.randn(size, generator=random).to(TORCH[dtype])
    if spec.sinks: storages["sinks"] = torch.randn(spec.heads, spec.group, generator=random)
    storages |= {"table": table, "lengths": torch.tensor(lengths, dtype=torch.int32)}
    return Given(storages, written, lengths, together)


def place(spec: DecodeSpec, one: Rows, d: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Extents, strides and offset of q or of the result."""
    return (spec.batch, spec.heads, spec.group, spec.s_q, d), (*one.batch, one.row, 1), one.offset


def extents_of(spec: DecodeSpec) -> tuple[int, ...]:
    """What a parameter of the score may have a stride of: batch, rows, keys."""
    return spec.batch, spec.heads, spec.group, spec.s_q, spec.longest


def strides_of(load: Load) -> tuple[int, ...]: return *(load.batch or (0, 0, 0)), load.m, load.n


def size_of(spec: DecodeSpec, one: Rows, d: int) -> int:
    """Elements of its storage."""
    extents, strides, offset = place(spec, one, d)
    return offset + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + 1


def garbage(size: int, dtype: DType) -> torch.Tensor:
    """Memory that must not be read."""
    if dtype == dtypes.int8: return torch.full((size,), 127, dtype=torch.int8)
    return torch.full((size,), torch.nan).to(TORCH[dtype])


def values(random: torch.Generator, shape: tuple[int, ...], dtype: DType, scale: float) -> torch.Tensor:
    """Numbers to begin with: of 8 bits, of all sizes that there are."""
    if dtype == dtypes.int8: return torch.randint(-128, 128, shape, generator=random).to(torch.int8)
    wide = torch.randn(shape, generator=random, dtype=torch.float64) * scale
    return (wide * 20).to(torch.float32).to(TORCH[dtype]) if dtype.itemsize == 1 else wide.to(TORCH[dtype])


def every_number(kv: DType, dtype: DType) -> tuple[DecodeSpec, Given, torch.Tensor]:
    """Requests of one key each, whose values are together every finite number of a dtype of 8 bits. The
    result is these times their scale, a power of two."""
    spec = decode(batch=8, d=32, pages=4, kv=kv, dtype=dtype)
    given = requests(spec, [1] * 8)
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(TORCH[kv])
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0.0).to(TORCH[kv])
    pages = given.storages["table"][:, 0].long()
    given.storages["v"].view(-1, 16, 32)[pages, 0] = numbers.view(8, 32)
    given.storages["v_scale"][pages] = 0.25
    return spec, given, numbers.float() * 0.25


# **** the answer ****

def attended(spec: DecodeSpec, given: Given, wide: torch.dtype,
             rounded: torch.dtype | None = None) -> torch.Tensor:
    """The result [batch, heads, group, s_q, d_v], computed in `wide`, with p rounded to `rounded`."""
    made = torch.zeros(spec.batch, spec.heads, spec.group, spec.s_q, spec.d_v, dtype=torch.float64)
    q = view(given.storages["q"], *place(spec, spec.q, spec.d)).to(wide)
    for b, length in enumerate(given.lengths):
        keys = torch.tensor(list(seen(spec, length)), dtype=torch.long)
        if not len(keys): continue
        (k, k_scale), (v, v_scale) = (gathered(spec, given, name, b, keys, wide) for name in "kv")
        places = length - spec.s_q + torch.arange(spec.s_q)
        if not spec.causal: places = torch.full((spec.s_q,), length - 1)
        visible = keys[None, :] <= places[:, None]
        if spec.chunked: visible &= keys[None, :] >= places[:, None] // spec.window * spec.window
        elif spec.window is not None: visible &= keys[None, :] > places[:, None] - spec.window
        sums = q[b] @ (k * k_scale).transpose(-1, -2)[:, None]
        scores = scored(spec, given, sums.double(), b, places, keys).to(wide)
        scores = torch.where(visible, scores, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        if spec.sinks: top = torch.maximum(top, sinks := given.storages["sinks"].to(wide)[:, :, None, None])
        top = torch.where(top == -torch.inf, 0.0, top)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if spec.sinks: total = total + torch.exp(sinks - top)
        weights = weights * v_scale.transpose(-1, -2)[:, None]
        if rounded is not None: weights = weights.to(rounded).to(wide)
        made[b] = (weights @ v[:, None] / torch.where(total == 0, torch.ones_like(total), total)).double()
    return made


def gathered(spec: DecodeSpec, given: Given, name: str, b: int, keys: torch.Tensor,
             wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys or values as they are stored, [heads, keys, d], and their scales [heads, keys, 1]."""
    pages, d = (spec.k, spec.d) if name == "k" else (spec.v, spec.d_v)
    storage = given.storages["k" if given.together else name]
    count = -(-storage.numel() // pages.page)
    lies = view(storage, (count, spec.page_size, spec.heads, d), (pages.page, pages.token, pages.head, 1),
                pages.offset)
    page = given.storages["table"][b][keys // spec.page_size].long()
    found = torch.stack([lies[p, t] for p, t in zip(page.tolist(), (keys % spec.page_size).tolist(),
                                                    strict=True)]).to(wide)
    scales = torch.ones(len(keys), spec.heads, dtype=wide)
    if spec.is_quantised: scales = given.storages[f"{name}_scale"].reshape(-1, spec.heads)[page].to(wide)
    return found.transpose(0, 1), scales.transpose(0, 1)[:, :, None]


def scored(spec: DecodeSpec, given: Given, sums: torch.Tensor, b: int, places: torch.Tensor,
           keys: torch.Tensor) -> torch.Tensor:
    """Scores of one request's sums [heads, group, s_q, keys]: positions count from the first place and the
    first key, of which the expression is told by what is added, and loads by their offset."""
    shifted = _Shifted(spec, b, int(places[0]), int(keys[0]))
    small = SimpleNamespace(batch=(1, spec.heads, spec.group), m=spec.s_q, n=len(keys))
    return evaluate(small, shifted.of(spec.score), [sums[None]], given.storages)[0]


class _Shifted:
    """An expression whose positions begin at other numbers than 0."""

    def __init__(self, spec: DecodeSpec, b: int, place: int, key: int) -> None:
        self.starts: dict[str | int, int] = {0: b, "m": place, "n": key}

    def of(self, node: Expression) -> Expression:
        if isinstance(node, Position): return node + self.starts.get(node.axis, 0)
        if isinstance(node, Load):
            request = node.batch[0] if node.batch else 0
            return replace(node, offset=node.offset + self.starts["n"] * node.n + self.starts[0] * request)
        if isinstance(node, Apply): return replace(node, args=tuple(map(self.of, node.args)))
        return node


def reference(spec: DecodeSpec, given: Given) -> torch.Tensor:
    """The exact result."""
    return attended(spec, given, torch.float64)


def plain(spec: DecodeSpec, given: Given) -> torch.Tensor:
    """The result with scores and softmax in float32, and p times the scale of its value rounded to q's dtype.
    """
    return attended(spec, given, torch.float32, TORCH[spec.q.dtype])


# **** the kernels ****

def launched(made: DecodeKernel, spec: DecodeSpec, given: Given, arch: str = "sm_80", seed: int = 0,
             check: bool = True) -> tuple[torch.Tensor, list[Report]]:
    """The result's storage after the launches, and their reports."""
    emu = Emulator(arch, seed=seed, check=check)
    size = size_of(spec, spec.out, spec.d_v)
    out = emu.alloc(bits(torch.full((size,), GUARD, dtype=TORCH[spec.out.dtype])))
    order = [out, *([emu.alloc(made.workspace_bytes)] if made.workspace_bytes else [])]
    for name in named(spec):
        if name == "v" and given.together and not spec.latent: order.append(order[-1])
        if name not in given.storages: continue
        storage = given.storages[name]
        order.append(emu.alloc(bits(storage)))
        if name in given.written:
            there = given.written[name].reshape(-1).numpy()
            order[-1].valid = np.repeat(there, storage.element_size()).astype(np.uint8)
    if spec.length == "argument": order.append(given.lengths[0])
    reports: list[Report] = []
    for each in made.kernels:  # each may begin before the one ahead has ended, where it says so
        ahead = [report.footprint for report in reports] if each.pdl and check else None
        reports.append(emu.launch(each.ptx, each.grid, each.threads, order, dynamic_smem=each.dynamic_smem,
                                  footprint=each.pdl and check, ahead=ahead))
    return torch.frombuffer(bytearray(out.numpy().tobytes()), dtype=TORCH[spec.out.dtype]), reports


def named(spec: DecodeSpec) -> tuple[str, ...]:
    """The inputs that a spec may have."""
    there = {"table": spec.table, "lengths": spec.length == "memory", "sinks": spec.sinks}
    known = ("q", "k", "v", "table", "lengths", "k_scale", "v_scale", "sinks")
    return *(name for name in known if there.get(name, True)), *(f"x{i}" for i in range(len(spec.parameters)))


def run(spec: DecodeSpec, given: Given, schedule: KeySplits = SMALL, arch: str = "sm_80",
        seed: int = 0) -> torch.Tensor:
    """The result [batch, heads, group, s_q, d_v], in its dtype. Nothing may be found, and nothing beside it
    written."""
    storage, reports = launched(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch, seed)
    found = [each for report in reports for each in told(report)]
    assert found == [], "\n".join(map(str, found))
    lies = view(storage, *place(spec, spec.out, spec.d_v))
    got = lies.clone()
    lies.fill_(GUARD)
    assert (storage == GUARD).all(), "elements beside the result were written"
    return got


def near(spec: DecodeSpec, given: Given, got: torch.Tensor, c: float = C) -> None:
    """Asserts |got − exact| ≤ c × the largest error of `plain` + the rounding of the result."""
    exact = reference(spec, given)
    usual = (plain(spec, given) - exact).abs().max()
    bound = c * usual + UNIT[spec.out.dtype] * exact.abs() + LEAST[spec.out.dtype]
    worst = ((got.double() - exact).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound, a plain one is {usual:g}"


def checked(spec: DecodeSpec, lengths: list[int], schedule: Decode = SMALL, arch: str = "sm_80",
            seed: int = 0, **more: float) -> torch.Tensor:
    """Runs requests of these lengths, and holds them against float64."""
    given = requests(spec, lengths, seed, **more)
    got = run(spec, given, schedule, arch, seed)
    near(spec, given, got)
    return got
