"""The part "smoke" of bench/gpu/run.py, the first thing on a GPU: what graphs of kernels take for granted and
no document of CUDA's says.

Kernel nodes are added to a graph one by one, with a cluster as an attribute (cuGraphKernelNodeSetAttribute),
and an instantiated graph gets other arguments by cuGraphExecKernelNodeSetParams, whose struct has no cluster.
Rows ask whether a node runs with the cluster it was given, whether it still does after new arguments and
after another grid, whether a matmul's tensor maps may be among them, and whether edges may be programmatic.

With --emulate: the same on the emulated driver.
"""
from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from bench.gpu.launch import open_driver
from bench.gpu.parts import Measure, NotMeasured, Options, Part, Row, register
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, Node, integer, map_spec, pointer
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

CTAS, LINKS = 8, 64
# p[4 · CTA]: the value, CTAs of its cluster, its rank there, clusters of the grid
RANKS = """.version 8.0
.target sm_90
.address_size 64
.visible .entry ranks(.param .u64 p, .param .u32 value)
{
.reg .b64 %a, %w;
.reg .b32 %v, %n, %r, %c, %i;
ld.param.b64 %a, [p];
ld.param.b32 %v, [value];
mov.u32 %i, %ctaid.x;
mov.u32 %n, %cluster_nctarank;
mov.u32 %r, %cluster_ctarank;
mov.u32 %c, %nclusterid.x;
mul.wide.u32 %w, %i, 16;
add.u64 %a, %a, %w;
st.global.v4.b32 [%a], {%v, %n, %r, %c};
ret;
}
.visible .entry add(.param .u64 p, .param .u32 value)
{
.reg .b64 %a, %w;
.reg .b32 %v, %i, %x;
griddepcontrol.launch_dependents;
ld.param.b64 %a, [p];
ld.param.b32 %v, [value];
mov.u32 %i, %ctaid.x;
mul.wide.u32 %w, %i, 16;
add.u64 %a, %a, %w;
griddepcontrol.wait;
nanosleep.u32 1000;
ld.global.b32 %x, [%a];
mad.lo.u32 %x, %x, 3, %v;
st.global.b32 [%a], %x;
ret;
}
"""
Found = list[tuple[int, ...]]


class SmokeDevice:
    """A device with memory for what the kernels write."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.module = driver.load(RANKS.encode())
        self.memory = driver.alloc(16 * 2 * CTAS)

    def launch(self, kernel: str, value: int, cluster: int, ctas: int = CTAS, pdl: bool = False) -> Launch:
        """Launches one thread a CTA."""
        return Launch(self.module.function(kernel), (ctas, 1, 1), (1, 1, 1),
                      (pointer(self.memory), integer(value)), cluster=(cluster, 1, 1), pdl=pdl)

    def ran(self, run: Callable[[], None], ctas: int = CTAS) -> Found:
        """Returns the numbers that the CTAs wrote, where there were ones before."""
        self.driver.copy_in(self.memory, memoryview(b"\xff" * (16 * 2 * CTAS)))
        run()
        return self.read(ctas)

    def read(self, ctas: int = CTAS) -> Found:
        """The words of each CTA."""
        data = bytearray(16 * ctas)
        self.driver.copy_out(memoryview(data), self.memory)
        return [struct.unpack_from("<4I", data, 16 * i) for i in range(ctas)]


def ranks(value: int, cluster: int, ctas: int = CTAS) -> Found:
    """Returns the numbers that `ranks` must write."""
    return [(value, cluster, i % cluster, ctas // cluster) for i in range(ctas)]


def unlike(got: Any, want: Any) -> str:
    """In words; "" when equal."""
    return "" if got == want else f"found {got}, must be {want}"


# **** what is asked ****

def cluster_in_a_stream(driver: Driver) -> str:
    """Launches what the rest is compared with."""
    bench = SmokeDevice(driver)
    return unlike(bench.ran(lambda: driver.submit(bench.launch("ranks", 5, 2))), ranks(5, 2))


def cluster_of_a_node(driver: Driver, cluster: int = 2) -> str:
    """A node's cluster is its attribute."""
    bench, graph = SmokeDevice(driver), driver.graph()
    graph.add(bench.launch("ranks", 7, cluster))
    return unlike(bench.ran(graph.instantiate().launch), ranks(7, cluster))


def arguments_of_a_node(driver: Driver) -> str:
    """Other arguments: the cluster stays."""
    bench, graph = SmokeDevice(driver), driver.graph()
    node = graph.add(bench.launch("ranks", 7, 4))
    executable = graph.instantiate()
    if words := unlike(bench.ran(executable.launch), ranks(7, 4)): return f"before the update: {words}"
    executable.update(node, bench.launch("ranks", 9, 4))
    return unlike(bench.ran(executable.launch), ranks(9, 4))


