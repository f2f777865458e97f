"""Decode attention with sinks and with chunks of keys, on the emulator and on this processor."""
from __future__ import annotations

import pytest
import torch
from tinygrad import dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_decode_case import near as near_on_cpu
from tests.support.cpu.cpu_decode_case import run as run_on_cpu
from tests.support.tile.decode_case import SMALL, Given, checked, decode, near, requests, run
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec

ONE = SMALL.split(1, 1024)      # no request is divided


def on_cpu(spec: DecodeSpec, given: Given) -> None:
    """A request's keys in one unit, and divided."""
    for divided in (False, True): near_on_cpu(spec, given, run_on_cpu(spec, given, divided=divided))


@pytest.mark.parametrize(("schedule", "arch"), [(SMALL, "sm_80"), (ONE, "sm_90a")])
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, pytest.param(dtypes.float16, marks=pytest.mark.slow)])
def test_sinks(schedule: Decode, arch: str, dtype: DType):
    """Of one split and of several, also where nothing is seen."""
    spec = decode(batch=5, heads=2, group=3, s_q=2, pages=40, dtype=dtype, sinks=True)
    got = checked(spec, [0, 1, 130, 300, 640], schedule, arch)
    assert not got[0].any()


def test_sinks_on_a_cpu():
    for dtype in (dtypes.float32, dtypes.bfloat16):
        spec = decode(batch=4, heads=2, group=3, s_q=2, d=40, pages=40, dtype=dtype, sinks=True)
        on_cpu(spec, requests(spec, [0, 1, 130, 640]))


@pytest.mark.parametrize("window", [17, pytest.param(128, marks=pytest.mark.slow)])
def test_sinks_in_a_window(window: int):
    spec = decode(batch=3, heads=1, group=8, s_q=3, pages=40, window=window, sinks=True)
    checked(spec, [2, 129, 640])
    on_cpu(spec, requests(spec, [2, 129, 640]))


def test_sinks_of_bytes():
    """The sink is no value's: scales of values do not scale it."""
    checked(decode(batch=2, heads=2, group=2, pages=20, kv=dtypes.int8, sinks=True), [300, 40])


@pytest.mark.parametrize("schedule", [SMALL, ONE])
def test_sinks_of_any_size(schedule: Decode):
    """−∞ is none; large ones leave nothing; beside −10³⁸ nothing is lost."""
    spec = decode(batch=3, heads=2, group=3, pages=40, sinks=True)
    given = requests(spec, [0, 30, 600])
    given.storages["sinks"][:] = torch.tensor([[-torch.inf, 1e30, 3.4e38], [-3.4e38, 20.0, 0.0]])
    got = run(spec, given, schedule)
    near(spec, given, got)
    on_cpu(spec, given)
    assert not got[:, 0, 1:].any()
    given.storages["sinks"][:] += 1
    with pytest.raises(AssertionError, match="above the bound"): near(spec, given, got)


def test_a_sink_of_minus_infinity_changes_no_bit():
    spec = decode(batch=2, heads=2, group=2, pages=40, sinks=True)
    given = requests(spec, [600, 9])
    given.storages["sinks"][:] = -torch.inf
    plain = decode(batch=2, heads=2, group=2, pages=40)
    without = requests(plain, [600, 9])
    for name in ("q", "k", "v", "table"): without.storages[name] = given.storages[name]
    assert torch.equal(run(spec, given), run(plain, without))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "s_q"), [(24, 1), (100, 8), pytest.param(64, 5, marks=pytest.mark.slow)])
def test_chunks(size: int, s_q: int):
    """Rows on both sides of a chunk's end."""
    spec = decode(batch=4, heads=1, group=2, s_q=s_q, pages=20, window=size, chunked=True)
    lengths = [size - 1, size, size + 3, 3 * size + 1]
    checked(spec, lengths)
    on_cpu(spec, requests(spec, lengths))


def test_chunks_are_refused_without_a_size():
    with pytest.raises(SpecError, match="chunks without a window"): decode(chunked=True)
