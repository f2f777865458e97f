"""Graphs with programmatic dependent launch: what TinyJit captures gives numpy's answers, bit for bit, on a
device that finds what is not ordered; how many edges are programmatic; and NV_PDL=0."""
from __future__ import annotations

import random

import numpy as np
import pytest
from tinygrad.engine.realize import graph_cache
from tinygrad.uop.ops import Ops

from tests.support.patterns.on_emu import emu, equal  # noqa: F401
from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions
from tinygrad_nv.runtime.edges import EdgeChain, EdgeCounts
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.tile.launch import LaunchConfig

SIDE, INPUTS, STEPS = 16, 3, 9


def graphs(jit: TinyJit) -> list[NVGraph]:
    """The graphs a captured function replays."""
    assert jit.captured is not None
    bodies = [call.src[0] for call in jit.captured.linear.src]
    return [graph_cache[body] for body in bodies if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"]


def plan(seed: int) -> list[tuple[str, int, int]]:
    """What each step computes, of which values before it: small integers in float16."""
    choose = random.Random(seed)
    return [(choose.choice(["matmul", "matmul", "add", "less", "relu", "rows"]),
             choose.randrange(INPUTS + i), choose.randrange(INPUTS + i)) for i in range(STEPS)]


def steps(given: tuple, of: list[tuple[str, int, int]], clip, keep) -> list:
    """The values of a plan, by tinygrad or by numpy."""
    values = list(given)
    for what, i, j in of:
        x, y = values[i], values[j]
        made = {"matmul": lambda x=x, y=y: x @ y, "add": lambda x=x, y=y: x + y,
                "less": lambda x=x, y=y: x - 2 * y, "relu": lambda x=x: clip(x, 0, 9),
                "rows": lambda x=x, y=y: x.sum(axis=0) * y}[what]()
        values.append(keep(clip(made, -3, 3)))
    return values[len(given):]


def by_tinygrad(of: list[tuple[str, int, int]]) -> TinyJit:
    def run(*given: Tensor) -> list[Tensor]:
        made = steps(given, of, lambda x, low, high: x.clip(low, high), lambda x: x.contiguous())
        Tensor.realize(*made)
        return made
    return TinyJit(run)


def inputs(seed: int) -> list[np.ndarray]:
    return [np.random.default_rng((seed, i)).integers(-3, 4, (SIDE, SIDE)).astype(np.float16)
            for i in range(INPUTS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sm_count", [132, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_equal_numpy(seed: int, sm_count: int, monkeypatch: pytest.MonkeyPatch):
    """Side by side where they fit, and all in a chain."""
    monkeypatch.setattr("tinygrad_nv.runtime.graph.EdgeChain", lambda _: EdgeChain(sm_count))
    graph_cache.clear()
    of = plan(seed)
    jit = by_tinygrad(of)
    for call in range(4):
        given = inputs(10 * seed + call)
        wanted = steps(tuple(x.astype(np.float32) for x in given), of, np.clip, lambda x: x)
        for got, right in zip(jit(*(Tensor(x).realize() for x in given)), wanted, strict=True):
            equal(got, right.astype(np.float16))
    counts = [graph.chain.counts for graph in graphs(jit)]
    assert sum(each.programmatic for each in counts) > 0
    assert sm_count > 1 or all(each.programmatic == each.edges == each.launches - 1 for each in counts)


def three(x: Tensor, w: Tensor) -> Tensor:
    """A chain of three products, and nothing beside it."""
    for _ in range(3): x = (x @ w).clip(-3, 3).contiguous()
    return x.realize()


def run_three() -> EdgeCounts:
    jit = TinyJit(three)
    for call in range(3):
        x, w, _ = inputs(call)
        wanted = x.astype(np.float32)
        for _ in range(3): wanted = np.clip(wanted @ w, -3, 3)
        equal(jit(Tensor(x).realize(), Tensor(w).realize()), wanted.astype(np.float16))
    (graph,) = graphs(jit)
    return graph.chain.counts


def test_a_chain_of_products_has_programmatic_edges_only():
    assert run_three() == EdgeCounts(launches=3, edges=2, programmatic=2)


def test_NV_PDL_0_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_PDL", "0")
    monkeypatch.setattr("tinygrad.engine.realize.runtime_cache", {})  # programs read it when they are made
    graph_cache.clear()
    assert run_three() == EdgeCounts(launches=3, edges=2)


def test_kernels_of_tinygrad_wait_before_all_else(monkeypatch: pytest.MonkeyPatch):
    """In the text, and after ptxas."""
    made: dict = {}
    monkeypatch.setattr("tinygrad.engine.realize.runtime_cache", made)
    x, _, _ = inputs(0)
    equal((Tensor(x) * 2 + 1).contiguous(), x * 2 + 1)
    equal(Tensor(x).softmax().argmax(axis=1).contiguous(), x.argmax(axis=1).astype(np.int32))
    assert len(made) > 2
    for program in made.values():
        text = program.module.text
        assert text.startswith(".version")
        assert program.launch == LaunchConfig(pdl=True)
        assert program.pdl
        text = text.replace(".version 7.8\n.target sm_90", ".version 8.0\n.target sm_90a")
        (code,) = functions(disassemble(assemble(text).cubin)).values()
        names = [each.opcode for each in code]
        first = next(i for i, name in enumerate(names) if name in ("LDG", "STG"))
        assert names.index("PREEXIT") < names.index("ACQBULK") < first
