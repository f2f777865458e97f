"""Operands that made a number that is not finite, and what they were made of.

Protocol: `Writes` keeps who wrote each buffer last, as records that name their operands' records: a chain
upstream. `Finding` says what was found: the tensor, the kernel that wrote it, its layer and operation, and of
each operand its range as it lies in memory at that moment. Of operands further upstream the range is told
where nothing has been written over them since. The first kernel whose result is not finite has operands that
are, or one that no kernel wrote: a weight, or what was loaded.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt
from tinygrad.device import Buffer
from tinygrad.dtype import DType

from tinygrad_nv.numerics.semantics.formats import FORMATS, decode
from tinygrad_nv.numerics.verify.scan import is_scanned
from tinygrad_nv.tile.expression import short

UPSTREAM = 6        # kernels that are followed
KEPT = 4096         # kernels whose operands are remembered
Value = TypeVar("Value")


class ByMemory(Generic[Value]):
    """Values of buffers, as long as their memory is there: of a base, a first byte and a number of bytes."""

    def __init__(self) -> None: self.bases: WeakKeyDictionary[Buffer, dict[tuple[int, int], Value]] = \
        WeakKeyDictionary()

    def get(self, buffer: Buffer) -> Value | None:
        """The value of exactly this memory."""
        return self.bases.get(buffer.base, {}).get((buffer.offset, buffer.nbytes))

    def set(self, buffer: Buffer, value: Value) -> None:
        """Gives this memory a value."""
        self.bases.setdefault(buffer.base, {})[buffer.offset, buffer.nbytes] = value

    def overlapping(self, buffer: Buffer) -> Iterator[Value]:
        """Values of memory that has bytes of this."""
        first, end = buffer.offset, buffer.offset + buffer.nbytes
        for (at, size), value in self.bases.get(buffer.base, {}).items():
            if at < end and first < at + size: yield value


@dataclass(eq=False)
class Write:
    """One kernel's writing of one buffer. `operands` are those it read: memory, and who had written it."""
    number: int
    kernel: str
    layer: str
    op: str
    operands: list[tuple[ReferenceType[Buffer], DType, Write | None]]

    def __str__(self) -> str:
        where = ", ".join([*([self.op] if self.op else []), *([f"layer {self.layer}"] if self.layer else [])])
        return f"{self.kernel} ({where})" if where else self.kernel


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel read: a name, or who wrote it; its range without what is not finite, and how
    much of it is not. `least` is None of integers."""
    name: str
    dtype: DType
    elements: int
    least: float | None = None
    most: float | None = None
    bad: int = 0

    def __str__(self) -> str:
        told = f"{self.name}: {short(self.dtype)}, {self.elements} elements"
        if self.least is not None: told += f", {self.least:.4g} … {self.most:.4g}"
        return told + (f", {self.bad} of them not finite" if self.bad else "")


@dataclass(frozen=True)
class Finding:
    """The first number that was not finite. `upstream` goes from the operand of the largest magnitude to
    what that was made of, and so on."""
    value: float
    element: int
    tensor: str
    kernel: str
    layer: str
    op: str
    operands: tuple[Operand, ...]
    upstream: tuple[Operand, ...]

    @property
    def what(self) -> str:
        """NaN or infinity."""
        return "NaN" if self.value != self.value else "infinity" if self.value > 0 else "-infinity"

    @property
    def cause(self) -> str:
        """Place to look first."""
        bad = [each for each in self.operands if each.bad]
        if bad: return f"{bad[0].name} had {bad[0].bad} of {bad[0].elements} that are not finite"
        return "its operands were finite"

    def __str__(self) -> str:
        where = ", ".join([*([self.op] if self.op else []), *([f"layer {self.layer}"] if self.layer else [])])
        lines = [f"{self.what} in element {self.element} of {self.tensor}, written by {self.kernel}"
                 + (f" ({where})" if where else "") + f"; {self.cause}"]
        lines += [f"  operand   {each}" for each in self.operands]
        lines += [f"  upstream  {each}" for each in self.upstream]
        return "\n".join(lines)


@dataclass
class Writes:
    """The kernel that wrote each piece of memory. `names` are those of tensors that the user knows."""
    names: ByMemory[str] = field(default_factory=ByMemory)
    last: ByMemory[Write] = field(default_factory=ByMemory)
    kept: deque[Write] = field(default_factory=deque)
    count: int = 0

    def begin(self, kernel: str, layer: str, op: str, read: list[tuple[Buffer, DType]]) -> Write:
        """The record of a kernel that has run."""
        self.count += 1
        operands = [(ref(buffer), dtype, self.last.get(buffer)) for buffer, dtype in read]
        made = Write(self.count, kernel, layer, op, operands)
        self.kept.append(made)
        if len(self.kept) > KEPT: self.kept.popleft().operands = []
        return made

    def name(self, buffer: Buffer, write: Write | None) -> str:
        """A tensor in words."""
        if (known := self.names.get(buffer)) is not None: return known
        return "what was loaded" if write is None else f"result of {write}"

    def operand(self, buffer: Buffer, dtype: DType, write: Write | None) -> Operand:
        """A buffer as it lies in memory."""
        count = buffer.nbytes // dtype.itemsize
        name = self.name(buffer, write)
        if not is_scanned(dtype): return Operand(name, dtype, count)
        least, most, bad = extent(buffer, dtype)
        return Operand(name, dtype, count, least, most, bad)

    def upstream(self, write: Write) -> Iterator[Operand]:
        """From a kernel's largest operand on, what it was made of."""
        for _ in range(UPSTREAM):
            known = [(operand, source) for operand, source in self.there(write) if source is not None]
            if not known: return
            source = max(known, key=lambda each: _size(each[0]))[1]
            inner = [operand for operand, _ in self.there(source) if is_scanned(operand.dtype)]
            if not inner: return
            yield max(inner, key=_size)
            write = source

    def there(self, write: Write) -> Iterator[tuple[Operand, Write | None]]:
        """Operands of a kernel whose memory is as it read it, and who had written them."""
        for weak, dtype, source in write.operands:
            buffer, number = weak(), 0 if source is None else source.number
            if buffer is None or not buffer.is_initialized(): continue
            if any(each.number > number for each in self.last.overlapping(buffer)): continue
            yield self.operand(buffer, dtype, source), source


def values(buffer: Buffer, dtype: DType) -> npt.NDArray[np.float64]:
    """Elements as a float64 array."""
    raw = np.frombuffer(buffer.as_memoryview(), np.uint8)
    if dtype.itemsize == 8: return raw.view(np.float64)
    of = FORMATS[short(dtype)]
    return decode(raw.view(of.kind), of)


def extent(buffer: Buffer, dtype: DType) -> tuple[float | None, float | None, int]:
    """The least and the largest finite element, and how many are not."""
    every = values(buffer, dtype)
    finite = every[np.isfinite(every)]
    if not len(finite): return None, None, len(every)
    return float(finite.min()), float(finite.max()), len(every) - len(finite)


def _size(of: Operand) -> float:
    if of.bad: return float("inf")
    return -1.0 if of.least is None or of.most is None else max(abs(of.least), abs(of.most))
