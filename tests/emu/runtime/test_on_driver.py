"""What tests/gpu/test_attention_on_gpu.py puts in the emulator's place, with the emulated driver."""
from __future__ import annotations

import pytest

from tests.support.runtime import on_driver
from tests.support.tile import attention_case, backward_case, decode_case
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


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
