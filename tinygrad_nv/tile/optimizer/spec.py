"""Specs of one launch over many tensors, in types. A spec does not know its target.

Protocol. An update (`AdamWSpec`) has tensors of any number of elements: parameter x, exp_avg m, exp_avg_sq v,
gradient g, and where parameters are of 16 bits float32 master weights w, of which x is a copy. All are read
once and written once, in place. What a step decides lies in memory, `control`, float32:

    control[0]              not 0: the step is taken; 0: nothing is written
    control[1]              what gradients are multiplied by
    control[2]              1 / √(1 − β₂ᵗ)
    control[3 + 2 i]        1 − lr λ of group i
    control[4 + 2 i]        lr / (1 − β₁ᵗ) of group i

    g' = control[1] g;  m ← m + (1 − β₁)(g' − m);  v ← β₂ v + (1 − β₂) g'²
    w ← w · decay − step · m / (√v · control[2] + eps);  x ← w rounded

`SquaresSpec` is the sum of squares of each `CHUNK` elements of each tensor, float32: chunks of a tensor
follow each other, and those of the next tensor come after them. A chunk's sum has one order of additions for
a template and instruction set, whatever the number of threads; partial sums are the caller's to add up.

Source: AdamW, arXiv 1711.05101; the formula is torch.optim.AdamW's.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

CHUNK = 1 << 14
HEAD, PER_GROUP = 3, 2      # numbers of `control` before those of groups, and of each group
FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


@dataclass(frozen=True)
class AdamWSpec:
    """`counts`: elements of each tensor, `groups`: the group of each. Parameters of 16 bits have masters."""
    counts: tuple[int, ...]
    groups: tuple[int, ...]
    beta1: float
    beta2: float
    eps: float
    dtype: DType = dtypes.float32
    grad: DType = dtypes.float32

    def __post_init__(self) -> None:
        _check(self.counts)
        if len(self.groups) != len(self.counts) or min(self.groups) < 0:
            raise SpecError(f"groups {self.groups} of {len(self.counts)} tensors", "a number from 0 for each")
        for dtype in (self.dtype, self.grad): _check_float(dtype)

    @property
    def master(self) -> bool:
        """Whether there are master weights."""
        return self.dtype != dtypes.float32

    @property
    def kinds(self) -> tuple[tuple[str, DType], ...]:
        """Names and dtypes of the buffers of each tensor, in the order of a kernel's pointers: those that are
        written, and the gradient."""
        f32 = dtypes.float32
        masters = (("w", f32),) if self.master else ()
        return ("x", self.dtype), ("m", f32), ("v", f32), *masters, ("g", self.grad)

    @property
    def control(self) -> int:
        """Numbers that a step decides."""
        return HEAD + PER_GROUP * (max(self.groups) + 1)

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written; a 16-bit parameter is written alone."""
        reads = sum(dtype.itemsize for name, dtype in self.kinds if not (self.master and name == "x"))
        writes = sum(dtype.itemsize for name, dtype in self.kinds if name != "g")
        return (reads + writes) * sum(self.counts)

    @property
    def flops(self) -> int:
        """Additions, multiplications, roots and quotients."""
        return 15 * sum(self.counts)

    def __str__(self) -> str:
        return (f"AdamW of {len(self.counts)} tensors, {sum(self.counts)} elements {short(self.dtype)}"
                f"{' with masters' if self.master else ''}, gradients {short(self.grad)}")


@dataclass(frozen=True)
class SquaresSpec:
    """Sums of squares of tensors of a dtype."""
    counts: tuple[int, ...]
    dtype: DType = dtypes.float32

    def __post_init__(self) -> None:
        _check(self.counts)
        _check_float(self.dtype)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of each tensor."""
        return tuple(-(-count // CHUNK) for count in self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(self.counts) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Additions and multiplications."""
        return 2 * sum(self.counts)

    def __str__(self) -> str:
        return f"squares of {len(self.counts)} tensors, {sum(self.counts)} elements {short(self.dtype)}"


def firsts(chunks: tuple[int, ...]) -> tuple[int, ...]:
    """The number of the first chunk of each tensor, and of all chunks."""
    return tuple(accumulate(chunks, initial=0))


def _check(counts: tuple[int, ...]) -> None:
    if not counts or min(counts) < 1: raise SpecError(f"tensors of {counts} elements", "one element at least")


def _check_float(dtype: DType) -> None:
    if dtype not in FLOATS: raise SpecError(f"numbers of {short(dtype)}", "a float of 16 or 32 bits")
