"""DEV=EMU: TinyJit on graphs of the driver, kernels of ours, several devices and architectures, and a
language model."""
from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest
from tinygrad.codegen import to_program
from tinygrad.engine import worker
from tinygrad.engine.realize import graph_cache
from tinygrad.uop.ops import Ops

from tests.support.patterns.on_emu import emu, equal, floats, near  # noqa: F401
from tinygrad_nv import LLM, Context, Device, SamplingParams, Tensor, TinyJit, Variable, dtypes
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.device import EMUDevice, NVDevice
from tinygrad_nv.runtime.driver import Launch
from tinygrad_nv.runtime.emulated.graph import EmulatedGraph
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.tile.launch import Integer, LaunchConfig, MapArgument, Zeroed


def graphs(jit: TinyJit) -> list[NVGraph]:
    """The graphs a captured function replays."""
    assert jit.captured is not None
    bodies = [call.src[0] for call in jit.captured.linear.src]
    found = [graph_cache[body] for body in bodies if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"]
    assert all(isinstance(graph, NVGraph) for graph in found)
    return found


def three_kernels(x: Tensor, y: Tensor) -> Tensor:
    return ((x @ y).relu().contiguous().softmax().contiguous() + x.sum()).realize()


def wanted_of_three(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    x, y = x.astype(np.float64), y.astype(np.float64)
    e = np.exp(np.maximum(x @ y, 0))
    return e / e.sum(-1, keepdims=True) + x.sum()


def test_a_graph_takes_changed_inputs():
    jit = TinyJit(three_kernels)
    for seed in range(5):
        x, y = np.random.default_rng(seed).standard_normal((2, 12, 12)).astype(np.float32)
        near(jit(Tensor(x).realize(), Tensor(y).realize()), wanted_of_three(x, y), 1e-5)
    (graph,) = graphs(jit)
    assert graph.executable.launches == 4  # the second call captures and replays
    assert len(graph.works) >= 3


def test_a_replay_after_its_memory_was_freed():
    """Intermediates are views of one buffer: after free_intermediates they are in the new one."""
    def steps(x: Tensor) -> Tensor:
        doubled = (x * 2).contiguous().realize()
        return (doubled + x).contiguous().realize().sum().realize()
    jit = TinyJit(steps)
    for call in range(6):
        equal(jit(Tensor(x := np.arange(call, call + 8, dtype=np.float32)).realize()), x.sum() * 3)
        if call > 1:
            assert jit.captured is not None
            jit.captured.free_intermediates()


def test_independent_kernels_of_a_graph_have_no_edges():
    def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2 + 1).contiguous().realize(), (y * 3).contiguous().realize()
    jit, made = TinyJit(two), []
    instantiate = EmulatedGraph.instantiate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGraph, "instantiate", lambda self: made.append(self) or instantiate(self))
        for _ in range(3):
            a, b = jit(Tensor(floats(8)).realize(), Tensor(floats(9)).realize())
            equal(a, floats(8) * 2 + 1)
            equal(b, floats(9) * 3)
    assert [graph.after for graph in made] == [[(), ()]]


def test_the_edges_are_needed(monkeypatch: pytest.MonkeyPatch):
    """Nodes run in an unkind order, so without edges the answer is wrong or what is read is not there yet."""
    add = EmulatedGraph.add
    monkeypatch.setattr(EmulatedGraph, "add", lambda self, work, after=(): add(self, work))
    jit, wrong = TinyJit(three_kernels), 0
    for seed in range(4):
        x, y = np.random.default_rng(seed).standard_normal((2, 12, 12)).astype(np.float32)
        out = jit(Tensor(x).realize(), Tensor(y).realize())
        try: wrong += bool(np.abs(out.numpy() - wanted_of_three(x, y)).max() > 1e-4)
        except RuntimeError: wrong += 1
    assert wrong


def test_variables_reach_arguments_and_extents():
    def rows(x: Tensor, n: Variable) -> Tensor:
        return ((x[:n] * 2).contiguous() + n).sum(1).contiguous().realize()
    jit, x = TinyJit(rows), floats(40, 16)
    tensor = Tensor(x).realize()
    for n in (3, 4, 5, 40, 1, 17):
        found = jit(tensor, Variable("n", 1, 40).bind(n))
        near(found[:n], (x[:n].astype(np.float64) * 2 + n).sum(1), 1e-5)
    (graph,) = graphs(jit)
    assert graph.launch_dims_replace, "an extent depends on n"
    assert graph.var_vals_replace, "an argument depends on n"


