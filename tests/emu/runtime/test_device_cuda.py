"""DEV=CUDA on the fake of NVIDIA's driver library: tinygrad's programs with both renderers, products of ours,
TinyJit, several GPUs, and a language model."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad.engine.realize import graph_cache
from tinygrad.uop.ops import Ops

from tests.support.patterns.on_emu import equal, floats, near
from tests.support.runtime.cuda_fake import Fake
from tests.support.runtime.on_cuda import cuda, on_both
from tinygrad_nv import LLM, Device, SamplingParams, Tensor, TinyJit, Variable, dtypes, explain
from tinygrad_nv.runtime.cuda import code as cuda_code
from tinygrad_nv.runtime.cuda.device import CUDADevice
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.cuda.graph import CUDAExecutable
from tinygrad_nv.runtime.driver import Launch
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.l2 import persisting, plan, tensor_range

X = floats(33, 40)
ULP = {dtypes.float: 2.0**-23, dtypes.half: 2.0**-10, dtypes.bfloat16: 2.0**-7, dtypes.double: 2.0**-52}


@pytest.fixture(params=["CUDA", "PTX"])
def fake(request: pytest.FixtureRequest) -> Iterator[Fake]:
    """One GPU, with each of the renderers."""
    with cuda(request.param) as made:
        assert Device["CUDA"]._renderer_name(type(Device["CUDA"].renderer)) == request.param
        yield made


# **** kernels that are tinygrad's ****

def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To a type of torch's and back."""
    return torch.tensor(x).to(dtype).float().numpy()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "theirs"), [(dtypes.half, torch.float16),
                                               (dtypes.bfloat16, torch.bfloat16)])
def test_narrow_floats_round_as_they_must(fake: Fake, dtype, theirs: torch.dtype):
    a, b = (rounded(x, theirs) for x in (X, X[::-1].copy()))
    x, y = (Tensor(each).cast(dtype).realize() for each in (a, b))
    for found, wanted in ((x + y, a + b), (x * y, a * b), (x - y, a - b)):
        equal(found.realize().float(), rounded(wanted, theirs))
    equal(Tensor(X).cast(dtype).realize().float(), rounded(X, theirs))


FLOATS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray], float]] = {
    "arithmetic": (lambda x: x * 2 + 1, lambda x: x * 2 + 1, 2),
    "sum": (lambda x: x.sum(0), lambda x: x.sum(0), 20),
    "mean": (lambda x: x.mean(), lambda x: x.mean(), 20),
    "softmax": (lambda x: x.softmax(), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True), 8),
    "exp, log": (lambda x: (x.exp() + 1).log(), lambda x: np.log(np.exp(x) + 1), 8),
    "sqrt": (lambda x: (x.abs() + 1).sqrt().reciprocal(), lambda x: 1 / np.sqrt(np.abs(x) + 1), 4),
    "sin": (lambda x: (x * 3).sin(), lambda x: np.sin(x * 3), 16),
    "matmul": (lambda x: x @ x.T, lambda x: x @ x.T, 60),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ULP, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FLOATS)
def test_floats(fake: Fake, name: str, dtype):
    made, exact, ulps = FLOATS[name]
    x = Tensor(X).cast(dtype).realize()
    wanted = exact(x.cast(dtypes.double).numpy())
    off = np.abs(made(x).cast(dtypes.double).numpy() - wanted) / (1 + np.abs(wanted))
    assert off.max() <= ulps * ULP[dtype]


INTEGERS: dict[str, Callable[[], Tensor]] = {
    "64 bits": lambda: Tensor((X * 1000).astype(np.int64)) * 123456789012 // 77,
    "shifts": lambda: (Tensor((X * 1000).astype(np.int32)).cast(dtypes.uint32) >> 3) << 5,
    "argmax": lambda: Tensor(X).argmax(1),
    "sort": lambda: Tensor(X[:, :13]).sort(1)[1],
    "cumsum": lambda: Tensor((X * 9).astype(np.int32)).cumsum(1),
    "gather": lambda: Tensor((X * 99).astype(np.int32))[Tensor([3, 1, 32])],
    "comparison": lambda: (Tensor(X) > 0).sum(),
    "matmul": lambda: Tensor((X * 9).astype(np.int32)) @ Tensor((X * 9).astype(np.int32)).T,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(fake: Fake, name: str):
    found, wanted = on_both(INTEGERS[name])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16])
