"""DEV=EMU: kernels in the graph with tensor maps that are made for each launch, and flags that are zero
before each. The kernels are small and written here: one copies through a tensor map, one counts in its flags.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat, graph_rewrite

from tests.emu.runtime.test_device_jit import graphs
from tests.support.patterns.on_emu import emu, equal, floats  # noqa: F401
from tinygrad_nv import Device, Tensor, TinyJit, Variable, dtypes, function, hooks
from tinygrad_nv.errors import DriverError, TensorMapError
from tinygrad_nv.patterns.program import Output, call, program
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator.footprint import Footprint
from tinygrad_nv.runtime.driver import Fill, Launch
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.emulated.graph import EmulatedGraph
from tinygrad_nv.runtime.emulated.order import Done
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BOX, COLUMNS, MOST = 8, 64, 40
BOX_BYTES = 2 * BOX * COLUMNS
ROWS = Variable("rows", 1, MOST)


def copying(symbolic: bool = False, offset_rows: int = 0) -> GemmKernel:
    """out = in, a box of 8 rows by each CTA: f16, 64 columns. With `symbolic`, rows from m on are 0."""
    k = Kernel("copying", arch="sm_90a", threads=64)
    out, _ = k.pointer("out"), k.pointer("x")
    if symbolic: k.param("m", "u32")
    tensor = k.tensor_map("tensor")
    tile, full = k.shared("tile", BOX_BYTES, align=128), k.mbarriers("full")
    with k.if_(k.tid.x == 0):
        k.mbarrier_init(full[0], 1)
        k.fence_mbarrier_init()
        k.mbarrier_expect(full[0], BOX_BYTES)
        k.tma_load(tile.at(), tensor, [0, (k.ctaid.x * BOX).to("s32")], full[0])
    k.sync()
    k.mbarrier_wait(full[0], 0)
    words = k.ld("shared", "b32", tile.address(k.tid.x * 16).at(), 4)
    k.st("global", "b32", (out + (k.ctaid.x * BOX_BYTES + k.tid.x * 16).to("u64")).at(), words)
    tensor_map = MapArgument(1, "f16", (COLUMNS, MOST), (2 * COLUMNS,), (COLUMNS, BOX), "none",
                             2 * COLUMNS * offset_rows, 1 if symbolic else -1)
    return GemmKernel("copying", k.ptx(), (MOST // BOX, 1, 1), 64, maps=(tensor_map,),
                      rows_of_cta=BOX if symbolic else 0)


def counting(steps: int = 1) -> GemmKernel:
    """out[i] = x[i] + how often flag i was raised before this launch; raises flag i, `steps` times."""
    k = Kernel("counting", arch="sm_90a", threads=32)
    out, workspace, flags, x = (k.pointer(name) for name in ("out", "workspace", "flags", "x"))
    at = (k.tid.x * 4).to("u64")
    before, _ = k.ld("global", "u32", (flags + at).at())[0], workspace
    value = k.ld("global", "f32", (x + at).at())[0]
    counted = k.reg("f32")
    k.emit("cvt.rn.f32.u32", counted, before)
    k.st("global", "f32", (out + at).at(), value + counted)
    k.st("global", "u32", (flags + at).at(), before + steps)
    return GemmKernel("counting", k.ptx(), (1, 1, 1), 32, workspace_bytes=256, flags=32)


def halves(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def gemm(kernel: GemmKernel, out: Output | UOp, inputs: list[UOp], m: Variable | None = None) -> UOp:
    """A call of a kernel whose rows are the variable `m`, if any."""
    more = {} if m is None else {"rows": m, "variables": [m]}
    return call(kernel, "EMU", [out], inputs, **more)[0]


def copied(x: Tensor, kernel: GemmKernel | None = None, m: Variable | None = None) -> Tensor:
    return Tensor(gemm(kernel or copying(), Output((MOST, COLUMNS), dtypes.half), [x.uop], m=m))


def counted(x: Tensor, steps: int = 1) -> Tensor:
    return Tensor(gemm(counting(steps), Output((32,), dtypes.float), [x.uop]))


def cut(x: np.ndarray, rows: int) -> np.ndarray:
    """The boxes that a launch with so many rows writes."""
    x = np.where(np.arange(len(x))[:, None] < rows, x, 0)
    return x[:-(-rows // BOX) * BOX]


# **** tensor maps ****

def test_a_tensor_map_is_made_over_the_input():
    for seed in range(2):
        x = halves(MOST, COLUMNS, seed=seed)
        equal(copied(Tensor(x).realize()), x)


def test_the_map_begins_where_its_offset_says():
    x = halves(2 * MOST, COLUMNS)
    equal(copied(Tensor(x).realize(), copying(offset_rows=3)), x[3:3 + MOST])


def test_a_view_of_a_buffer_is_mapped_where_it_lies():
    x = halves(2 * MOST, COLUMNS)
    equal(copied(Tensor(x).realize()[MOST:]), x[MOST:])


def test_replays_take_changed_inputs():
    jit = TinyJit(lambda x: (copied(x) + 1).contiguous().realize())
    inputs = [Tensor(halves(MOST, COLUMNS, seed=seed)).realize() for seed in range(5)]
    for x in inputs: equal(jit(x), x.numpy() + 1)
    assert [len(graph.works) for graph in graphs(jit)] == [2]


def test_maps_of_what_a_graph_makes_itself():
    jit = TinyJit(lambda x: copied(copied((x * 2).contiguous())).realize())
    for seed in range(4):
        x = halves(MOST, COLUMNS, seed=seed)
        equal(jit(Tensor(x).realize()), x * 2)
    assert [len(graph.works) for graph in graphs(jit)] == [3]


def test_a_node_is_updated_when_its_map_changes_and_only_then():
    jit = TinyJit(lambda x, y: ((copied(x) + 1).contiguous() + copied(y)).realize())
    a, b, c = (Tensor(halves(MOST, COLUMNS, seed=seed)).realize() for seed in range(3))
    for _ in range(3): jit(a, b)
    (graph,) = graphs(jit)
    update, updated = graph.executable.update, []
    graph.executable.update = lambda node, work: updated.append(work) or update(node, work)
    equal(jit(a, b), (a.numpy() + 1) + b.numpy())
    assert updated == []
    equal(jit(a, c), (a.numpy() + 1) + c.numpy())
    (work,) = updated
    address = c.uop.buffer._buf
    assert isinstance(work, Launch)
    assert int.from_bytes(work.args[1], "little") == int.from_bytes(work.args[-1][:8], "little") == address


def test_a_map_is_encoded_once_for_a_buffer(monkeypatch: pytest.MonkeyPatch):
    made, encode = [], EmulatedDriver.tensor_map
    monkeypatch.setattr(EmulatedDriver, "tensor_map",
                        lambda self, spec: made.append(spec) or encode(self, spec))
    jit = TinyJit(lambda x: (copied(x, copying(offset_rows=1)) + 1).contiguous().realize())
    two = [Tensor(halves(2 * MOST, COLUMNS, seed=seed)).realize() for seed in range(2)]
    for x in two * 3: equal(jit(x), x.numpy()[1:1 + MOST] + 1)
    assert len({spec.address for spec in made}) == len(made) <= 3  # the jit may capture a buffer of its own


@pytest.mark.parametrize("precompile", [False, True])
def test_in_a_function(precompile: bool):
    fn = function(lambda x: copied(x) * 2, precompile=precompile)
    jit = TinyJit(lambda x: (fn(x).contiguous() + 1).contiguous().realize())
    for seed in range(4):
        x = halves(MOST, COLUMNS, seed=seed)
        equal(fn(Tensor(x).realize()).contiguous(), x * 2)
        equal(jit(Tensor(x).realize()), x * 2 + 1)


# **** as many rows as a variable says ****

def test_a_map_of_symbolic_extent_reads_zero_beyond_it():
    x = Tensor(halves(MOST, COLUMNS)).realize()
    for rows in (1, 5, 8, 17, MOST):
        wanted = cut(x.numpy(), rows)
        found = copied(x, copying(symbolic=True), ROWS.bind(rows))
        equal(found[:len(wanted)].contiguous(), wanted)


def test_replays_take_changed_extents():
    jit = TinyJit(lambda x, rows: (copied(x, copying(symbolic=True), rows)[:rows] * 2).contiguous().realize())
    for seed, rows in enumerate((4, 9, 40, 1, 33, 33)):
        x = halves(MOST, COLUMNS, seed=seed)
        found = jit(Tensor(x).realize(), ROWS.bind(rows))
        equal(found[:rows], x[:rows] * 2)
    (graph,) = graphs(jit)
    assert [call.values for call in graph.works if call.program.launch.maps] == [[33]]


def test_extents_change_while_buffers_stay():
    jit = TinyJit(lambda x, out, rows: (Tensor(gemm(copying(symbolic=True), out.uop, [x.uop], m=rows))
                                        .realize(), (x + 1).contiguous().realize()))
    x, out = Tensor(halves(MOST, COLUMNS)).realize(), Tensor(halves(MOST, COLUMNS)).realize()
    for rows in (40, 3, 12, 25):
        jit(x, out, ROWS.bind(rows))
        wanted = cut(x.numpy(), rows)
        np.testing.assert_array_equal(out.numpy()[:len(wanted)], wanted)
    assert graphs(jit)


def test_an_extent_reaches_a_kernel_between_others():
    """Neither its buffers nor its grid change, only m and the map."""
    kernel = replace(copying(symbolic=True), rows_of_cta=0)
    jit = TinyJit(lambda x, rows: (copied((x * 2).contiguous(), kernel, rows) + 1).contiguous().realize())
    x = halves(MOST, COLUMNS)
    for rows in (40, 3, 12, 25):
        found = jit(Tensor(x).realize(), ROWS.bind(rows))
        equal(found, np.where(np.arange(MOST)[:, None] < rows, x * 2, 0) + 1)
    assert graphs(jit)


def test_several_variables_the_last_is_the_extent():
    """`program` by itself: a kernel may have integers before m."""
    other, kernel = Variable("other", 1, 9), copying(symbolic=True)
    text = kernel.ptx.replace(".param .u32 m", ".param .u32 other, .param .u32 m")
    x = Tensor(halves(MOST, COLUMNS)).realize()
    out = program("copying", text, "EMU", [Output((MOST, COLUMNS), dtypes.half)], [x.uop], grid=(5, 1, 1),
                  block=(64, 1, 1), variables=[other.bind(7), ROWS.bind(11)], launch=kernel.launch)[0]
    equal(Tensor(out), np.where(np.arange(MOST)[:, None] < 11, x.numpy(), 0))


# **** flags ****

def test_flags_are_zero_before_every_launch():
    x = Tensor(floats(32)).realize()
    for _ in range(3): equal(counted(x), floats(32))


def test_two_kernels_do_not_share_raised_flags():
    x, y = Tensor(floats(32)).realize(), Tensor(floats(32) + 1).realize()
    equal((counted(x) + counted(y)).contiguous(), floats(32) + (floats(32) + 1))
    equal(counted(counted(x)), floats(32))


def test_flags_are_zero_in_replays():
    jit = TinyJit(lambda x: (counted(counted(x) * 2) + counted(x, 3)).contiguous().realize())
    for seed in range(5):
        x = np.random.default_rng(seed).standard_normal(32).astype(np.float32)
        equal(jit(Tensor(x).realize()), x * 2 + x)
    (graph,) = graphs(jit)
    assert sum(bool(call.program.launch.zeroed) for call in graph.works) == 3


def test_flags_are_zero_in_a_function():
    jit = TinyJit(lambda x: (function(counted)(x).contiguous() + 1).contiguous().realize())
    for _ in range(4): equal(jit(Tensor(floats(32)).realize()), floats(32) + 1)


def test_a_fill_waits_for_readers_and_the_kernel_for_its_fill(monkeypatch: pytest.MonkeyPatch):
    made, instantiate = [], EmulatedGraph.instantiate
    monkeypatch.setattr(EmulatedGraph, "instantiate", lambda self: made.append(self) or instantiate(self))
    jit = TinyJit(lambda x: (counted(x) + 1).contiguous().realize())
    for _ in range(3): jit(Tensor(floats(32)).realize())
    (graph,) = made
    kinds = [type(work) for work in graph.works]
    assert kinds == [Fill, Launch, Launch]
    assert graph.after == [(), (0,), (1,)]


def test_a_fill_follows_those_who_read_its_buffer():
    """Flags in storage that is also an input, and read before: it takes turns, so the fill is updated."""
    def step(flags: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        before = (flags + 1).contiguous().realize()
        kernel = counting()
        outputs = program("counting", kernel.ptx, "EMU", [
            Output((32,), dtypes.float), Output((64,), dtypes.float), flags.uop], [x.uop], block=(32, 1, 1),
            launch=kernel.launch)
        return before, Tensor(outputs[0]).realize()
    jit, x = TinyJit(step), Tensor(floats(32)).realize()
    two = [Tensor.full((32,), 10 * i, dtype=dtypes.uint32).contiguous().realize() for i in (1, 2)]
    wanted = [11, 21, *[2] * 6]
    for i, value in enumerate(wanted):
        before, found = jit(two[i % 2], x)
        assert before.tolist() == [value] * 32
        equal(found, floats(32))
    assert [len(call.nodes) for call in graphs(jit)[0].works] == [1, 2]


def test_without_the_fill_a_replay_would_be_wrong(monkeypatch: pytest.MonkeyPatch):
    run = EmulatedDriver.run
    nothing = Done(Footprint("a fill"))

    def without_fills(self: EmulatedDriver, work: Any, *rest: Any) -> Any:
        return nothing if isinstance(work, Fill) else (yield from run(self, work, *rest))
    monkeypatch.setattr(EmulatedDriver, "run", without_fills)
    with pytest.raises(RuntimeError, match="uninitialized"): counted(Tensor(floats(32)).realize()).numpy()


# **** products ****

WGMMA = Wgmma().block(64, 64).warps(8).stages(3)
PRODUCTS = {"wgmma": WGMMA, "cluster": WGMMA.cluster(2), "mma": Mma().block(32, 64).k(32).stages(3)}


def small(rows: int, columns: int, seed: int) -> np.ndarray:
    """Integers in float16, whose products and sums are exact."""
    return np.random.default_rng(seed).integers(-3, 4, (rows, columns)).astype(np.float16)


def multiplied(x: Tensor, w: Tensor, schedule: GemmSchedule, m: Variable | None = None) -> Tensor:
    """x @ w.T by a template; of the first m rows."""
    spec = dense(x.shape[0], w.shape[0], x.shape[1], "f16", symbolic=m is not None)
    kernel = TABLE.build(spec, schedule, GPU("sm_90a"))
    return Tensor(gemm(kernel, Output((spec.m, spec.n), dtypes.half), [x.uop, w.uop], m=m))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", PRODUCTS.values(), ids=PRODUCTS)
def test_products_in_replays(schedule: GemmSchedule):
    jit = TinyJit(lambda x, w: (multiplied((x + 1).contiguous(), w, schedule) + 1).contiguous().realize())
    for seed in range(4):
        x, w = small(MOST, 320, seed), small(72, 320, seed + 9)
        equal(jit(Tensor(x).realize(), Tensor(w).realize()), (x + 1) @ w.T + 1)
    assert graphs(jit)


@pytest.mark.parametrize("schedule", PRODUCTS.values(), ids=PRODUCTS)
def test_products_of_as_many_rows_as_a_variable_says(schedule: GemmSchedule):
    jit = TinyJit(lambda x, w, rows: (multiplied(x, w, schedule, rows)[:rows] + 1).contiguous().realize())
    for seed, rows in enumerate((40, 1, 17, 33, 8)):
        x, w = small(MOST, 320, seed), small(72, 320, seed + 9)
        found = jit(Tensor(x).realize(), Tensor(w).realize(), ROWS.bind(rows))
        equal(found[:rows], x[:rows] @ w.T + 1)


# **** in a rewrite ****

def put_in(add: UOp) -> UOp | None:
    if add.src[1].base.op is not Ops.CONST or add.src[1].base.arg != 0.5 or add.shape != (32,): return None
    return gemm(counting(), Output((32,), dtypes.float), [add.src[0]])


pm_counting = PatternMatcher([(UPat(Ops.ADD, dtypes.float, name="add"), put_in)])


def test_workspace_flags_and_maps_in_a_rewrite():
    """A rewrite that puts the kernel in place of `x + 0.5`, where nothing is added but flags."""
    hooks.add_rewrite("counting", lambda sink: graph_rewrite(sink, pm_counting))
    try:
        jit = TinyJit(lambda x: ((x + 0.5) * 2 + (x * 3 + 0.5)).contiguous().realize())
        for _ in range(4): equal(jit(Tensor(floats(32)).realize()), floats(32) * 2 + floats(32) * 3)
    finally: hooks.remove_rewrite("counting")


# **** what cannot be ****

def mapped(**changed: object) -> UOp:
    """A copy by a map that is not as its kernel's."""
    kernel = copying()
    launch = replace(kernel.launch, maps=(replace(kernel.maps[0], **changed),))
    return program("copying", kernel.ptx, "EMU", [Output((MOST, COLUMNS), dtypes.half)],
                   [Tensor(halves(MOST, COLUMNS)).realize().uop], grid=(5, 1, 1), block=(64, 1, 1),
                   launch=launch)[0]


def test_a_map_over_a_pointer_that_is_not_there():
    out = mapped(pointer=2)
    with pytest.raises(DriverError, match="kernel copying with 2 pointers and 0 integers"):
        Tensor(out).realize()


def test_a_map_that_cannot_be():
    out = mapped(strides=(130,))
    with pytest.raises(TensorMapError): Tensor(out).realize()
    Device["EMU"].synchronize()
