"""Decode attention on the emulator against float64: lengths around edges of pages and splits, rows, heads,
windows, layouts, dtypes; and where the answer is known, bit for bit."""
from __future__ import annotations

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.decode_case import SMALL, checked, decode, requests, run

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