def test_one_step_feeds_the_next():
    @TinyJit
    def step(state: Tensor, x: Tensor) -> Tensor:
        state.assign((state @ x).tanh().contiguous() + 0.5).realize()
        return state
    x, state = floats(8, 8), Tensor(np.eye(8, dtype=np.float32)).contiguous().realize()
    wanted = np.eye(8)
    for _ in range(6):
        step(state, Tensor(x).realize())
        wanted = np.tanh(wanted @ x) + 0.5
    near(state, wanted, 1e-4)
    assert graphs(step)


def test_updates_touch_only_what_changed():
    jit = TinyJit(three_kernels)
    x, y = (Tensor(t).realize() for t in floats(2, 12, 12))
    for _ in range(3): jit(x, y)
    (graph,) = graphs(jit)
    updated: list[Launch] = []
    graph.executable.update = lambda node, work: updated.append(work)
    jit(x, y)
    assert updated == []


# **** kernels given as PTX ****

SCALE = """.version 7.8
.target sm_80
.address_size 64
.extern .shared .align 4 .b8 pool[];
.visible .entry scale(.param .u64 out, .param .u64 in, .param .u32 n)
{
.reg .u64 %a<4>;
.reg .u32 %r<8>;
.reg .f32 %f<3>;
.reg .pred %p<2>;
ld.param.u64 %a1, [out];
ld.param.u64 %a2, [in];
ld.param.u32 %r1, [n];
mov.u32 %r2, %tid.x;
mov.u32 %r3, %ctaid.x;
mad.lo.u32 %r4, %r3, 32, %r2;
setp.ge.u32 %p1, %r4, %r1;
@%p1 ret;
mul.wide.u32 %a3, %r4, 4;
add.u64 %a1, %a1, %a3;
add.u64 %a2, %a2, %a3;
ld.global.f32 %f1, [%a2];
mul.lo.u32 %r5, %r2, 4;
mov.u32 %r6, pool;
add.u32 %r6, %r6, %r5;
st.shared.f32 [%r6+896], %f1;
ld.shared.f32 %f2, [%r6+896];
add.f32 %f2, %f2, %f2;
st.global.f32 [%a1], %f2;
ret;
}
"""


SHARED = LaunchConfig(dynamic_smem=1024)


