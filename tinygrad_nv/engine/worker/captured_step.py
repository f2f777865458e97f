"""A step as device graphs, captured once and launched without tinygrad.

Protocol: `CapturedStep(step, state, device)` is called like `step`, which takes and returns nothing and
assigns to tensors it closes over, among them those of `state()`. The first call captures it, as one graph
where the device has graphs, and runs it. Later calls launch that graph, in a tenth of TinyJit's time. TinyJit
launches instead when kernels are observed one by one (DEBUG, PROFILE, `hooks.add_execute`), or the device has
no graph for the whole step. After an exception, Ctrl-C included, the tensors of `state` are restored, and an
unfinished capture starts again. A step that `store` has by its `name` is not traced (step_store.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor, TinyJit, UOp
from tinygrad.engine import realize
from tinygrad.engine.jit import CapturedJit, GraphRunner
from tinygrad.helpers import DEBUG, PROFILE, Context
from tinygrad.uop.ops import Ops, buffers

from tinygrad_nv import hooks
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.graphs.capture import graph_obstacle
from tinygrad_nv.runtime.observe.ranges import span
from tinygrad_nv.runtime.programs import count_capture


class CapturedStep:
    """`step`, captured on its first call."""

    def __init__(self, step: Callable[[], None], state: Callable[[], Sequence[Tensor]], device: str,
                 store: StepStore | None = None, name: str = "") -> None:
        self.step, self.state, self.device, self.store, self.name = step, state, device, store, name
        self.jit: Any = None
        self.graphs: list[GraphRunner] = []     # the whole step, in order; empty if TinyJit launches it

    def __call__(self) -> None:
        if self.graphs and DEBUG < 2 and not PROFILE and not hooks.watched():
            with span("replay"):
                for graph in self.graphs: graph((), {})
            return
        state = self.state()
        before = [tensor.uop for tensor in state]
        try:
            if self.jit is None: self._capture()
            else: self.jit()
        except BaseException:
            # a pending assignment that did not run would become part of the next capture
            for tensor, uop in zip(state, before, strict=True): tensor.uop = uop
            raise

    def _capture(self) -> None:
        """TinyJit runs its first call eagerly, for functions with side effects on first use. These steps have
        none, and the eager run would schedule every kernel a second time (1.5 s of a 4 s start with the
        bundled model)."""
        kept = self.store.get(self.name) if self.store is not None else None
        if kept is None: jit: Any = self._captured()
        else:
            jit = type(TinyJit(self.step))(None, CapturedJit(None, kept, [], []))
            with span("stored step"): jit()
        self.jit, linear = jit, jit.captured.linear
        # TinyJit does not put a single kernel into a graph
        if len(linear.src) == 1 and not graph_obstacle(linear, self.device): linear = linear.replace(src=(
            UOp(Ops.CUSTOM_FUNCTION, src=(linear,), arg="graph").call(),))
        if all(call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph" for call in linear.src):
            self.graphs = [realize.get_graph_runtime(call.src[0], ()) for call in linear.src]

    def _captured(self) -> Any:
        existing = frozenset(buffers)
        count_capture()
        jit = TinyJit(self.step)
        jit.cnt = 1
        with span("capture"), Context(JIT_BATCH_SIZE=0): jit()  # 0: all kernels in one graph
        if self.store is not None: self.store.put(self.name, jit.captured.linear, existing)
        return jit
