"""Launches on the CPU whose buffers are placed at other addresses in each run.

Protocol: `compile_launches(linear)` compiles their kernels. `Launches(linear, recorded, bound)` puts
parameters in place of the buffers `recorded` of compiled launches, and plans the memory of the others.
`bound` are buffers of the same kinds, over memory that is not tinygrad's. Bind all parameters before the
first `run()`, and later those whose addresses change.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.device import Device
from tinygrad.engine import realize
from tinygrad.helpers import BEAM, getenv
from tinygrad.schedule.memory import memory_plan_rewrite
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.graphs.capture import graph_obstacle
from tinygrad_nv.graphs.kept_buffers import all_buffers, buffers_of, live_tensors
from tinygrad_nv.progress import bar

CHUNK = 16      # kernels that are compiled between two steps of the progress bar


def compile_launches(linear: UOp) -> UOp:
    """The launches with their kernels compiled, under a progress bar."""
    calls, beam = list[UOp](), getenv("JITBEAM", BEAM.value)
    with bar("compiling kernels") as progress:
        for first in range(0, len(linear.src), CHUNK):
            progress(first, len(linear.src))
            part = linear.replace(src=linear.src[first:first + CHUNK])
            calls += realize.compile_linear(part, beam=beam).src
    return linear.replace(src=tuple(calls))


class Launches:
    """Launches over parameters: one call into C where they can be a graph. `addresses`: where those are."""

    def __init__(self, linear: UOp, recorded: Sequence[UOp], bound: Sequence[UOp]) -> None:
        places = {u: UOp.param(i, u.dtype, u.shape, u.device) for i, u in enumerate(recorded)}
        held = all_buffers() | buffers_of(tensor.uop for _, tensor in live_tensors())
        self.linear = memory_plan_rewrite(linear.substitute(places, walk=True), held)
        self.bound, self.addresses = tuple(bound), [-1] * len(bound)
        self.graph: Any = None
        if self.linear.src and not graph_obstacle(self.linear, "CPU"):
            whole = UOp(Ops.CUSTOM_FUNCTION, src=(self.linear,), arg="graph")
            self.graph = Device["CPU"].graph(whole, input_uops=self.bound)

    def bind(self, place: int, address: int) -> None:
        """Places a parameter at an address."""
        self.addresses[place] = address
        if self.graph is not None: self.graph.bind(place, address)
        else: self.bound[place].buffer.ensure_allocated()._buf.va_addr = address

    def run(self) -> None:
        """Runs the launches with the parameters where they are."""
        if self.graph is not None: self.graph.replay()
        elif self.linear.src:
            realize.run_linear(self.linear, input_uops=self.bound, jit=True)
            Device["CPU"].synchronize()