def scaled(x: Tensor, n: Variable, launch: LaunchConfig = SHARED) -> Tensor:
    """`x * 2` for the first n elements."""
    unbound = n.src[0]
    out = program("scale", SCALE, "EMU", [Output(x.shape, dtypes.float)], [x.uop],
                  grid=((unbound + 31) // 32, 1, 1), block=(32, 1, 1), variables=[n], launch=launch)
    return Tensor(out[0])


def test_a_kernel_given_as_ptx():
    x = floats(64)
    found = scaled(Tensor(x).realize(), Variable("n", 1, 64).bind(64))
    equal(found, x * 2)


def test_a_kernel_given_as_ptx_in_a_graph():
    jit = TinyJit(lambda x, n: (scaled(x, n)[:n] + 1).contiguous().realize())
    for n in (64, 3, 33, 40):
        x = np.random.default_rng(n).standard_normal(64).astype(np.float32)
        equal(jit(Tensor(x).realize(), Variable("n", 1, 64).bind(n))[:n], x[:n] * 2 + 1)
    assert graphs(jit)


def test_dynamic_shared_memory_reaches_the_kernel():
    # with as many bytes as the launch says and no more
    found = scaled(Tensor(floats(64)).realize(), Variable("n", 1, 64).bind(64), LaunchConfig(512))
    with pytest.raises(RuntimeError, match="out-of-bounds"): found.numpy()


def compiled_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the device's compiler is given from now on, as often as it is."""
    texts: list[str] = []
    compiler = type(Device["EMU"].renderer.compiler)
    compile = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda self, text: texts.append(text) or compile(self, text))
    return texts


def test_launches_that_differ_in_integers_are_compiled_once(monkeypatch: pytest.MonkeyPatch):
    """The kernel's n is n, 2 n or n - 1 of the launch; replayed, too. All are one text."""
    texts, ways = compiled_texts(monkeypatch), (Integer(0, (1,)), Integer(0, (2,)), Integer(-1, (1,)))
    name = f"scale_{uuid.uuid4().hex}"  # is not in the cache of compiled texts
    own = SCALE.replace("scale", name)

    def step(x: Tensor, n: Variable) -> list[Tensor]:
        return [Tensor(program(name, own, "EMU", [Output(x.shape, dtypes.float)], [x.uop], grid=(2, 1, 1),
                               block=(32, 1, 1), variables=[n],
                               launch=LaunchConfig(1024, integers=(way,)))[0]).realize() for way in ways]
    jit, x = TinyJit(step), floats(64)
    for n in (20, 3, 9, 31):
        outs = jit(Tensor(x).realize(), Variable("n", 1, 64).bind(n))
        for out, count in zip(outs, (n, 2 * n, n - 1), strict=True): equal(out[:count], x[:count] * 2)
    assert len(graphs(jit)[0].works) == 3
    assert texts.count(own) == 1


# **** what a compile worker gets and gives back ****

def test_a_launch_goes_through_a_compile_worker():
    """tinygrad sends a kernel to processes that compile and takes it back. They load modules of its note,
    no patterns."""
    launch = LaunchConfig(1024, (2, 1, 1), True, (Zeroed(0, 64),), (MapArgument(1, "u8", (64,), (), (64,)),),
                          (Integer(16, (1, 0)),))
    n = Variable("n", 1, 64).bind(7)
    (out,) = program("scale", SCALE, "EMU", [Output((64,), dtypes.float)], [Tensor(floats(64)).realize().uop],
                     variables=[n], block=(32, 1, 1), launch=launch, note=Note("scale", spec=(1, 2)))
    body = next(u for u in out.toposort() if u.op is Ops.PROGRAM)
    with worker._WorkerContext().Pool(1, worker._init_worker) as pool:
        made = pool.apply(to_program, (body, Device["EMU"].renderer))
        loaded = pool.apply(eval, ("set(__import__('sys').modules)",))
    assert "tinygrad_nv.runtime.note" in loaded
    assert "tinygrad_nv.patterns" not in loaded
    assert made.src[3].arg == SCALE.encode()
    assert made.src[0].arg == body.src[0].arg
    elf = made.to_elf()
    assert elf.aux == launch
    assert Device["EMU"].runtime(elf).launch == launch


# **** devices ****

def test_two_devices_have_memories_of_their_own():
    x = floats(6, 6)
    there = (Tensor(x, device="EMU:1") + 1).realize()
    equal((there.to("EMU") * 2).realize(), (x + 1) * 2)
    assert Device["EMU"].driver is not Device["EMU:1"].driver


def test_shards():
    x = floats(8, 6)
    sharded = Tensor(x).shard(("EMU:24", "EMU:25"), 0)
    near(sharded.sum(0), x.astype(np.float64).sum(0), 1e-6)
    near(sharded @ Tensor(x.T).shard(("EMU:24", "EMU:25")), x.astype(np.float64) @ x.T, 1e-6)


def test_copies_between_devices_of_other_kinds():
    x = floats(100)
    equal(Tensor(x, device="CPU").to("EMU").realize().to("CPU"), x)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_every_architecture(arch: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", arch)
    device = EMUDevice("EMU:7")
    assert device.driver.properties.arch == arch
    assert device.arch == arch.rstrip("a") == device.renderer.target.arch
    header = device.renderer.compiler.compile(".version VERSION\n.target TARGET\n// TARGET\n").decode()
    assert f".target {arch.rstrip('a')}\n// TARGET\n" in header


def test_float32_products_keep_their_digits():
    # a tf32 product would be off by 2^-11
    x = floats(64, 64)
    near(Tensor(x) @ Tensor(x), x.astype(np.float64) @ x, 5e-6)


@pytest.mark.slow
def test_beam_times_candidates(monkeypatch: pytest.MonkeyPatch):
    x, seconds = floats(16, 16), []
    timed = NVDevice.submit_timed
    monkeypatch.setattr(NVDevice, "submit_timed", lambda *a: seconds.append(timed(*a)) or seconds[-1])
    monkeypatch.setenv("NV_GEMM", "0")
    with Context(BEAM=1, CACHELEVEL=0): near(Tensor(x) @ Tensor(x), x.astype(np.float64) @ x, 2e-6)
    assert len([one for one in seconds if one]) > 3


def test_memory_is_given_back_at_once():
    driver = Device["EMU"].driver
    used = driver.used_bytes
    buffer = Tensor.empty(1 << 20).uop.buffer.ensure_allocated()
    assert driver.used_bytes == used + (4 << 20)
    buffer.deallocate()
    assert driver.used_bytes == used


def test_variables_may_be_negative_and_wide():
    x = Tensor(floats(16)).realize()
    for n in (Variable("n", -5, 5), Variable("n", -5, 1 << 40)):
        for value in (-3, 4): equal((x + n.bind(value)).contiguous(), floats(16) + value)
    ones = Tensor.ones(4, dtype=dtypes.int64).contiguous().realize()
    equal((ones * Variable("n", 0, 1 << 40).bind(1 << 33)).contiguous(), np.full(4, 1 << 33))


@pytest.mark.slow
def test_a_language_model_says_what_it_says_on_the_cpu(tiny: Path):
    """Prefill, captured decode steps and sampler, with every check on."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompt = [5, 9, 20, 31, 7]
    cpu, ours = (LLM(tiny, device=device, max_num_seqs=1).complete(prompt, params)
                 for device in ("CPU", "EMU"))
    assert cpu.token_ids == ours.token_ids
