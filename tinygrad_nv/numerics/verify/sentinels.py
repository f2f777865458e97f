"""`with sentinels():` stops at the first NaN or infinity that a kernel writes, forward or backward.

    with verify.sentinels(names=get_state_dict(model)): loss = step(batch)

Protocol. After each kernel what it wrote is scanned (scan.py), where it is of floats; a captured TinyJit runs
kernel by kernel, with the same arguments and results. The first number that is not finite raises
`NumericsError` with the `Finding` in words (blame.py): tensor, layer, kernel, operands with their ranges, and
what those were made of. With `stop=False` the run goes on, and `found.first` is the finding.

    names       the user's tensors by name, such as nn.state.get_state_dict(model)
    infinite    whether infinities count; masks of -inf that a program stores are infinities, too
    layers      whether layers are tracked (tinygrad_nv.layer); schedules are made anew meanwhile, so a
                program that is not captured runs slower. What was captured before has no layers

Memory that a kernel leaves as it was is none of its results: a buffer that is first seen as a result is
scanned before the kernel runs. Where it has such numbers already, a NaN with bits of its own (`Marked`)
stands in for them meanwhile, and what is still there afterwards was not written, and is put back; of a buffer
that the kernel also reads, only elements that it changed count.
One `sentinels` at a time. On a GPU each result is copied to the host.

`Marked(buffer, dtype, nan_only, mark)` is made before a kernel writes a buffer, `first_written()`
is called after it. With `mark`, what is not finite is replaced by a NaN of bits that no arithmetic gives, and
what is still there afterwards is put back as it was: the kernel did not write it. Without, which is for
buffers that the kernel reads, elements with other bits than before count as written.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad import Tensor
from tinygrad.device import Buffer
from tinygrad.dtype import DType, dtypes
from tinygrad.engine import realize
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import HookError, NumericsError
from tinygrad_nv.numerics.verify.blame import ByMemory, Finding, Write, Writes, values
from tinygrad_nv.numerics.verify.kernels import EachKernel, Places, arguments
from tinygrad_nv.numerics.verify.scan import first_bad, is_scanned
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile.expression import short

MARKS = {dtypes.float64: 0x7ffc5a5a5a5a5a5a, dtypes.float32: 0x7fda5a5a, dtypes.bfloat16: 0x7fda,
         dtypes.float16: 0x7e5a, dtypes.fp8e5m2: 0xfe, dtypes.fp8e4m3: 0xff}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NAME = "sentinels"      # of the hook: one at a time


class Marked:
    """A buffer before a kernel writes it."""

    def __init__(self, buffer: Buffer, dtype: DType, nan_only: bool, mark: bool) -> None:
        self.buffer, self.dtype, self.nan_only, self.marked = buffer, dtype, nan_only, mark
        self.before = self._bits()
        if not mark: return
        changed = self.before.copy()
        changed[self._bad()] = MARKS[dtype]
        self._put(changed)

    def first_written(self) -> int:
        """The place of the first number that the kernel wrote and that is not finite, -1 for none."""
        now, bad = self._bits(), self._bad()
        kept = now == (MARKS[self.dtype] if self.marked else self.before)
        if self.marked and (bad & kept).any(): self._put(np.where(bad & kept, self.before, now))
        found = np.flatnonzero(bad & ~kept)
        return int(found[0]) if len(found) else -1

    def _bits(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.buffer.as_memoryview(), BITS[self.dtype.itemsize]).copy()

    def _bad(self) -> npt.NDArray[np.bool_]:
        every = values(self.buffer, self.dtype)
        return np.isnan(every) if self.nan_only else ~np.isfinite(every)

    def _put(self, bits: npt.NDArray[Any]) -> None:
        raw = memoryview(bytearray(bits.tobytes()))
        self.buffer.copy_from(Buffer("PYTHON", self.buffer.size, self.buffer.dtype, opaque=raw))


@dataclass
class Found:
    """Findings of sentinels: the first finding, kernels that ran, elements that were scanned."""
    first: Finding | None = None
    kernels: int = 0
    elements: int = 0


@contextmanager
def sentinels(names: Mapping[str, Tensor] | None = None, infinite: bool = True, layers: bool = True,
              stop: bool = True) -> Iterator[Found]:
    """Checks what each kernel inside writes. Raises `NumericsError` at the first number that is not finite
    (unless `stop` is False), and inside another `sentinels`."""
    guard = _Guard(Found(), not infinite, stop, Writes(_names_by_memory(names or {})))
    try: hooks.add_execute(NAME, guard.execute)
    except HookError as error:
        raise NumericsError("sentinels inside sentinels", "one at a time",
                            "end the outer block first") from error
    try:
        with ExitStack() as stack:
            if layers: stack.enter_context(ranges.track_layers())
            yield guard.found
    finally: hooks.remove_execute(NAME)


def _names_by_memory(names: Mapping[str, Tensor]) -> ByMemory[str]:
    """Memory of tensors that lie in memory, on one device."""
    found = ByMemory[str]()
    for name, tensor in names.items():
        node = tensor.uop.base
        if node.op is Ops.BUFFER and isinstance(buffer := node.buffer, Buffer): found.set(buffer, name)
    return found


class _Guard(EachKernel):
    """Looks at what each kernel writes."""

    def __init__(self, found: Found, nan_only: bool, stop: bool, writes: Writes) -> None:
        super().__init__()
        self.found, self.nan_only, self.stop, self.writes = found, nan_only, stop, writes
        self.clean = ByMemory[bool]()       # memory without such numbers

    @property
    def has_ended(self) -> bool: return self.found.first is not None

    def kernel(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        places = self.places(call)
        floats = Places(tuple(each for each in places.results if is_scanned(each[1])), places.operands)
        copies = arguments(call, ctx)
        before = [self._before(bufs, floats) for bufs in copies]
        seconds = run(call, ctx)
        self.found.kernels += 1
        for bufs, kept in zip(copies, before, strict=True): self._after(call, bufs, floats, kept)
        return seconds

    def other(self, written: list[Buffer]) -> None:
        for buffer in written: self.clean.set(buffer, False)

    def _before(self, bufs: list[Buffer], places: Places) -> dict[int, Marked]:
        """Results that have such numbers before they are written, marked unless the kernel reads them."""
        kept, read = {}, {i for i, _ in places.operands}
        for i, dtype in places.results:
            if self.clean.get(bufs[i].ensure_allocated()): continue
            if first_bad(bufs[i], dtype, self.nan_only) >= 0:
                kept[i] = Marked(bufs[i], dtype, self.nan_only, i not in read)
        return kept

    def _after(self, call: UOp, bufs: list[Buffer], places: Places, kept: dict[int, Marked]) -> None:
        """Scans what was written, then remembers who wrote it."""
        origin = ranges.origin(call)
        write = self.writes.begin(ansistrip(call.src[0].arg.name), origin.layer, origin.op,
                                  [(bufs[i], dtype) for i, dtype in places.operands])
        for i, dtype in places.results:
            buffer = bufs[i]
            self.found.elements += buffer.nbytes // dtype.itemsize
            at = kept[i].first_written() if i in kept else first_bad(buffer, dtype, self.nan_only)
            if at < 0 and i not in kept: self.clean.set(buffer, True)
            if at >= 0: self._report(write, buffer, dtype, at)
            if self.found.first is not None: return
            self.writes.last.set(buffer, write)

    def _report(self, write: Write, buffer: Buffer, dtype: DType, at: int) -> None:
        every = values(buffer, dtype)
        tensor = self.writes.names.get(buffer) or f"a tensor of {len(every)} {short(dtype)}"
        operands = tuple(operand for operand, _ in self.writes.there(write))
        self.found.first = Finding(float(every[at]), at, tensor, write.kernel, write.layer, write.op,
                                   operands, tuple(self.writes.upstream(write)))
        if self.stop:
            raise NumericsError(str(self.found.first), "finite numbers", "look at the operand of the largest "
                                "magnitude first; sentinels(infinite=False) lets infinities pass")
