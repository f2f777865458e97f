"""Products and attentions of ours through drivers: CUDADriver over the fake library, and what
tests/gpu/test_attention_on_gpu.py puts in the emulator's place, with the emulated one."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.runtime import on_driver
from tests.support.runtime.cuda_fake import Fake, installed
from tests.support.tile import attention_case, backward_case, decode_case
from tests.support.tile.gemm_case import arguments, bits, product, reference
from tinygrad_nv.errors import KernelError
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Fill, Launch, Work, map_spec, pointer
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

M = 130
W = Wgmma().block(128, 64).stages(3)
SCHEDULES = {"cluster": W.cluster(2, 1), "split": W.split(2), "streamed": W.stream_k()}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with installed() as fake: yield fake


class Chain:
    """y = (x @ w.T) @ v.T, as two launches of a schedule."""

    def __init__(self, gpu: CUDADriver, schedule: GemmSchedule) -> None:
        self.gpu = gpu
        self.specs = [product(M, 128, 128), product(M, 64, 128)]
        self.given = [arguments(spec, seed, most=1) for seed, spec in enumerate(self.specs)]
        self.x, self.h, self.y = (self.put(bits(t)) for t in (
            self.given[0]["a"], self.given[0]["out"], self.given[1]["out"]))
        w, v = (self.put(bits(given["b"])) for given in self.given)
        self.works = [*self.made(0, schedule, self.h, self.x, w), *self.made(1, schedule, self.y, self.h, v)]

    def put(self, data: np.ndarray) -> int:
        address = self.gpu.alloc(data.nbytes)
        self.gpu.copy_in(address, memoryview(data))
        return address

    def made(self, which: int, schedule: GemmSchedule, out: int, a: int, b: int) -> list[Work]:
        """The fill of its flags and the launch of a product."""
        kernel: GemmKernel = TABLE.build(self.specs[which], schedule, GPU("sm_90a", 8))
        order, fills = [out], []
        if kernel.workspace_bytes:
            order += [self.gpu.alloc(kernel.workspace_bytes), self.gpu.alloc(4 * max(1, kernel.flags))]
            fills = [Fill(order[-1], 0, 4 * max(1, kernel.flags))]
        order += [a, b]
        maps = [self.gpu.tensor_map(map_spec(m, order[m.pointer])) for m in kernel.maps]
        function = self.gpu.load(kernel.ptx.encode()).function(kernel.name)
        args = (*map(pointer, order), *maps)
        return [*fills, Launch(function, kernel.grid_for(M), (kernel.threads, 1, 1), args,
                               kernel.dynamic_smem, kernel.cluster, kernel.pdl)]

    def check(self) -> None:
        """The result is exact."""
        out = self.given[1]["out"].clone()
        self.gpu.copy_out(memoryview(out.view(torch.uint8).numpy()), self.y)
        hidden = reference(self.specs[0], self.given[0]).to(torch.bfloat16)
        wanted = reference(self.specs[1], {**self.given[1], "a": hidden.reshape(-1)})
        assert torch.equal(out.double().reshape(wanted.shape), wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("way", ["stream", "capture", "graph"])
def test_products_one_after_the_other(fake: Fake, name: str, way: str):
    gpu = CUDADriver()
    chain = Chain(gpu, SCHEDULES[name])
    if way == "stream":
        for work in chain.works: gpu.submit(work)
    elif way == "capture":
        gpu.begin_capture(stream := gpu.stream())
        for work in chain.works: gpu.submit(work, stream)
        gpu.end_capture(stream).instantiate().launch()
    else:
        graph, nodes = gpu.graph(), []
        for work in chain.works: nodes.append(graph.add(work, nodes))
        ready = graph.instantiate()
        for node, work in zip(nodes, chain.works, strict=True): ready.update(node, work)
        ready.launch()
        ready.launch()
    chain.check()
    gpu.close()
    del chain
    assert fake.left() == {}


def test_a_product_that_waits_for_nothing_is_found(fake: Fake):
    gpu = CUDADriver()
    chain, graph = Chain(gpu, SCHEDULES["cluster"]), gpu.graph()
    for work in chain.works: graph.add(work)
    graph.instantiate().launch()
    with pytest.raises(KernelError, match="nothing orders"): gpu.synchronize()
    gpu.close()


@pytest.fixture(params=["sm_80", "sm_90a"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    on_driver.put(monkeypatch, EmulatedDriver(request.param))
    return request.param


@pytest.mark.parametrize("extents", [{}, {"s_q": 3, "s_kv": 70}], ids=["whole", "symbolic"])
def test_attention(arch: str, extents: dict[str, int]):
    spec = attention_case.attention(40, 100, heads=2, group=2, band=Band(last=60), lse=True,
                                    symbolic=tuple(extents))
    schedule = ATTENTION.choose(spec, GPU(arch))
    assert schedule is not None
    given = attention_case.arguments(spec)
    got = attention_case.run(TABLE.build(spec, schedule, GPU(arch, 4)), spec, given, arch, **extents)
    attention_case.near(spec, given, got, **extents)
    with pytest.raises(AssertionError): attention_case.near(spec, given, (got[0] * 1.1, got[1]), **extents)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(arch: str, deterministic: bool):
    spec = backward_case.backward(70, 100, heads=2, group=2, band=Band(last=60), deterministic=deterministic)
    schedule = ATTENTION.choose(spec, GPU(arch))
    assert schedule is not None
    given = backward_case.arguments(spec)
    got = backward_case.run(TABLE.build(spec, schedule, GPU(arch, 4)), spec, given, arch)
    backward_case.near(spec, given, got)


def test_decode(arch: str):
    decode_case.checked(decode_case.decode(batch=3, heads=2, group=2, pages=20), [0, 17, 300], arch=arch)
