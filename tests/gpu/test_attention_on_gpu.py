"""The suites of tests/emu on a GPU: attentions, their backward passes and decode attentions, with the default
schedules, and as long as models have them."""
from __future__ import annotations

import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.runtime import on_driver
from tests.support.tile import attention_case, backward_case, decode_case
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.decode.templates import FAMILY as DECODE
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.gpu
BANDS = {"full": FULL, "causal": Band(last=0), "window": Band(-99, 0)}
EXTENTS = [(1, 1), (64, 65), (200, 300), (1000, 1000), (2048, 2048)]


@pytest.fixture
def machine(device: CUDADriver, monkeypatch: pytest.MonkeyPatch) -> GPU:
    """The GPU, in the emulator's place."""
    on_driver.put(monkeypatch, device)
    return GPU(device.properties.arch, device.properties.sm_count)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16])
@pytest.mark.parametrize("d", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_attentions(machine: GPU, extents: tuple[int, int], d: int, dtype: DType, band: str):
    checked(machine, attention_case.attention(*extents, d, dtype, 2, 2, 2, BANDS[band], lse=True))


@pytest.mark.parametrize("at", [{"s_q": 1, "s_kv": 1, "start": 0}, {"s_q": 70, "s_kv": 130, "start": 60}])
def test_symbolic_extents(machine: GPU, at: dict[str, int]):
    spec = attention_case.attention(128, 256, 128, band=Band(last=0), symbolic=tuple(at), start=100)
    checked(machine, spec, **at)


def checked(machine: GPU, spec: AttentionSpec, **extents: int) -> None:
    """Holds the default kernel against float64."""
    schedule = ATTENTION.choose(spec, GPU(machine.arch))
    assert schedule is not None
    given = attention_case.arguments(spec)
    got = attention_case.run(TABLE.build(spec, schedule, machine), spec, given, machine.arch, **extents)
    attention_case.near(spec, given, got, **extents)


@pytest.mark.parametrize("kv", [None, dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2],
                         ids=["16 bits", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
@pytest.mark.parametrize("lengths", [[0, 1, 15, 16, 17], [300, 4000, 2, 1]], ids=str)
def test_decode_attentions(machine: GPU, lengths: list[int], page_size: int, kv: DType | None):
    spec = decode_case.decode(len(lengths), 2, 4, 2, 128, page_size, -(-4096 // page_size), kv=kv)
    schedule = DECODE.choose(spec, GPU(machine.arch))
    assert schedule is not None
    decode_case.checked(spec, lengths, schedule, machine.arch)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_backward_passes(machine: GPU, extents: tuple[int, int], d: int, band: str, deterministic: bool):
    spec = backward_case.backward(*extents, d, batch=2, heads=2, group=2, band=BANDS[band],
                                  deterministic=deterministic)
    given = backward_case.arguments(spec)
    schedule = ATTENTION.choose(spec, GPU(machine.arch))
    assert schedule is not None
    got = backward_case.run(TABLE.build(spec, schedule, machine), spec, given, machine.arch)
    backward_case.near(spec, given, got)
