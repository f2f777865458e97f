"""Products for tests of the templates: operands in memory as a spec says, the answer in float64, and a run on
the emulator that allows no finding and no byte written outside the result.

Protocol: `arguments(spec, seed)` makes the storages (everything between elements is NaN, or 77 for
integers), `reference(spec, arguments)` the result in float64 from torch, `run(kernel, spec, arguments)` the
kernel's own. Integer-valued operands (`integers=True`) have sums that float32 holds exactly.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile import emulated
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, loads
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec, Operand, Result
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, ScaledGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TORCH = {dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16, dtypes.float32: torch.float32,
         dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.fp8e5m2: torch.float8_e5m2, dtypes.int8: torch.int8,
         dtypes.uint8: torch.uint8, dtypes.int32: torch.int32, dtypes.bool: torch.bool,
         dtypes.int16: torch.int16, dtypes.float64: torch.float64}
GUARD = 77  # what elements beside the result hold, before and after
Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, extents, strides


# **** specs ****

def operand(dtype: DType, mn: int, k: int, major: str = "K", gap: int = 0, batch: tuple[int, ...] = (),
            offset: int = 0) -> Operand:
    """A dense operand with `gap` elements after each row, matrices one after the other."""
    inner, outer = (k, mn) if major == "K" else (mn, k)
    pitch = inner + gap
    return Operand(dtype, *((pitch, 1) if major == "K" else (1, pitch)), dense(batch, pitch * outer), offset)


def result(dtype: DType, m: int, n: int, major: str = "N", gap: int = 0,
           batch: tuple[int, ...] = ()) -> Result:
    """A dense result with `gap` elements after each row (or column)."""
    inner, outer = (n, m) if major == "N" else (m, n)
    pitch = inner + gap
    return Result(dtype, *((pitch, 1) if major == "N" else (1, pitch)), dense(batch, pitch * outer))


def dense(batch: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Strides of matrices of `size` elements one after the other."""
    made = []
    for extent in reversed(batch):
        made.append(size)
        size *= extent
    return tuple(made[::-1])


def product(m: int, n: int, k: int, dtype: DType = dtypes.bfloat16, out: DType | None = None,
            majors: str = "KK",
            gap: int = 0, batch: tuple[int, ...] = (), epilogue: Expression | None = None,
            out_major: str = "N", offset: int = 0, symbolic: bool = False, tf32: bool = False) -> GemmSpec:
    """A product of dense operands; majors "KK" is x @ w.T, "KM" x @ w, and so on (M: MN-major)."""
    a, b = (operand(dtype, mn, k, {"K": "K", "M": "MN"}[major], gap, batch, offset)
            for mn, major in zip((m, n), majors, strict=True))
    kind = out or (dtypes.int32 if dtype in (dtypes.int8, dtypes.uint8) else dtype)
    ends = {} if epilogue is None else {"epilogue": epilogue}
    return GemmSpec(m, n, k, a, b, result(kind, m, n, out_major, gap, batch), batch, symbolic=symbolic,
                    tf32=tf32 or dtype == dtypes.float32, **ends)


# **** memory ****

def view(storage: torch.Tensor, extents: tuple[int, ...], strides: tuple[int, ...],
         offset: int) -> torch.Tensor:
    return torch.as_strided(storage, extents, strides, offset)


def places(spec: GemmSpec) -> dict[str, tuple[DType, list[Place]]]:
    """Where the elements of each parameter lie, by the parameter's name."""
    a, b, o = spec.a, spec.b, spec.out
    made: dict[str, tuple[DType, list[Place]]] = {
        "out": (o.dtype, [(o.offset, (*spec.batch, spec.m, spec.n), (*o.batch, o.m, o.n))]),
        "a": (a.dtype, [(a.offset, (*spec.batch, spec.m, spec.k), (*a.batch, a.mn, a.k))]),
        "b": (b.dtype, [(b.offset + p * spec.part, (*spec.batch, spec.n, spec.k), (*b.batch, b.mn, b.k))
                        for p in range(spec.parts)])}
    for load in sorted(loads(spec.epilogue), key=lambda load: load.parameter):
        entry = made.setdefault(f"x{load.parameter}", (load.dtype, []))
        batch = load.batch or (0,) * len(spec.batch)
        entry[1].append((load.offset, (*spec.batch, spec.m, spec.n), (*batch, load.m, load.n)))
    return made