def grid_of_a_node(driver: Driver) -> str:
    """Another grid, as a batch of another size has it: the cluster stays."""
    bench, graph = SmokeDevice(driver), driver.graph()
    node = graph.add(bench.launch("ranks", 7, 2))
    executable = graph.instantiate()
    executable.update(node, bench.launch("ranks", 8, 2, 2 * CTAS))
    return unlike(bench.ran(executable.launch, 2 * CTAS), ranks(8, 2, 2 * CTAS))


def clusters_side_by_side(driver: Driver) -> str:
    """Nodes with and without clusters in one graph, the second of which is updated."""
    bench, other, graph = SmokeDevice(driver), SmokeDevice(driver), driver.graph()
    first = graph.add(bench.launch("ranks", 1, 2))
    second = graph.add(other.launch("ranks", 2, 1), [first])
    executable = graph.instantiate()
    executable.update(second, other.launch("ranks", 3, 1))
    return (unlike(bench.ran(executable.launch), ranks(1, 2)) or
            unlike(other.ran(executable.launch), ranks(3, 1)))


def edges_that_begin_early(driver: Driver) -> str:
    """A row of nodes with programmatic edges, each of which reads what the one before wrote."""
    bench, graph = SmokeDevice(driver), driver.graph()
    after: list[Node] = []
    for i in range(LINKS): after = [graph.add(bench.launch("add", i, 1, pdl=True), after)]
    driver.copy_in(bench.memory, memoryview(bytes(16 * 2 * CTAS)))
    graph.instantiate().launch()
    value = 0
    for i in range(LINKS): value = (3 * value + i) % 2**32
    return unlike([words[0] for words in bench.read()], [value] * CTAS)


def matmul_of_a_node(driver: Driver) -> str:
    """A matmul with a cluster of 2, whose tensor maps are arguments, on two sets of memory in turn."""
    import torch
    m, n, k = 256, 64, 128
    spec = dense(m, n, k)
    gpu = GPU(driver.properties.arch, driver.properties.sm_count, driver.clusters)
    made = TABLE.build(spec, Wgmma().block(128, 64).k(64).cluster(2), gpu)
    function = driver.load(made.ptx.encode()).function(made.name)
    sets = []
    for _ in range(2):
        a, b = (torch.randint(-4, 5, shape).bfloat16() for shape in ((m, k), (n, k)))
        at = [driver.alloc(nbytes) for nbytes in (2 * m * n, a.nbytes, b.nbytes)]
        for tensor, address in ((a, at[1]), (b, at[2])):
            driver.copy_in(address, memoryview(tensor.view(torch.uint8).numpy().tobytes()))
        maps = [driver.tensor_map(map_spec(each, at[each.pointer])) for each in made.maps]
        args = (*map(pointer, at), *maps)
        sets.append((Launch(function, made.grid_for(m), (made.threads, 1, 1), args, made.dynamic_smem,
                            made.cluster, made.pdl), at[0], (a.double() @ b.double().T).bfloat16()))
    graph = driver.graph()
    node = graph.add(sets[0][0], [graph.add(Fill(out, 0xff, 2 * m * n)) for _, out, _ in sets])
    executable = graph.instantiate()
    for number, (launch, out, want) in enumerate(sets):
        executable.update(node, launch)
        executable.launch()
        data = bytearray(2 * m * n)
        driver.copy_out(memoryview(data), out)
        if not torch.equal(torch.frombuffer(data, dtype=torch.bfloat16).view(m, n), want):
            return f"set {number}: not the product"
    return ""


ASKED: dict[str, Callable[[Driver], str]] = {
    "a cluster in a stream": cluster_in_a_stream,
    "a cluster of 2 of a graph's node": cluster_of_a_node,
    "a cluster of 8 of a graph's node": lambda driver: cluster_of_a_node(driver, 8),
    "other arguments of a node with a cluster": arguments_of_a_node,
    "another grid of a node with a cluster": grid_of_a_node,
    "nodes with and without clusters": clusters_side_by_side,
    "programmatic edges": edges_that_begin_early,
    "tensor maps of a node with a cluster": matmul_of_a_node}


# **** the part ****

def open_worker(options: Options) -> Measure:
    """A worker: a driver for each row, since one that goes wrong may lose its context."""
    def measure(name: str, budget_s: float) -> Row:
        driver = open_driver(options)
        if driver.properties.arch != "sm_90a": raise NotMeasured("clusters and early launches need sm_90")
        words = ASKED[name](driver)
        if words: return {"status": "disagrees", "why": words}
        return {"status": "emulated" if options.emulate else "measured", "why": "as it must be"}

    return measure


def render(rows: Mapping[str, Row]) -> str:
    """A line each."""
    return "\n".join(f"  {name}: {row['status']}: {row.get('why', '')}" for name, row in rows.items())


register(Part("smoke", "graphs of kernels with clusters, whose arguments change", lambda options: list(ASKED),
              open_worker, render, expected_s=2.0, limit_s=60.0))
