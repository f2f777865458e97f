"""A step as graphs of the device, captured once and launched without tinygrad.

Protocol: `Captured(step, state, device)` calls like `step`, which takes nothing, returns nothing, and assigns
to tensors it closes over, among them those of `state()`. The first call captures it, as one graph where the
device has graphs, and runs it. Later ones launch that, in a tenth of the time that TinyJit takes to get
there; where kernels are looked at one by one (DEBUG, PROFILE, `hooks.add_execute`), or the device has no
graph for all of it, by TinyJit. After an exception, also Ctrl-C, the tensors of `state` are what they were to
tinygrad, and a capture that was not finished is begun again.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor, TinyJit, UOp
from tinygrad.engine import realize
from tinygrad.engine.jit import GraphRunner
from tinygrad.helpers import DEBUG, PROFILE, Context
from tinygrad.uop.ops import Ops

from tinygrad_nv import hooks
from tinygrad_nv.graphs.capture import obstacle
from tinygrad_nv.runtime.observe.ranges import span


class Captured:
    """`step`, captured on its first call."""

    def __init__(self, step: Callable[[], None], state: Callable[[], Sequence[Tensor]], device: str) -> None:
        self.step, self.state, self.device = step, state, device
        self.jit: Any = None
        self.graphs: list[GraphRunner] = []     # all of it, in order; none where TinyJit has to launch it

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
            # an assignment that was written down but not run would get into the next capture
            for tensor, uop in zip(state, before, strict=True): tensor.uop = uop
            raise

    def _capture(self) -> None:
        """TinyJit runs its first call eagerly, for functions that set something up; these set up nothing, and
        that run would schedule every kernel a second time (1.5 s of a 4 s start for the model in the box)."""
        jit = TinyJit(self.step)
        jit.cnt = 1
        with span("capture"), Context(JIT_BATCH_SIZE=0): jit()  # 0: as many kernels to a graph as there are
        self.jit, linear = jit, jit.captured.linear
        # TinyJit leaves a kernel by itself out of graphs
        if len(linear.src) == 1 and not obstacle(linear, self.device): linear = linear.replace(src=(
            UOp(Ops.CUSTOM_FUNCTION, src=(linear,), arg="graph").call(),))
        if all(call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph" for call in linear.src):
            self.graphs = [realize.get_graph_runtime(call.src[0], ()) for call in linear.src]
