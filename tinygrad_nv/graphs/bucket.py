"""The graph of one size, and the memory that all sizes share.

Protocol: a `Bucket` is empty, compiled (it has a recipe) or built (it has a graph over the arena as that is).
`drop` leaves it compiled. An `Arena` changes its addresses only in `resize`, and only when nothing is built.
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
from tinygrad_nv.graphs.capture import Recipe, realize_assigned
from tinygrad_nv.graphs.inputs import region
from tinygrad_nv.graphs.stats import BucketStats, Counts
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Executable, Node, Stream, Work
from tinygrad_nv.runtime.graph import NVGraph

# A Tensor made of another one's method takes 2 µs; the constructor, which looks at what it is given, 7.
_BLANK = Tensor(0.0, device="CPU")


class Arena:
    """Two regions: intermediates, which no graph carries from one launch to the next, and outputs, which the
    next launch overwrites."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.intermediates: Buffer | None = None
        self.outputs: Buffer | None = None

    @property
    def nbytes(self) -> int: return self.intermediates.nbytes if self.intermediates else 0

    @property
    def output_bytes(self) -> int: return self.outputs.nbytes if self.outputs else 0

    def fits(self, recipe: Recipe) -> bool:
        """Whether a graph can be built in it as it is."""
        return self.nbytes >= recipe.arena_bytes and self.output_bytes >= recipe.output_bytes

    def resize(self, nbytes: int, output_bytes: int) -> None:
        """New regions where they are of another size; the old ones go first, so that there is room."""
        if nbytes != self.nbytes:
            self.intermediates = None
            if nbytes: self.intermediates = region(self.device, nbytes)
        if output_bytes != self.output_bytes:
            self.outputs = None
            if output_bytes: self.outputs = region(self.device, output_bytes)


class _Counted(Executable):
    """An executable that counts the nodes it was told to change."""

    def __init__(self, executable: Executable, counts: Counts) -> None:
        self.executable, self.counts = executable, counts
        self.launch = executable.launch  # type: ignore[method-assign]  # a steady step goes straight there

    def update(self, node: Node, work: Work) -> None:
        self.counts.updates += 1
        self.executable.update(node, work)

    def launch(self, stream: Stream | None = None) -> None: raise AssertionError("replaced above")


class Bucket:
    """One size of a pool."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.counts = Counts()
        self.recipe: Recipe | None = None
        self.given_up = ""          # why calls of this size run the step as it is written
        self.again = math.inf       # number of eager calls at which that is tried again
        self.shape: Any = None      # what the step returned, for its containers
        self.used = 0               # when, in calls of the pool
        self.graph_bytes = 0        # as last measured
        self.drop()

    def drop(self) -> bool:
        """Gives the graph back to the driver; whether there was one."""
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
        """Instantiates the graph; what the driver takes for it is measured."""
        assert self.recipe is not None
        begun = time.perf_counter()
        linear = self.recipe.placed(arena.intermediates, arena.outputs)
        opened = Device[self.device]
        for each in linear.src:
            for argument in realize.get_call_arg_uops(each):
                if isinstance(buffer := argument.buffer, Buffer): buffer.ensure_allocated()
            if each.src[0].op is Ops.PROGRAM and each.device == self.device:
                realize.get_runtime(self.device, each.src[0])
        free = opened.driver.memory()[0] if isinstance(opened, NVDevice) else 0
        try:
            self.replay = self._graphed(linear)
            for each in self.replay.src:
                if _is_graph(each.src[0]): realize.get_graph_runtime(each.src[0], ())
        except BaseException:
            self.drop()
            raise
        if isinstance(opened, NVDevice): self.graph_bytes = max(0, free - opened.driver.memory()[0])
        if not self.recipe.obstacle:
            runner = realize.get_graph_runtime(self.replay.src[0].src[0])
            if isinstance(runner, NVGraph):
                runner.executable = _Counted(runner.executable, self.counts)
                self.graph = runner
        self.values = None if self.recipe.variables else {}
        self.outputs = arena.outputs
        self.counts.builds += 1
        self.counts.capture_s += time.perf_counter() - begun

    def stale(self) -> bool:
        """Whether the graph keeps other memory in L2 than the device does now: nodes cannot change that."""
        return self.graph is not None and self.graph.window != self.graph.dev.window

    def _graphed(self, linear: UOp) -> UOp:
        """All launches as one graph, or graphs with what they cannot hold between them."""
        assert self.recipe is not None
        if self.recipe.obstacle: return linear if JIT != 1 else graph_split_rewrite(linear)
        return linear.replace(src=(UOp(Ops.CUSTOM_FUNCTION, src=(linear,), arg="graph").call(),))

    def launch(self, values: dict[str, int]) -> None:
        """One run of the step, with these values of the variables."""
        assert self.replay is not None
        if self.graph is None or DEBUG >= 2 or PROFILE or hooks.watched():
            self.values = None  # nodes are updated there
            realize.run_linear(self.replay, values, jit=True)
            return
        if values == self.values: self.graph.executable.launch()
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
            assert self.recipe is not None
            assert self.outputs is not None
            views = self.views[rows] = [each.tensor(self.outputs, rows) for each in self.recipe.outputs]
        return [_BLANK._apply_uop(lambda _, view=view: view) for view in views]

    def check_state(self) -> None:
        """Raises `GraphError` where a Tensor that the graph uses is not what it was. One that has been
        assigned to, and not yet realized, is realized; one that is gone was a passing view, if another one
        has its memory."""
        if self.recipe is None or self.recipe.unchanged(): return
        realize_assigned(tensor for ref, _ in self.recipe.state if (tensor := ref()) is not None)
        now = [(ref, uop, ref()) for ref, uop in self.recipe.state]
        there = {tensor.uop.base for _, _, tensor in now if tensor is not None}
        for _, uop, tensor in now:
            if tensor is None and uop.base in there: continue
            if tensor is not None and tensor.uop.base is uop.base: continue
            raise GraphError(
                f"a Tensor of shape {tuple(uop.shape)} that the step uses has been replaced since size "
                f"{self.size} was captured", "weights and caches that stay, or are assigned to in place",
                "use .assign(), or have the step captured again: pool.reset()")
        left = tuple((ref, tensor.uop) for ref, _, tensor in now if tensor is not None)
        self.recipe = replace(self.recipe, state=left)

    def stats(self) -> BucketStats:
        """What happened, and what it needs."""
        counts, recipe = self.counts, self.recipe
        return BucketStats(self.size, counts.hits, counts.captures, counts.builds, counts.capture_s,
                           counts.rows, counts.padding, counts.updates, counts.evictions, counts.eager,
                           tuple(counts.reasons), recipe.arena_bytes if recipe else 0,
                           recipe.output_bytes if recipe else 0,
                           0 if self.replay is None else self.graph_bytes)


def _is_graph(body: UOp) -> bool: return body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"
