"""Decode attention on the emulator against float64: lengths around edges of pages and splits, rows, heads,
windows, layouts, dtypes; and where the answer is known, bit for bit. Keys and values of 8 bits, other
scores, sinks and chunks, the last two on this processor, too."""
from __future__ import annotations

import math

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.cpu.cpu_decode_case import near as near_on_cpu
from tests.support.cpu.cpu_decode_case import run as run_on_cpu
from tests.support.tile.decode_case import SMALL, Given, checked, decode, every_number, near, requests, run
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import Constant, Expression, Position, Sum, tanh, where

# pages of 16, splits of 128 keys at least, 64 keys at a time
EDGES = [[0, 1, 15, 16, 17], [63, 64, 65, 127, 128], [129, 255, 256, 257, 383], [511, 512, 513, 639, 640]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_lengths_around_edges(seed: int, arch: str):
    """Up to ten tiles from a ring of two or three stages."""
    spec = decode(batch=5, heads=2, group=4, d=128, pages=40)
    checked(spec, EDGES[seed], SMALL.stages(2 + seed % 2), arch, seed)


@pytest.mark.parametrize("s_q", range(1, 9))
def test_rows_of_a_request(s_q: int):
    """The last rows of a request, also where it is shorter than they are many."""
    checked(decode(batch=3, group=2, s_q=s_q, pages=20, rows_order=["brh", "bhr"][s_q % 2]),
            [s_q // 2, s_q, 300])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("group", "s_q", "warps"), [(1, 1, 1), (7, 1, 1), (16, 1, 1), (5, 4, 1), (8, 4, 2),
                                                     (8, 8, 4), (3, 7, 2), (16, 8, 4)])
def test_heads_and_rows_are_packed(group: int, s_q: int, warps: int):
    """Into blocks of 16 rows for each warp along them."""
    schedule = SMALL.warps(warps, 4 // warps)
    checked(decode(heads=2, group=group, s_q=s_q, pages=20), [290], schedule, "sm_90a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(("order", "warps"), [("ths", 1), ("hts", 1), ("both", 4)])
def test_page_sizes_and_layouts(page_size: int, order: str, warps: int):
    schedule = SMALL.warps(warps, 4 // warps)
    spec = decode(batch=2, heads=2, group=4, page_size=page_size, pages=-(-530 // page_size), order=order)
    checked(spec, [page_size + 1, 530], schedule, together=order == "both")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("d", [16, 32, 48, 80, 96, 128, 192, 256])
def test_heads_of_all_widths(d: int):
    checked(decode(batch=2, group=2, d=d, pages=20, dtype=dtypes.float16), [33, 300])


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (64, 256), (32, 64), (128, 16)])
def test_values_of_another_width(d: int, d_v: int):
    checked(decode(batch=2, heads=2, group=2, d=d, d_v=d_v, pages=20), [33, 300])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 200, 1000])
@pytest.mark.parametrize("s_q", [1, 3])
def test_sliding_windows(window: int, s_q: int):
    """Pages that have left the window are not read, nor their entries in the table."""
    checked(decode(batch=4, group=2, s_q=s_q, pages=40, window=window), [2, 65, 300, 639])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gap", [2, 4, 6, 8])
@pytest.mark.parametrize("kv", [None, dtypes.int8])
@pytest.mark.parametrize("order", ["ths", "hts"])
def test_elements_between_rows(gap: int, kv: DType | None, order: str):
    """Results that begin at multiples of 4 bytes and more; they are left alone."""
    if kv is not None: gap *= 2
    checked(decode(batch=2, heads=2, group=3, s_q=2, pages=20, kv=kv, gap=gap, order=order), [33, 300])


@pytest.mark.parametrize("keys", [16, 32, 64])
def test_tiles_of_more_keys(keys: int):
    checked(decode(batch=2, heads=2, group=2, pages=40, page_size=8), [66, 320], SMALL.keys(4 * keys))


@pytest.mark.parametrize("window", [None, 100])
def test_one_visible_key_is_its_value(window: int | None):
    """A weight of 1, whatever the score is: the bits of the value."""
    spec = decode(batch=2, heads=2, group=3, pages=20, window=1 if window is None else None)
    given = requests(spec, [300, 17] if window is None else [1, 0])
    got = run(spec, given)
    for b, length in enumerate(given.lengths):
        if length == 0:
            assert not got[b].any()
            continue
        page = int(given.storages["table"][b, (length - 1) // 16])
        value = given.storages["v"].view(-1, 16, 2, 64)[page, (length - 1) % 16]
        assert torch.equal(got[b], value[:, None, None].expand(2, 3, 1, 64))


def test_equal_scores_are_a_mean():
    """Of integers, over a power of two of keys, in several splits: exact."""
    spec = decode(batch=3, heads=2, group=2, pages=40)
    given = requests(spec, [64, 256, 512])
    given.storages["q"].zero_()
    v = given.storages["v"]
    v.copy_(torch.where(v.isnan(), v, torch.arange(len(v)) * 37 % 17 - 8))
    got = run(spec, given).double()
    for b, length in enumerate(given.lengths):
        pages = given.storages["table"][b, :-(-length // 16)].long()
        mean = v.view(-1, 16, 2, 64)[pages].reshape(length, 2, 64).double().mean(0)
        assert torch.equal(got[b], mean[:, None, None].to(torch.bfloat16).double().expand(2, 2, 1, 64))


@pytest.mark.parametrize("size", [1e4, 1e8])
def test_very_large_scores(size: float):
    """One key takes all: its value, and no infinity."""
    spec = decode(batch=2, group=2, pages=20)
    given = requests(spec, [200, 3], scale=size)
    for name in "kv": given.storages[name].clamp_(-3e38, 3e38)
    got = run(spec, given)
    assert torch.isfinite(got).all()
    assert got.any()


BYTES = [dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2]
WIDE = [dtypes.bfloat16, dtypes.float16]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", BYTES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_with_scales(kv: DType, dtype: DType, seed: int):
    """Up to ten tiles from a ring of two or three stages."""
    spec = decode(batch=4, heads=2, group=4, d=128, pages=40, page_size=16, dtype=dtype, kv=kv)
    checked(spec, [[0, 1, 15, 16], [17, 127, 128, 129], [255, 256, 257, 383], [511, 512, 639, 640]][seed],
            SMALL.stages(2 + seed % 2), ["sm_80", "sm_90a"][seed // 2], seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", [*BYTES[:2], pytest.param(BYTES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [8, 32, 256])
@pytest.mark.parametrize(("d", "d_v", "order", "warps"), [(32, 64, "hts", 1), (64, 32, "ths", 2),
                                                          (96, 256, "ths", 4), (256, 128, "hts", 1)])
def test_layouts_of_bytes(kv: DType, page_size: int, d: int, d_v: int, order: str, warps: int):
    spec = decode(batch=2, heads=2, group=5, s_q=warps, d=d, d_v=d_v, page_size=page_size,
                  pages=-(-300 // page_size), kv=kv, order=order)
    checked(spec, [page_size - 1, 300], SMALL.warps(warps, 4 // warps))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", BYTES)
@pytest.mark.parametrize("dtype", WIDE)
def test_every_byte_is_its_number(kv: DType, dtype: DType):
    """One visible key: its value times its scale, a power of two, bit for bit."""
    spec, given, wanted = every_number(kv, dtype)
    assert torch.equal(run(spec, given).reshape(256).float(), wanted)


def test_scales_of_any_size():
    """Weights of float16 stay in range: they are scaled relative to the largest scale."""
    spec = decode(batch=2, heads=2, group=2, pages=20, kv=dtypes.int8, dtype=dtypes.float16)
    for scale in (1e-6, 1.0):
        given = requests(spec, [300, 40])
        given.storages["v_scale"] *= scale
        near(spec, given, run(spec, given))


def test_scales_of_zero():
    spec = decode(pages=20, kv=dtypes.int8)
    given = requests(spec, [300])
    given.storages["v_scale"].mul_(0)
    assert not run(spec, given).any()


def soft_cap(cap: float) -> Expression: return tanh(Sum() * (1 / (8 * cap))) * cap


def alibi() -> Expression:
    """A slope of 2^−(1 + head), of the distance."""
    head = (Position(1) * 6 + Position(2) + 1).cast(dtypes.float32)
    distance = (Position("n") - Position("m")).cast(dtypes.float32)
    return Sum() * 0.125 + distance * (head * -1.0).exp2()


def prefix() -> Expression:
    """All keys of the first request, the first ten of others."""
    first = where(Position(0) < Constant(1, dtypes.int32), Sum(), -math.inf)
    return where(Position("n") < Constant(10, dtypes.int32), Sum() * 0.25, first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("score", [Sum(), Sum() * -0.1, 0.5 * (Sum() * 0.3), soft_cap(5.0), soft_cap(50.0),
                                   alibi(), prefix()])
@pytest.mark.parametrize("kv", [None, dtypes.int8])
@pytest.mark.parametrize("window", [None, 90])
def test_scores(score: Expression, kv: DType | None, window: int | None):
    spec = decode(batch=3, heads=2, group=6, s_q=2, pages=20, kv=kv, score=score, window=window)
    checked(spec, [5, 290, 64], scale=0.3)


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
