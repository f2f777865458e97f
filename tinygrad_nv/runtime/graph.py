"""A TinyJit's captured batch as a graph of the driver.

Protocol: tinygrad's graph interface (`GraphRunner`). Each kernel is its fills and its launch, each of them a
node after those that it must not overtake, and after those that edges.py's `EdgeChain` puts it behind for
programmatic dependent launch; a replay updates the nodes whose work has changed, and launches.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.runtime.driver import Executable, Graph, Launch, Node, Triple, Work
from tinygrad_nv.runtime.edges import EdgeChain
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.runtime.program import NVProgram


class _KernelCall:
    """A kernel of a graph: what it was last given, and the nodes that this reached."""

    def __init__(self, program: NVProgram, words: Sequence[int], buffers: list[int], values: list[int],
                 grid: Triple, block: Triple) -> None:
        self.program, self.buffers, self.values = program, buffers, values
        self.grid, self.block = grid, block
        self.place = {word: k for k, word in enumerate(words)}  # which argument an argument of the call is
        self.works = self.make_works()
        self.nodes: list[Node] = []

    def make_works(self) -> list[Work]:
        """Returns fills, then the launch."""
        return self.program.works(self.buffers, self.values, self.grid, self.block)

    def update(self, executable: Executable) -> None:
        """Brings the nodes up to date: those whose work is not what it was."""
        works = self.make_works()
        for node, before, work in zip(self.nodes, self.works, works, strict=True):
            if work != before: executable.update(node, work)
        self.works = works


class NVGraph(GraphRunner):
    """A batch of a TinyJit as a graph of the driver. Inputs, variables and extents may change between
    replays: the nodes they reach are updated (and tensor maps over inputs made again), the others are left
    alone. `chain.counts` says which edges it got. With another access-policy window (l2.py) it is
    instantiated anew: nodes cannot change theirs."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        self.dev = self.runtimes[0].dev
        graph = self.dev.driver.graph()
        self.works: list[_KernelCall] = []
        self.after: list[list[Node]] = []
        self.window = self.dev.window
        self.chain = EdgeChain(self.dev.driver.properties.sm_count)
        for (_, ast, buffers, fixed), program in zip(self.calls, self.runtimes, strict=True):
            grid, block = ast.arg.launch_dims(dict.fromkeys(self.vars, 0))
            words, used = ast.arg.globals, [buffers[i] for i in ast.arg.globals]
            # built with every variable 0, a symbolic extent may be 0 too, and is replaced before it runs
            call = _KernelCall(program, words, [buffer._buf for buffer in used],
                         [fixed.get(v.expr, 0) for v in ast.arg.vars], _at_least_one(grid),
                         _at_least_one(block))
            written = [k for k, i in enumerate(words) if i in ast.arg.outs]
            for work, zeroed in zip(call.works, program.launch.zeroed, strict=False):
                self._add(graph, call, work, [used[zeroed.pointer]], [0])
            self._add(graph, call, call.works[-1], used, written, len(self.works) in self.launch_dims_replace)
            self.works.append(call)
        self.library_calls = [call for call in self.works if isinstance(call.works[-1], LibraryCall)]
        self.collectives = [work.given for call in self.works if isinstance(work := call.works[-1], Launch)
                            and work.given is not None]
        for program in self.runtimes:
            if program.launch.peers is not None: program.launch.peers.agree(self.dev.device)
        self.executable: Executable = self.dev.pool.retry_relieved(graph.instantiate, "a graph")

    def _add(self, graph: Graph, call: _KernelCall, work: Work, buffers: list[Any], written: list[int],
             symbolic: bool = False) -> None:
        """A node, after those that it must not overtake: a fill writes one buffer, so the launch follows
        it."""
        after = self._access_resources(buffers, written, len(self.chain.works))
        self.after.append([Node(before) for before in self.chain.add(work, after, symbolic)])
        call.nodes.append(graph.add(work, self.after[-1]))

    def _instantiate_again(self) -> None:
        self.window, graph = self.dev.window, self.dev.driver.graph()
        for call in self.works: call.works = call.make_works()
        works = [work for call in self.works for work in call.works]
        for work, after in zip(works, self.after, strict=True): graph.add(work, after)
        self.executable = self.dev.pool.retry_relieved(graph.instantiate, "a graph")

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int],
                 wait: bool = False) -> float | None:
        changed = {j for j, replaced in enumerate(self.uop_replace) if replaced}
        for j in changed:
            call = self.works[j]
            for position, slot in self.uop_replace[j]:
                if position not in call.place: continue
                buffer: Any = input_uops[slot].buffer
                call.buffers[call.place[position]] = buffer.ensure_allocated()._buf
        for j, i, value in self.updated_vars(var_vals):
            self.works[j].values[i] = value
            changed.add(j)
        for j, grid, block in self.updated_launch_dims(var_vals):
            self.works[j].grid, self.works[j].block = grid, block
            changed.add(j)
        if self.dev.window != self.window: self._instantiate_again()
        else:
            for j in changed: self.works[j].update(self.executable)
        return self.dev.submit_timed(self.replay, wait)

    def replay(self) -> None:
        """Launches it as it is."""
        for told in self.collectives: told(None, True)
        self.executable.launch()
        if not self.library_calls and not self.collectives: return
        self.dev.driver.record(done := self.dev.driver.event())
        for call in self.library_calls: cast(LibraryCall, call.works[-1]).given(done, True)
        for told in self.collectives: told(done, False)

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Kernels of one device; an input is an argument itself, not seen through a view."""
        if not GraphRunner.supports_uop(batch_devs, new_call): return False
        return not any(a.op is not Ops.PARAM and a.op_in_backward_slice_with_self(Ops.PARAM)
                       for a in new_call.src[1:] if not a.is_bound_var)


def _at_least_one(extents: tuple[int, ...]) -> Triple:
    x, y, z = (max(1, int(extent)) for extent in extents)
    return x, y, z