def test_narrow_integers_wrap(fake: Fake, kind: type):
    limits = np.iinfo(kind)
    x = np.random.default_rng(0).integers(limits.min, limits.max, 500, kind, endpoint=True)
    most = kind(limits.max)
    found = ((Tensor(x) * 3 + int(most)) // 5).cast(dtypes.int32)
    equal(found, ((x * kind(3) + most) // kind(5)).astype(np.int32))
    equal((Tensor(x) - 100 < Tensor(x)).cast(dtypes.int32), (x - kind(100) < x).astype(np.int32))


@pytest.mark.sampled(1)
def test_random_numbers_are_those_of_the_cpu(fake: Fake):
    def drawn() -> Tensor:
        Tensor.manual_seed(3)
        return Tensor.rand(100)
    found, wanted = on_both(drawn)
    np.testing.assert_array_equal(found, wanted)


def test_fp8_in_cuda_c():
    with cuda("CUDA"):
        for dtype, theirs in ((dtypes.fp8e4m3, torch.float8_e4m3fn), (dtypes.fp8e5m2, torch.float8_e5m2)):
            equal(Tensor(X).cast(dtype).float(), rounded(X, theirs))


@pytest.mark.sampled(1)
def test_float32_products_keep_their_digits(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    # a tf32 product would be off by 2^-11
    monkeypatch.setenv("NV_GEMM", "0")
    x = floats(64, 64)
    near(Tensor(x) @ Tensor(x), x.astype(np.float64) @ x, 5e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("renderer", ["CUDA", "PTX"])
@pytest.mark.parametrize(("arch", "early"), [("sm_90a", True), ("sm_80", False)])
def test_kernels_begin_early_where_the_gpu_can(renderer: str, arch: str, early: bool,
                                               monkeypatch: pytest.MonkeyPatch):
    launches: list[Launch] = []
    submit = CUDADriver.submit
    with cuda(renderer, arch=arch):
        monkeypatch.setattr(CUDADriver, "submit", lambda self, work, *args: (
            launches.append(work) if isinstance(work, Launch) else None, submit(self, work, *args)))
        x = (Tensor(X).realize() + 1).realize()
        near((x * 2).softmax(), np.exp(2 * X + 2) / np.exp(2 * X + 2).sum(-1, keepdims=True), 1e-6)
    assert len(launches) >= 2
    assert {launch.pdl for launch in launches} == {early}


@pytest.mark.parametrize(("renderer", "assembled"), [("CUDA", False), ("PTX", True)])
def test_what_ptxas_is_too_old_for_goes_to_the_driver(renderer: str, assembled: bool,
                                                      monkeypatch: pytest.MonkeyPatch):
    with cuda(renderer, ptxas=True) as fake:
        monkeypatch.setattr(cuda_code, "release", lambda: (12, 8))  # NVRTC is of 13.0 at least
        equal(Tensor(X).realize() + 1, X + 1)
        assert bool(fake.sources) == assembled


# **** products that are ours ****

def test_our_products_run_with_both_renderers(fake: Fake):
    x, y = (np.random.default_rng(seed).integers(-4, 5, (128, 128)).astype(np.float32) for seed in (1, 2))
    a, b = Tensor(x).cast(dtypes.bfloat16).realize(), Tensor(y).cast(dtypes.bfloat16).realize()
    out = (a @ b.T).relu()
    (record,) = explain(out).kernels
    assert (record.device, record.template, record.arch) == ("CUDA", "wgmma", "sm_90a")
    assert "wgmma.mma_async" in record.source
    before = fake.calls["cuLaunchKernelEx"]
    equal(out.realize().float(), rounded(np.maximum(x @ y.T, 0), torch.bfloat16))
    assert fake.calls["cuLaunchKernelEx"] > before


# **** TinyJit ****

def graphs(jit: TinyJit) -> list[NVGraph]:
    """The graphs a captured function replays."""
    assert jit.captured is not None
    bodies = [call.src[0] for call in jit.captured.linear.src]
    return [graph_cache[body] for body in bodies if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"]


def test_a_graph_takes_changed_inputs_and_extents(fake: Fake):
    jit = TinyJit(lambda x, n: ((x[:n] * 2).contiguous() + n).sum(1).contiguous().realize())
    for n in (3, 4, 5, 40, 1, 17):
        x = np.random.default_rng(n).integers(-9, 9, (40, 16)).astype(np.float32)
        equal(jit(Tensor(x).realize(), Variable("n", 1, 40).bind(n))[:n], (x[:n] * 2 + n).sum(1))
    (graph,) = graphs(jit)
    assert isinstance(graph, NVGraph)
    assert isinstance(graph.executable, CUDAExecutable)
    assert fake.calls["cuGraphLaunch"] == 5, "the second call captures and replays"


def test_a_window_of_l2_reaches_eager_launches_and_graphs(fake: Fake):
    weight, device = Tensor(floats(64)).realize(), Device["CUDA"]
    jit = TinyJit(lambda x: (((x + 1).contiguous() - 1).contiguous() * weight).realize())
    for seed in range(3): jit(Tensor(floats(64) + seed).realize())
    made = plan(device.driver.properties, [tensor_range(weight)], 1 << 30)
    assert made.window is not None
    before = fake.calls["cuGraphKernelNodeSetAttribute"]
    with persisting(device, made):
        near(jit(Tensor(floats(64)).realize()), floats(64) ** 2, 1e-6)
        equal((weight + 1).realize(), floats(64) + 1)
    assert fake.calls["cuGraphKernelNodeSetAttribute"] > before
    near(jit(Tensor(floats(64)).realize()), floats(64) ** 2, 1e-6)


# **** several GPUs ****

def test_devices_have_numbers_and_memories_of_their_own():
    with cuda(gpus=3):
        x = floats(6, 6)
        there = (Tensor(x, device="CUDA:2") + 1).realize()
        equal((there.to("CUDA:1").to("CUDA") * 2).realize(), (x + 1) * 2)
        drivers = [Device[name].driver for name in ("CUDA", "CUDA:1", "CUDA:2")]
        assert [driver.ordinal for driver in drivers] == [0, 1, 2]
        assert all(isinstance(driver, CUDADriver) for driver in drivers)
        assert isinstance(Device["CUDA:2"], CUDADevice)


def test_shards():
    with cuda(gpus=2):
        x, names = floats(8, 6), ("CUDA", "CUDA:1")
        sharded = Tensor(x).shard(names, 0)
        near(sharded.sum(0), x.astype(np.float64).sum(0), 1e-6)
        near(sharded @ Tensor(x.T).shard(names), x.astype(np.float64) @ x.T, 1e-6)


def test_a_copy_is_behind_what_made_it_and_before_what_replaces_it():
    with cuda(gpus=2):
        state, wanted = Tensor(floats(64)).realize(), floats(64)
        for step in range(4):
            there = (state.to("CUDA:1") + step).realize()
            state.assign(state * 2).realize()
            equal(there, wanted + step)
            wanted = wanted * 2


def test_copies_between_devices_of_other_kinds():
    with cuda():
        x = floats(100)
        equal(Tensor(x, device="CPU").to("CUDA").realize().to("EMU").realize().to("CPU"), x)


# **** a language model ****

@pytest.mark.slow
@pytest.mark.sampled(1)
def test_a_language_model_says_what_it_says_on_the_cpu(fake: Fake, tiny: Path):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompt = [5, 9, 20, 31, 7]
    cpu, ours = (LLM(tiny, device=device, max_num_seqs=1, num_pages=20).complete(prompt, params)
                 for device in ("CPU", "CUDA"))
    assert cpu.token_ids == ours.token_ids
    assert fake.calls["cuGraphLaunch"]
