"""Records what each kernel of a run reads and writes.

Protocol: `record_kernels(take)` calls `take(KernelRun)` after each kernel, in the order of each thread. A
captured graph runs kernel by kernel. An operand is hashed when it is read, for a program may change memory by
itself; one of more than `LARGE` bytes once, until a kernel or a copy writes its memory. Memory that was never
written is hashed as it lies: on a CPU and on the emulator the same at every run. Threads have the names that
they were given, numbered ones without their numbers. One recorder at a time.
"""
from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import HookError, ReplayError
from tinygrad_nv.numerics.replay.log import KernelRun, digest
from tinygrad_nv.numerics.verify.blame import ByMemory
from tinygrad_nv.numerics.verify.kernels import EachKernel, arguments
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.runtime.observe import ranges

NAME = "replay"         # of the hook: one at a time
LARGE = 1 << 20
Take = Callable[[KernelRun], None]


@contextmanager
def record_kernels(take: Take) -> Iterator[None]:
    """Tells `take` of each kernel inside. Raises `ReplayError` inside another."""
    try: hooks.add_execute(NAME, _Recorder(take).execute)
    except HookError as error:
        raise ReplayError("a run is recorded inside of one", "one at a time",
                          "end the outer one first") from error
    try:
        with ranges.track_layers(): yield
    finally: hooks.remove_execute(NAME)


class _Recorder(EachKernel):
    """Hashes what kernels read and write."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self.take, self.process, self.lock = take, os.getpid(), threading.Lock()
        self.known = ByMemory[str]()        # of large memory
        self.texts: dict[UOp, str] = {}

    @property
    def has_ended(self) -> bool: return os.getpid() != self.process     # a fork, that captures steps

    def kernel(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        places, copies = self.places(call), arguments(call, ctx)
        before = [tuple(self._hash(bufs[i]) for i, _ in places.operands) for bufs in copies]
        seconds = run(call, ctx)
        for bufs, read in zip(copies, before, strict=True):
            results = [bufs[i] for i, _ in places.results]
            self.other(results)
            written = tuple(map(self._hash, results))
            with self.lock: self.take(self._run(call, ctx, bufs[0].device, read, written))
        return seconds

    def other(self, written: list[Buffer]) -> None:
        for buffer in written:
            for base, places in list(self.known.bases.items()):
                if base is not buffer.base: continue
                for at, size in list(places):
                    if at < buffer.offset + buffer.nbytes and buffer.offset < at + size: del places[at, size]

    def _hash(self, buffer: Buffer) -> str:
        if (found := self.known.get(buffer)) is not None: return found
        made = digest(buffer.ensure_allocated().as_memoryview())
        if buffer.nbytes > LARGE: self.known.set(buffer, made)
        return made

    def _run(self, call: UOp, ctx: realize.ExecContext, device: str, read: tuple[str, ...],
             written: tuple[str, ...]) -> KernelRun:
        body = call.src[0]
        note = note_of(body)
        values = {name: int(value) for name, value in ctx.var_vals.items()
                  if any(each.expr == name for each in body.arg.vars)}
        return KernelRun(re.sub(r"[-_ ]?\d+(_\d+)?$", "", threading.current_thread().name),
                         ansistrip(body.src[0].arg.name), device, self._text(body), ranges.origin(call).layer,
                         "" if note is None else f"{note.template}: {note.reason}", values, read, written)

    def _text(self, body: UOp) -> str:
        if body not in self.texts:
            # a kernel of a bundle has no source
            found = {each.op: each.arg for each in body.src if each.op in (Ops.SOURCE, Ops.BINARY)}
            self.texts[body] = digest(found[Ops.SOURCE].encode() or found[Ops.BINARY])
        return self.texts[body]
