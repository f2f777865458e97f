"""Requests over keys and values in pages for tests of `paged_attention`, and the answer in float64.

Protocol: `case(lengths, …)` makes q, pages, table and lengths; pages lie anywhere, and what no row sees is
NaN (127 for int8), entries of the table beyond a request 2³⁰. `attention(case, device)` is the Tensor,
`exact(case)` the result in float64. `near` holds one against the other by the error of `plain`, an attention
with scores and softmax in float32 and p rounded to q's dtype: an element may be off by twice the largest such
error of all, and by the rounding of the result.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from tinygrad_nv.patterns.decode.paged import paged_attention

TORCH = {dtypes.float32: torch.float32, dtypes.bfloat16: torch.bfloat16, dtypes.float16: torch.float16,
         dtypes.int8: torch.int8, dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.fp8e5m2: torch.float8_e5m2}
UNIT = {dtypes.float32: 2.0**-24, dtypes.bfloat16: 2.0**-8, dtypes.float16: 2.0**-11}
FAR = 1 << 30  # an entry of a table that must not be read
C = 2.0        # of the plain implementation's error


@dataclass(frozen=True)
class Case:
    """The operands of a call."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: list[int]
    dtype: DType
    kv: DType
    scales: tuple[torch.Tensor, ...] = ()
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    chunked: bool = False
    sinks: torch.Tensor | None = None

    @property
    def rows(self) -> int: return self.q.shape[1]

    @property
    def size(self) -> int: return self.k.shape[1]

    @property
    def factor(self) -> float: return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale


