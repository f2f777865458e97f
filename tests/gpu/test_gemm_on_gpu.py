"""The suites of tests/emu on a GPU: products and schedules drawn together, every kind of schedule, rows known
at launch, and products as large as models have them."""
from __future__ import annotations

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.emu.tile.gemm import test_gemm_generated as generated
from tests.support.tile.gemm_case import arguments, product, run
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.gpu
TEMPLATES = sorted(generated.ARCHS)


@pytest.fixture
def arch(on_device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cases are drawn for the architecture of the GPU; templates that it cannot run draw none."""
    able = [name for name, archs in generated.ARCHS.items() if name != "wgmma" or on_device in archs]
    monkeypatch.setattr(generated, "ARCHS", dict.fromkeys(able, (on_device,)))
    return on_device


@pytest.mark.parametrize("template", TEMPLATES)
def test_integers_come_out_exactly_on_the_gpu(arch: str, template: str):
    if template in generated.ARCHS:
        generated.generated(template, 300, generated.exactly, generated.EXACT, False)


@pytest.mark.parametrize("template", TEMPLATES)
def test_random_values_come_out_closely_on_the_gpu(arch: str, template: str):
    if template in generated.ARCHS:
        generated.generated(template, 100, generated.close, tuple(generated.ACTIVATIONS), False)


@pytest.mark.parametrize("name", generated.NAMED)
def test_each_kind_of_schedule_on_the_gpu(arch: str, name: str):
    if generated.NAMED[name].template in generated.ARCHS:
        generated.test_each_kind_of_schedule_goes_round_its_ring(name, 0)


@pytest.mark.parametrize("majors", ["KK", "KM", "MK", "MM"])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
@pytest.mark.parametrize("extents", [(4096, 4096, 4096), (1000, 6144, 4096), (1, 14336, 4096),
                                     (16, 4096, 14336)])
def test_large_products_are_those_of_torch(arch: str, extents: tuple[int, int, int], dtype: DType,
                                           majors: str):
    """Integers from -1 to 1: sums stay whole in float32, so that the order of additions does not matter."""
    spec = product(*extents, dtype, dtypes.float32, majors)
    schedule = choose(spec, GPU(arch, torch.cuda.get_device_properties(0).multi_processor_count))
    assert schedule is not None
    given = arguments(spec, most=1)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch)
    a, b = (torch.as_strided(given[name].cuda().double(), extent, strides)
            for name, extent, strides in (("a", (spec.m, spec.k), (spec.a.mn, spec.a.k)),
                                          ("b", (spec.n, spec.k), (spec.b.mn, spec.b.k))))
    assert torch.equal(got.cuda(), a @ b.T)
