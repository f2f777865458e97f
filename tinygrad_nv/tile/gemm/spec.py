"""Specs of matmuls, in types: a matmul and its epilogue. A spec does not know its target.

Protocol: patterns make a spec from a subgraph, templates make a kernel from a spec and a schedule. Specs
are frozen and hashable; two kernels are the same when spec, schedule and architecture are. Extents, strides
and offsets are in elements of the tensor they belong to; sizes in bytes say so.

    out[b, m, n] = epilogue(sum_p[b, m, n])     sum_p[b, m, n] = Σ_k a[b, m, k] · b[b, n, k + p parts]

The batch has up to three dimensions, since strides of a broadcast or a transposed head need not collapse
into one; an operand that is the same for all of a dimension has stride 0 there.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import (
    Expression,
    Sum,
    loads,
    parameters,
    short,
    show,
    transpose,
    walk,
)

FLOAT16S = (dtypes.float16, dtypes.bfloat16)
FP8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)
INT8S = (dtypes.int8, dtypes.uint8)
OPERANDS = (*FLOAT16S, *FP8, *INT8S, dtypes.float32)
MOST_BATCH_DIMENSIONS = 3


@dataclass(frozen=True)
class Operand:
    """A matrix in memory: strides `mn` along the dimension it shares with the result, `k` along the one that
    is summed, `batch` between matrices; its first element `offset` after the beginning of its buffer."""
    dtype: DType
    mn: int
    k: int
    batch: tuple[int, ...] = ()
    offset: int = 0

    @property
    def major(self) -> Literal["K", "MN", ""]:
        """The dimension in which elements lie side by side; "" when there is none."""
        return "K" if self.k == 1 else "MN" if self.mn == 1 else ""

    @property
    def pitch(self) -> int:
        """The stride of the other dimension."""
        return self.mn if self.major == "K" else self.k

    @property
    def alignment_bytes(self) -> int:
        """The largest power of two, up to 16, that every row's address is a multiple of (a buffer aligned to
        16 bytes assumed)."""
        return min(16, *(_power_of_two(stride * self.dtype.itemsize)
                         for stride in (self.pitch, self.offset, *self.batch)))


def _power_of_two(nbytes: int) -> int: return nbytes & -nbytes if nbytes else 16


@dataclass(frozen=True)
class Result:
    """The result in memory: strides along rows and columns, and between matrices."""
    dtype: DType
    m: int
    n: int
    batch: tuple[int, ...] = ()
    offset: int = 0

    @property
    def major(self) -> Literal["N", "M", ""]:
        """The dimension in which elements lie side by side."""
        return "N" if self.n == 1 else "M" if self.m == 1 else ""

    def operand(self, rows: Literal["m", "n"]) -> Operand:
        """The same place as an operand whose rows are the result's along `rows`."""
        mn, k = (self.m, self.n) if rows == "m" else (self.n, self.m)
        return Operand(self.dtype, mn, k, self.batch, self.offset)


@dataclass(frozen=True)
class StoreTarget:
    """Description of a result for its store: where it lies, `m` rows and `n` columns in each matrix of the
    batch, and the epilogue that makes an element of sums. `symbolic`: `m` is the most rows there can be.
    Raises `SpecError` where elements overlap."""
    out: Result
    m: int
    n: int
    batch: tuple[int, ...]
    epilogue: Expression
    symbolic: bool = False

    def __post_init__(self) -> None:
        axes = ((self.out.m, self.m), (self.out.n, self.n), *zip(self.out.batch, self.batch, strict=True))
        strides, reach = sorted((stride, extent) for stride, extent in axes if extent > 1), 0
        for stride, extent in strides:
            if stride <= reach:
                raise SpecError(f"a result with strides {[s for s, _ in strides]} of extents "
                                f"{[e for _, e in strides]}", "elements that lie apart")
            reach += stride * (extent - 1)