def numbers(random: torch.Generator, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
    """Normal numbers that the dtype holds; integers of all sizes."""
    if dtype == dtypes.int8: return torch.randint(-128, 128, shape, generator=random).to(torch.int8)
    wide = torch.randn(shape, generator=random)
    return (wide * 20 if dtype.itemsize == 1 else wide).to(TORCH[dtype])


def case(lengths: list[int], rows: int = 1, heads: int = 2, kv_heads: int = 1, d: int = 32, size: int = 8,
         pages: int = 4, dtype: DType = dtypes.float32, kv: DType | None = None, d_v: int | None = None,
         spare: int = 2, seed: int = 0, sinks: bool = False, **more: float | None) -> Case:
    """Requests of these lengths."""
    random = torch.Generator().manual_seed(seed)
    kv, d_v = kv or dtype, d if d_v is None else d_v
    owned = [-(-length // size) for length in lengths]
    order = torch.randperm(len(lengths) * pages + spare, generator=random).tolist()
    table = torch.full((len(lengths), pages), FAR, dtype=torch.int32)
    unseen = torch.ones(len(order), size, dtype=torch.bool)
    first, window = [0] * len(lengths), int(more.get("window") or 0)
    if window: first = [max(0, length - rows + 1 - window) for length in lengths]
    if more.get("chunked"): first = [max(0, length - rows) // window * window for length in lengths]
    for b, (length, count) in enumerate(zip(lengths, owned, strict=True)):
        table[b, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        for key in range(first[b], length): unseen[table[b, key // size], key % size] = False
        table[b, :first[b] // size] = FAR
    k, v = (numbers(random, (len(unseen), size, kv_heads, width), kv) for width in (d, d_v))
    for x in (k, v):
        if kv.itemsize == 1: x.view(torch.int8)[unseen] = 127  # NaN of e4m3 and e5m2
        else: x[unseen] = torch.nan
    scales: tuple[torch.Tensor, ...] = ()
    if kv.itemsize == 1:
        scales = tuple(torch.rand(len(unseen), kv_heads, generator=random) * 0.05 + 0.01 for _ in range(2))
        for x in scales: x[unseen.all(1)] = torch.nan
    q = numbers(random, (len(lengths), rows, heads, d), dtype)
    sink = torch.randn(heads, generator=random) if sinks else None
    return Case(q, k, v, table, lengths, dtype, kv, scales, sinks=sink, **more)  # type: ignore[arg-type]


# **** on a device ****

def stored(x: torch.Tensor, dtype: DType, device: str) -> Tensor:
    """A tensor in memory of its own, bit for bit: kernels of tinygrad lose subnormals of e4m3."""
    made = Tensor.empty(*x.shape, dtype=dtype, device=device).realize()
    raw = bytearray(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    made._buffer().ensure_allocated().copy_from(Buffer("PYTHON", x.numel(), dtype, opaque=memoryview(raw)))
    return made


def fetched(x: Tensor) -> torch.Tensor:
    """What is in a tensor, bit for bit."""
    raw = {1: dtypes.uint8, 2: dtypes.uint16, 4: dtypes.uint32}[x.dtype.itemsize]
    flat = np.ascontiguousarray(x.bitcast(raw).numpy())
    return torch.frombuffer(bytearray(flat.tobytes()), dtype=TORCH[x.dtype]).reshape(tuple(x.shape))


def operands(given: Case, device: str) -> list[Tensor]:
    """q, pages, table and lengths in memory."""
    made = [stored(given.q, given.dtype, device)]
    made += [stored(x, given.kv, device) for x in (given.k, given.v)]
    made.append(Tensor(given.table.numpy(), device=device).realize())
    return [*made, Tensor(np.array(given.lengths, np.int32), device=device).realize()]


def scales_of(given: Case, device: str) -> dict[str, Tensor]:
    """The scales in memory, by their names."""
    return {name: stored(x, dtypes.float32, device)
            for name, x in zip(("k_scale", "v_scale"), given.scales, strict=False)}


def attention(given: Case, device: str, tensors: list[Tensor] | None = None) -> Tensor:
    """The call."""
    tensors = operands(given, device) if tensors is None else tensors
    sinks = None if given.sinks is None else Tensor(given.sinks.numpy(), device=device).realize()
    return paged_attention(*tensors, scale=given.scale, window=given.window, softcap=given.softcap,
                           chunked=given.chunked, sinks=sinks, **scales_of(given, device))


# **** the answer ****

def attended(given: Case, wide: torch.dtype, rounded: torch.dtype | None = None) -> torch.Tensor:
    """The result in float64, computed in `wide` with p rounded to `rounded`."""
    batch, rows, heads, _ = given.q.shape
    group = heads // given.k.shape[2]
    made = torch.zeros(batch, rows, heads, given.v.shape[-1], dtype=torch.float64)
    for b, length in enumerate(given.lengths):
        for i in range(rows):
            place = length - rows + i
            low = 0 if given.window is None else max(0, place + 1 - given.window)
            if given.chunked: low = max(0, place) // given.window * given.window
            keys = torch.arange(low, max(low, place + 1))
            if not len(keys): continue
            page = given.table[b][keys // given.size].long()
            k, v = (x[page, keys % given.size].to(wide).repeat_interleave(group, 1)
                    for x in (given.k, given.v))
            factors = [x[page].to(wide).repeat_interleave(group, 1).T for x in given.scales]
            s = torch.einsum("hd,chd->hc", given.q[b, i].to(wide), k) * given.factor
            if factors: s = s * factors[0]
            if given.softcap is not None: s = torch.tanh(s / given.softcap) * given.softcap
            if given.sinks is not None: s = torch.cat([s, given.sinks.to(wide)[:, None]], -1)
            p = torch.softmax(s, -1)[:, :len(keys)]
            if factors: p = p * factors[1]
            if rounded is not None: p = p.to(rounded).to(wide)
            made[b, i] = torch.einsum("hc,chd->hd", p, v).double()
    return made


def exact(given: Case) -> torch.Tensor:
    """The result in float64."""
    return attended(given, torch.float64)


def near(given: Case, got: torch.Tensor, c: float = C) -> None:
    """Asserts |got − exact| ≤ c × the largest error of a plain attention + the rounding of the result."""
    wanted = exact(given)
    rounded = None if given.dtype == dtypes.float32 else TORCH[given.dtype]
    usual = (attended(given, torch.float32, rounded) - wanted).abs().max()
    unit = UNIT[given.dtype]
    # of few numbers in float32 the plain error says little: an exponential of 5 is off by 8 units, sum and
    # quotient add one each
    if given.dtype == dtypes.float32: usual = torch.maximum(usual, 5 * unit * wanted.abs().max())
    worst = ((got.double() - wanted).abs() - c * usual - unit * wanted.abs() - unit**2).max()
    assert worst <= 0, f"an error {worst:g} above the bound, a plain one is {usual:g}"


def permuted(given: Case, seed: int) -> Case:
    """The same requests, whose pages lie elsewhere."""
    to = torch.randperm(len(given.k), generator=torch.Generator().manual_seed(seed))
    back = torch.argsort(to)
    table = torch.where(given.table == FAR, FAR, to[given.table.clamp(max=len(to) - 1).long()].int())
    return replace(given, k=given.k[back], v=given.v[back], table=table,
                   scales=tuple(x[back] for x in given.scales))


def alone(given: Case, b: int) -> Case:
    """One request of several."""
    return replace(given, q=given.q[b:b + 1], table=given.table[b:b + 1], lengths=given.lengths[b:b + 1])