def arguments(spec: GemmSpec, seed: int = 0, integers: bool = True, most: int = 4) -> dict[str, torch.Tensor]:
    """Storages of every parameter; those of `out` hold GUARD throughout."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, (dtype, where) in places(spec).items():
        size = max(offset + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + 1
                   for offset, extents, strides in where)
        floats = dtypes.is_float(dtype) and name != "out"
        storage = torch.full((size,), torch.nan if floats else GUARD, dtype=torch.float64)
        for offset, extents, strides in [] if name == "out" else where:
            extents = tuple(1 if stride == 0 else extent for extent,
                            stride in zip(extents, strides, strict=True))
            target = view(storage, extents, strides, offset)
            low = 0 if dtype == dtypes.uint8 else -most
            values = (torch.randint(low, most + 1, (size,), generator=random).double() if integers
                      else torch.rand(size, generator=random, dtype=torch.float64) * 2 - 1)
            if dtype == dtypes.bool: values = (values > 0).double()
            target.copy_(view(values, extents, strides, offset))
        made[name] = storage.to(TORCH[dtype])
    return made


# **** the answer ****

def reference(spec: GemmSpec, given: dict[str, torch.Tensor], float32: bool = False,
              in_turn: bool = False) -> torch.Tensor:
    """[*batch, m, n] in float64: sums exact (or in float32; `in_turn`: one product after the other, the same
    on every processor, which torch's are not), each node of the epilogue rounded to its dtype."""
    def sums_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if not in_turn: return a @ b.transpose(-1, -2)
        total = torch.zeros(*a.shape[:-1], b.shape[-2], dtype=a.dtype)
        for k in range(spec.k): total += a[..., :, None, k] * b[..., None, :, k]
        return total
    where = places(spec)

    def matrix(name: str, part: int = 0) -> torch.Tensor:
        offset, extents, strides = where[name][1][part]
        wide = given[name].to(torch.float32 if float32 else torch.float64)
        return view(wide, extents, strides, offset) * scales(spec, name, given).to(wide.dtype)

    a = matrix("a")
    sums = [sums_of(a, matrix("b", part)).double() for part in range(spec.parts)]
    return evaluate(spec, spec.epilogue, sums, given)


def scales(spec: GemmSpec, name: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """What each element of operand `name` is multiplied by: scales of groups, where the spec has them."""
    if not isinstance(spec, ScaledGemmSpec): return torch.ones(())
    one, rows = (spec.a_scale, spec.m) if name == "a" else (spec.b_scale, spec.n)
    extents = -(-rows // one.rows), spec.groups
    each = view(given[f"{name}_scale"].double(), extents, (one.mn, one.k), one.offset)
    return each.repeat_interleave(one.rows, 0)[:rows].repeat_interleave(GROUP, 1)[:, :spec.k]


def evaluate(spec: GemmSpec, node: Expression, sums: list[torch.Tensor],
             given: dict[str, torch.Tensor]) -> torch.Tensor:
    """A node of an epilogue in float64, rounded to the node's dtype."""
    if isinstance(node, Sum): return sums[node.part]
    extents = (*spec.batch, spec.m, spec.n)
    if isinstance(node, Constant):
        return torch.full(extents, float(node.value), dtype=torch.float64).to(TORCH[node.dtype]).double()
    if isinstance(node, Position):
        axis = {"m": len(extents) - 2, "n": len(extents) - 1}.get(str(node.axis), node.axis)
        shape = [1] * len(extents)
        shape[int(axis)] = -1
        return torch.arange(extents[int(axis)], dtype=torch.float64).view(shape).expand(extents)
    if isinstance(node, Load):
        batch = node.batch or (0,) * len(spec.batch)
        return view(given[f"x{node.parameter}"].double(), extents, (*batch, node.m, node.n), node.offset)
    assert isinstance(node, Apply)
    args = [evaluate(spec, arg, sums, given) for arg in node.args]
    made = _OPS[node.op](*args)
    if node.op == "cast" and dtypes.is_int(node.dtype): made = made.trunc()
    return made.to(TORCH[node.dtype]).double()


_OPS = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
        "max": torch.maximum, "min": torch.minimum, "reciprocal": torch.reciprocal, "exp2": torch.exp2,
        "log2": torch.log2, "sqrt": torch.sqrt, "sin": torch.sin,
        "less": lambda x, y: (x < y).double(), "not_equal": lambda x, y: (x != y).double(),
        "and": lambda x, y: (x.long() & y.long()).double(), "or": lambda x, y: (x.long() | y.long()).double(),
        "xor": lambda x, y: (x.long() ^ y.long()).double(),
        "where": lambda c, x, y: torch.where(c.bool(), x, y), "cast": lambda x: x}


# **** the kernel ****

def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def launched(made: GemmKernel, spec: GemmSpec, given: dict[str, torch.Tensor], arch: str, seed: int = 0,
             m: int | None = None, check: bool = True) -> tuple[torch.Tensor, Report]:
    """The storage of the result after a launch, and the report."""
    emu = Emulator(arch, seed=seed, check=check)
    pointers = {name: emu.alloc(bits(storage)) for name, storage in given.items()}
    order = [pointers["out"]]
    if made.workspace_bytes:
        order += [emu.alloc(made.workspace_bytes), emu.alloc(np.zeros(4 * max(made.flags, 1), np.uint8))]
    order += [pointers[name] for name in given if name != "out"]
    rows = spec.m if m is None else m
    if rows < spec.m: forget_rows(spec, pointers, rows)
    maps = [tensor_map(order, argument, rows) for argument in made.maps]
    args = [*order, *([np.uint32(rows)] if spec.symbolic else []), *maps]
    report = emu.launch(made.ptx, made.grid_for(rows), made.threads, args, dynamic_smem=made.dynamic_smem,
                        cluster=made.cluster)
    raw = bytearray(pointers["out"].numpy().tobytes())
    return torch.frombuffer(raw, dtype=TORCH[spec.out.dtype]), report


def forget_rows(spec: GemmSpec, pointers: dict[str, Buffer], rows: int) -> None:
    """What belongs to rows from `rows` on alone becomes memory that was never written: reads are found."""
    for name, (dtype, where) in places(spec).items():
        if name in ("out", "b"): continue
        written = torch.ones(pointers[name].data.nbytes // dtype.itemsize, dtype=torch.bool)
        for value, here in ((False, slice(rows, None)), (True, slice(0, rows))):
            for offset, extents, strides in where:
                if not strides[row := len(spec.batch)] and not value: continue
                once = tuple(e if stride else 1 for e, stride in zip(extents, strides, strict=True))
                view(written, once, strides, offset)[(slice(None),) * row + (here,)] = value
        pointers[name].valid = np.repeat(written.numpy(), dtype.itemsize).astype(np.uint8)


def tensor_map(order: list, argument: MapArgument, rows: int) -> TensorMap:
    """A kernel's tensor map over the emulator's buffers."""
    return emulated.tensor_map(order, replace(argument, integer=0), [rows])


def run(made: GemmKernel, spec: GemmSpec, given: dict[str, torch.Tensor], arch: str = "sm_80", seed: int = 0,
        m: int | None = None) -> torch.Tensor:
    """The result [*batch, m, n] in float64. Nothing may be found, and nothing beside it written."""
    storage, report = launched(made, spec, given, arch, seed, m)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    rows, out = spec.m if m is None else m, spec.out
    extents, strides = (*spec.batch, rows, spec.n), (*out.batch, out.m, out.n)
    got = view(storage, extents, strides, out.offset).double()
    view(storage, extents, strides, out.offset).fill_(GUARD)
    guard = torch.tensor(GUARD).to(storage.dtype).double()
    assert (storage.double() == guard).all(), "elements beside the result were written"
    return got


def exactly(spec: GemmSpec, schedule: GemmSchedule, arch: str = "sm_80", seed: int = 0, m: int | None = None,
            sm_count: int = 132, most: int = 4) -> None:
    """Asserts that integer operands come out exactly."""
    given = arguments(spec, seed, most=most)
    got = run(TABLE.build(spec, schedule, GPU(arch, sm_count)), spec, given, arch, seed, m)
    assert torch.equal(got, reference(spec, given)[..., :m, :])


def bounds(spec: GemmSpec, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """[*batch, m, n]: what the result is exactly, and how far one may be from it: at most four times the
    largest error of float32 sums, what tensor cores cut, what approximate exponentials and reciprocals lose
    (2^-16 of the sum), and two roundings of the result. Tensor cores cut, of the sum of the products'
    magnitudes: 2^-20, 2^-9 of tf32 (whose operands lose 2^-10 each), 2^-10 of 8-bit floats (13 bits until
    sums are promoted). Activations steepen an error by at most 1.2."""
    exact, plain = reference(spec, given), reference(spec, given, float32=True)
    sums = replace(spec, out=replace(spec.out, dtype=dtypes.float32),
                   epilogue=Sum(spec.accumulate).cast(dtypes.float32))
    whole = reference(sums, {name: storage.double().abs() for name, storage in given.items()})
    part = 2.0**-10 if spec.a.dtype in FP8 else 2.0**-9 if spec.a.dtype == dtypes.float32 else 2.0**-20
    unit = {dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}.get(spec.out.dtype, 2.0**-24)
    cut = part * whole + 2.0**-16 * (1 + reference(sums, given).abs())
    return exact, 4 * (plain - exact).abs().max() + 1.2 * cut + 2 * unit * exact.abs()


def stored(spec: GemmSpec, given: dict[str, torch.Tensor],
           m: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """`bounds` as the result's storage holds them, with `m` rows; elements beside the result must stay."""
    rows, out = slice(0, spec.m if m is None else m), spec.out
    found = []
    for values, beside in zip(bounds(spec, given), (given["out"].double(), torch.zeros(1)), strict=True):
        storage = beside.expand_as(given["out"]).double().clone()
        part = values[..., rows, :]
        view(storage, tuple(part.shape), (*out.batch, out.m, out.n), out.offset).copy_(part)
        found.append(storage.numpy())
    return found[0], found[1]


def near(spec: GemmSpec, given: dict[str, torch.Tensor], got: torch.Tensor, c: float = 3.0,
         extra: float = 0.0) -> None:
    """Asserts |got - exact| ≤ c × the error of float32 accumulation, plus one rounding of the result and of
    each node before it (`extra` of them for the epilogue), plus what tensor cores may cut: each sum of 8
    products at 24 bits below its largest term."""
    exact, plain = reference(spec, given), reference(spec, given, float32=True)
    unit = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}[spec.out.dtype]
    cut = spec.k / 8 * 2**-23 * exact.abs().max()
    bound = c * (plain - exact).abs().max() + (1 + extra) * unit * exact.abs() + cut
    worst = ((got - exact).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound"