@dataclass(frozen=True)
class GemmSpec:
    """A matmul. `parts` > 1: the right operand is several matrices, `part` elements apart, whose sums meet
    in the epilogue (`silu(gate) * up` of one weight). `symbolic`: `m` is the most rows there can be, how many
    there are is the kernel's last integer parameter. `tf32`: float32 operands may be cut to 10 bits of
    mantissa. An epilogue left out rounds the sum to the result's dtype. Raises `SpecError` for what cannot
    be."""
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out: Result
    batch: tuple[int, ...] = ()
    epilogue: Expression = field(default=Sum())
    parts: int = 1
    part: int = 0
    symbolic: bool = False
    tf32: bool = False

    def __post_init__(self) -> None:
        if self.epilogue == Sum():
            object.__setattr__(self, "epilogue", Sum(self.accumulate).cast(self.out.dtype))
        for name, extent in (("m", self.m), ("n", self.n), ("k", self.k), ("parts", self.parts),
                             *((f"batch[{i}]", extent) for i, extent in enumerate(self.batch))):
            if extent < 1:
                raise SpecError(f"{name}={extent}", "an extent ≥ 1", "leave empty matmuls to tinygrad")
        self._check_operands()
        self._check_result()

    def _check_operands(self) -> None:
        if self.a.dtype not in OPERANDS:
            raise SpecError(f"operands of {self.a.dtype}", f"one of {', '.join(short(d) for d in OPERANDS)}")
        same = self.a.dtype == self.b.dtype
        if not same and not any(self.a.dtype in kind and self.b.dtype in kind for kind in (FP8, INT8S)):
            raise SpecError(f"{self.a.dtype} times {self.b.dtype}", "one dtype for both operands", "cast one")
        if len(self.batch) > MOST_BATCH_DIMENSIONS:
            raise SpecError(f"{len(self.batch)} dimensions of batch", f"at most {MOST_BATCH_DIMENSIONS}")
        for name, strides in (("a", self.a.batch), ("b", self.b.batch), ("out", self.out.batch)):
            if len(strides) != len(self.batch):
                raise SpecError(f"{len(strides)} batch strides of {name}",
                                f"{len(self.batch)}, as the batch has")

    def _check_result(self) -> None:
        parameters(self.epilogue)
        if self.epilogue.dtype != self.out.dtype:
            raise SpecError(f"an epilogue of {self.epilogue.dtype}", f"the result's dtype, {self.out.dtype}",
                            "end it with a cast")
        for node in walk(self.epilogue):
            if isinstance(node, Sum) and (node.dtype != self.accumulate or node.part >= self.parts):
                raise SpecError(f"{node}", f"a sum of {self.accumulate}, of a part below {self.parts}")
        _ = self.store_target

    @cached_property
    def store_target(self) -> StoreTarget:
        """The result, for its store."""
        return StoreTarget(self.out, self.m, self.n, self.batch, self.epilogue, self.symbolic)

    @property
    def accumulate(self) -> DType:
        """The dtype of sums: float32, int32 for int8."""
        return dtypes.int32 if self.a.dtype in INT8S else dtypes.float32

    @property
    def matrices(self) -> int:
        """The number of matmuls."""
        return prod(self.batch)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.matrices * self.m * self.n * self.parts * self.k

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of the epilogue's parameters."""
        return parameters(self.epilogue)

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return (self.m,) if self.symbolic else ()

    @property
    def plain(self) -> bool:
        """Whether the epilogue only rounds."""
        return self.epilogue == Sum(self.accumulate).cast(self.out.dtype)

    def swap_operands(self) -> GemmSpec:
        """The same matmul by (b aᵀ)ᵀ: operands change places, rows of the result become columns. Only of
        one part and of fixed extents."""
        assert (self.parts, self.symbolic) == (1, False)
        return _swap_operands(self)

    def __str__(self) -> str:
        rows = f"{'≤' if self.symbolic else ''}{self.m}"
        extents = "x".join(map(str, (*self.batch, rows, self.n, self.k)))
        kinds = "*".join(dict.fromkeys(short(operand.dtype) for operand in (self.a, self.b)))
        majors = "".join({"K": "T" if side else "N", "MN": "N" if side else "T", "": "?"}[operand.major]
                         for side, operand in enumerate((self.a, self.b)))
        tf32, gate = "(tf32)" if self.tf32 else "", f", {self.parts} parts" if self.parts > 1 else ""
        ends = "" if self.plain else f", {show(self.epilogue)}"
        return f"{extents} {kinds}{tf32} {majors} → {short(self.out.dtype)}{gate}{ends}"


@lru_cache(1024)
def _swap_operands(spec: GemmSpec) -> GemmSpec:
    out = replace(spec.out, m=spec.out.n, n=spec.out.m)
    return replace(spec, m=spec.n, n=spec.m, a=spec.b, b=spec.a, out=out, epilogue=transpose(spec.epilogue))


def sizes(spec: GemmSpec) -> list[int]:
    """Bytes of the buffers that a kernel's pointers mean: out, a, b, x0, x1, …"""
    def reach(offset: int, *axes: tuple[int, int]) -> int:
        return offset + sum((extent - 1) * stride for extent, stride in axes) + 1
    def batch(strides: tuple[int, ...]) -> list[tuple[int, int]]:
        return [*zip(spec.batch, strides, strict=False)]
    out, a, b = spec.out, spec.a, spec.b
    made = [reach(out.offset, (spec.m, out.m), (spec.n, out.n), *batch(out.batch)) * out.dtype.itemsize,
            reach(a.offset, (spec.m, a.mn), (spec.k, a.k), *batch(a.batch)) * a.dtype.itemsize,
            reach(b.offset, (spec.n, b.mn), (spec.k, b.k), (spec.parts, spec.part), *batch(b.batch))
            * b.dtype.itemsize]
    extras = [0] * len(spec.parameters)
    for load in loads(spec.epilogue):
        nbytes = reach(load.offset, (spec.m, load.m), (spec.n, load.n), *batch(load.batch)) \
            * load.dtype.itemsize
        extras[load.parameter] = max(extras[load.parameter], nbytes)
    return made + extras
