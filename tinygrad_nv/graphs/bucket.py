"""The graph of one batch size, and the memory that all sizes share.

Protocol: a `Bucket` is empty, compiled (it has a compiled step) or built (it has a graph over the current
arena). `drop` leaves it compiled. An `Arena` changes its addresses only in `resize`, and only when nothing is
built.
"""
from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from tinygrad import Device, Tensor, UOp
from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.engine.jit import graph_split_rewrite
from tinygrad.helpers import DEBUG, JIT, PROFILE, GlobalCounters
from tinygrad.uop.ops import Ops, sym_infer

from tinygrad_nv import hooks
from tinygrad_nv.errors import GraphError
from tinygrad_nv.graphs.capture import CompiledStep, realize_assigned
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.graphs.stats import BucketStats, SizeCounts
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Executable, Node, Stream, Work
from tinygrad_nv.runtime.graph import NVGraph

# A Tensor created by another one's method takes 2 µs; the constructor, which inspects its argument, 7.
_BLANK = Tensor(0.0, device="CPU")


class Arena:
    """Two regions: intermediates, which no graph keeps from one launch to the next, and outputs, which the
    next launch overwrites."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.intermediates: Buffer | None = None
        self.outputs: Buffer | None = None

    @property
    def nbytes(self) -> int: return self.intermediates.nbytes if self.intermediates else 0

    @property
    def output_bytes(self) -> int: return self.outputs.nbytes if self.outputs else 0

    def fits(self, compiled: CompiledStep) -> bool:
        """Whether a graph can be built in the arena without resizing it."""
        return self.nbytes >= compiled.arena_bytes and self.output_bytes >= compiled.output_bytes

    def resize(self, nbytes: int, output_bytes: int) -> None:
        """Allocates new regions where the size changes; the old ones are freed first, to make room."""
        if nbytes != self.nbytes:
            self.intermediates = None
            if nbytes: self.intermediates = region(self.device, nbytes)
        if output_bytes != self.output_bytes:
            self.outputs = None
            if output_bytes: self.outputs = region(self.device, output_bytes)


class _Counted(Executable):
    """An executable that counts node updates."""

    def __init__(self, executable: Executable, counts: SizeCounts) -> None:
        self.executable, self.counts = executable, counts
        self.launch = executable.launch  # type: ignore[method-assign]  # steady steps launch without a Python frame in between

    def update(self, node: Node, work: Work) -> None:
        self.counts.updates += 1
        self.executable.update(node, work)

    def launch(self, stream: Stream | None = None) -> None: raise AssertionError("replaced above")


class Bucket:
    """One batch size of a pool."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.counts = SizeCounts()
        self.compiled: CompiledStep | None = None
        self.eager_reason = ""          # why calls of this size run eagerly
        self.retry_at = math.inf       # number of eager calls after which a capture is tried again
        self.shape: Any = None      # the step's return value, for its containers
        self.used = 0               # last use, in calls of the pool
        self.graph_bytes = 0        # last measured
        self.drop()

    def drop(self) -> bool:
        """Frees the graph. Returns whether there was one."""
        built = getattr(self, "replay", None)
        if built is not None:
            for each in built.src: realize.graph_cache.pop(each.src[0], None)
        self.replay: UOp | None = None
        self.graph: NVGraph | None = None
        self.values: dict[str, int] | None = None
        self.views: dict[int, list[UOp]] = {}
        self.outputs: Buffer | None = None
        return built is not None

    def build(self, arena: Arena) -> None:
        """Instantiates the graph, and measures the memory that the driver takes for it."""
        assert self.compiled is not None
        begun = time.perf_counter()
        linear = self.compiled.bind_memory(arena.intermediates, arena.outputs)
        opened = Device[self.device]
        for each in linear.src:
            for argument in realize.get_call_arg_uops(each):
                if isinstance(buffer := argument.buffer, Buffer): buffer.ensure_allocated()
            if each.src[0].op is Ops.PROGRAM and each.device == self.device:
                realize.get_runtime(self.device, each.src[0])
        free = opened.driver.memory()[0] if isinstance(opened, NVDevice) else 0
        try:
            self.replay = self._split_into_graphs(linear)
            for each in self.replay.src:
                if _is_graph(each.src[0]): realize.get_graph_runtime(each.src[0], ())
        except BaseException:
            self.drop()
            raise
        if isinstance(opened, NVDevice): self.graph_bytes = max(0, free - opened.driver.memory()[0])
        if not self.compiled.graph_obstacle:
            runner = realize.get_graph_runtime(self.replay.src[0].src[0])
            if isinstance(runner, NVGraph):
                runner.executable = _Counted(runner.executable, self.counts)
                self.graph = runner
        self.values = None if self.compiled.variables else {}
        self.outputs = arena.outputs
        self.counts.builds += 1
        self.counts.capture_s += time.perf_counter() - begun

    def stale(self) -> bool:
        """Whether the graph's L2 access-policy window differs from the device's: node updates cannot change
        it."""
        return self.graph is not None and self.graph.window != self.graph.dev.window

    def _split_into_graphs(self, linear: UOp) -> UOp:
        """Returns all launches as one graph, or as several graphs with the launches that graphs cannot hold
        between them."""
        assert self.compiled is not None
        if self.compiled.graph_obstacle: return linear if JIT != 1 else graph_split_rewrite(linear)
        return linear.replace(src=(UOp(Ops.CUSTOM_FUNCTION, src=(linear,), arg="graph").call(),))

    def launch(self, values: dict[str, int]) -> None:
        """Runs the step once, with these values of the variables."""
        assert self.replay is not None
        if self.graph is None or DEBUG >= 2 or PROFILE or hooks.is_watched():
            self.values = None  # it updates nodes
            realize.run_linear(self.replay, values, jit=True)
            return
        if values == self.values: self.graph.replay()
        else:
            self.graph((), values)
            self.values = values
        estimates = self.graph.estimates
        GlobalCounters.kernel_count += 1
        GlobalCounters.global_ops += sym_infer(estimates.ops, values)
        GlobalCounters.global_mem += sym_infer(estimates.mem, values)

    def results(self, rows: int) -> list[Tensor]:
        """The first rows of the outputs."""
        if (views := self.views.get(rows)) is None:
            assert self.compiled is not None
            assert self.outputs is not None
            views = self.views[rows] = [each.tensor(self.outputs, rows) for each in self.compiled.outputs]
        return [_BLANK._apply_uop(lambda _, view=view: view) for view in views]

    def check_state(self) -> None:
        """Raises `GraphError` if a Tensor that the graph uses was replaced. Pending assignments to it are
        realized. A Tensor that was garbage-collected is ignored if another one has its memory: it was a
        temporary view."""
        if self.compiled is None or self.compiled.is_unchanged(): return
        realize_assigned(tensor for ref, _ in self.compiled.state if (tensor := ref()) is not None)
        now = [(ref, uop, ref()) for ref, uop in self.compiled.state]
        there = {tensor.uop.base for _, _, tensor in now if tensor is not None}
        for _, uop, tensor in now:
            if tensor is None and uop.base in there: continue
            if tensor is not None and tensor.uop.base is uop.base: continue
            raise GraphError(
                f"a Tensor of shape {tuple(uop.shape)} that the step uses has been replaced since size "
                f"{self.size} was captured", "weights and caches that are kept, or assigned to in place",
                "use .assign(), or capture the step again: pool.reset()")
        state_now = tuple((ref, tensor.uop) for ref, _, tensor in now if tensor is not None)
        self.compiled = replace(self.compiled, state=state_now)

    def stats(self) -> BucketStats:
        """Counts so far, and memory."""
        counts, compiled = self.counts, self.compiled
        return BucketStats(self.size, counts.hits, counts.captures, counts.builds, counts.capture_s,
                           counts.rows, counts.padding, counts.updates, counts.evictions, counts.eager,
                           tuple(counts.reasons), compiled.arena_bytes if compiled else 0,
                           compiled.output_bytes if compiled else 0,
                           0 if self.replay is None else self.graph_bytes)


def _is_graph(body: UOp) -> bool: return body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"
