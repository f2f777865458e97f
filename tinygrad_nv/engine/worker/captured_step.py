"""A step as device graphs, captured once and launched without tinygrad.

Protocol: `CapturedStep(step, state, device)` is called like `step`, which takes and returns nothing and
assigns to tensors it closes over, among them those of `state()`. `prepare` captures it, as one graph where
the device has graphs, without running it; the first call does so, too. Calls launch that graph, in a tenth
of TinyJit's time. TinyJit
launches instead when kernels are observed one by one (DEBUG, PROFILE, `hooks.add_execute`), or the device has
no graph for the whole step. After an exception, Ctrl-C included, the tensors of `state` are restored, and an
unfinished capture starts again. A step that `store` has by its `name` is not traced (step_store.py).
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinygrad import Tensor, TinyJit, UOp
from tinygrad.engine import realize
from tinygrad.engine.jit import CapturedJit, GraphRunner, jit_lower
from tinygrad.helpers import DEBUG, PROFILE, Context, disable_gc
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import Ops, buffers

from tinygrad_nv import hooks
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.graphs.capture import ScheduleRecorder, graph_obstacle
from tinygrad_nv.runtime.observe.ranges import span
from tinygrad_nv.runtime.programs import count_capture


class CapturedStep:
    """`step`, captured by `prepare` or on its first call."""

    def __init__(self, step: Callable[[], None], state: Callable[[], Sequence[Tensor]], device: str,
                 store: StepStore | None = None, name: str = "") -> None:
        self.step, self.state, self.device, self.store, self.name = step, state, device, store, name
        self.jit: Any = None
        self.graphs: list[GraphRunner] = []     # the whole step, in order; empty if TinyJit launches it

    def __call__(self) -> None:
        if self.graphs and DEBUG < 2 and not PROFILE and not hooks.is_watched():
            with span("replay"):
                for graph in self.graphs: graph((), {})
            return
        self.prepare()
        with self._restore_on_error(): self.jit()

    def prepare(self) -> None:
        """Captures the step, and loads its kernels, but does not run it."""
        if self.jit is not None: return
        kept = self.store.get(self.name) if self.store is not None else None
        if kept is None:
            with self._restore_on_error(): kept = self._capture()
        self.jit = type(TinyJit(self.step))(None, CapturedJit(None, kept, [], []))
        linear = self.jit.captured.linear
        # TinyJit does not put a single kernel into a graph
        if len(linear.src) == 1 and not graph_obstacle(linear, self.device): linear = linear.replace(src=(
            UOp(Ops.CUSTOM_FUNCTION, src=(linear,), arg="graph").call(),))
        if all(call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph" for call in linear.src):
            with contextlib.nullcontext() if self.store is None else self.store.loading(self.name):
                self.graphs = [realize.get_graph_runtime(call.src[0], ()) for call in linear.src]

    def _capture(self) -> UOp:
        """Captures the schedule of the step. (TinyJit's own capture also runs it, after an eager first call,
        for functions with side effects on first use. These steps have none, and running each of a large
        model's takes longer than to capture it.)"""
        existing = frozenset(buffers)
        count_capture()
        with span("capture"), disable_gc(), Context(JIT_BATCH_SIZE=0):     # 0: all kernels in one graph
            if realize.capturing: raise RuntimeError("a step is captured while another is")
            with ScheduleRecorder() as made: self.step()
            held = set(buffers) | {u for ref in list(all_tensors) if (tensor := ref()) is not None
                                   for u in tensor.uop.toposort() if u.op is Ops.BUFFER}
            linear = jit_lower(made.linear, held, [])
        # the next start tries a kernel again that did not build: the compiler may have been out of memory
        if self.store is not None:
            from tinygrad_nv.patterns.program import refused
            if not refused: self.store.put(self.name, linear, existing)
        return linear

    @contextlib.contextmanager
    def _restore_on_error(self) -> Iterator[None]:
        """Restores the state after an exception: a pending assignment that did not run would become part of
        the next capture."""
        state = self.state()
        before = [tensor.uop for tensor in state]
        try: yield
        except BaseException:
            for tensor, uop in zip(state, before, strict=True): tensor.uop = uop
            raise
