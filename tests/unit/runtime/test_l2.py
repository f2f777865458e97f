"""What is kept in L2: the policy against all windows there are, its reasons, and its limits."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinygrad_nv.runtime.driver import Window
from tinygrad_nv.runtime.emulated.driver import properties
from tinygrad_nv.runtime.l2 import MIB, MOST_RANGES, Range, plan

H100 = properties("sm_90a")     # 50 MiB of L2, 37.5 of them can be set aside, windows of at most 128
ASIDE = H100.persisting_l2_limit
# few bytes, so that every window there is can be tried; what is saved is compared in whole ones
SMALL = replace(H100, l2_bytes=8, persisting_l2_limit=6, window_limit=20)


def test_a_range_that_fits_stays_whole():
    made = plan(H100, [Range(1 << 32, 20 * MIB)], step_bytes=500 * MIB)
    assert made.window == Window(1 << 32, 20 * MIB, 1.0)
    assert made.set_aside_bytes == 20 * MIB
    assert made.saved_bytes == 20 * MIB
    assert made.reason == "20 MiB of L2 keep 100% of 20 MiB: 20 MiB a step less from HBM"


def test_of_a_longer_range_as_many_lines_as_fit():
    made = plan(H100, [Range(0, 100 * MIB, reads=2)], step_bytes=500 * MIB)
    assert made.set_aside_bytes == ASIDE
    assert made.window == Window(0, 100 * MIB, ASIDE / (100 * MIB))
    assert made.saved_bytes == pytest.approx(2 * ASIDE)
    assert made.reason == "37.5 MiB of L2 keep 38% of 100 MiB: 75 MiB a step less from HBM"


def test_no_window_is_longer_than_the_device_allows():
    made = plan(H100, [Range(0, 1000 * MIB)])
    assert made.window == Window(0, H100.window_limit, ASIDE / H100.window_limit)
    assert made.saved_bytes == pytest.approx(ASIDE)


def test_one_window_so_what_lies_together_is_kept():
    apart = [Range(i * 1000 * MIB, 10 * MIB) for i in range(3)]
    together = [Range(i * 10 * MIB, 10 * MIB, allocation=0) for i in range(3)]
    assert plan(H100, apart, 500 * MIB).saved_bytes == 10 * MIB
    assert plan(H100, together, 500 * MIB).saved_bytes == 30 * MIB


def test_what_lies_between_takes_its_share():
    pages = [Range(0, 10 * MIB, allocation=0), Range(30 * MIB, 10 * MIB, allocation=0)]
    made = plan(H100, pages, 500 * MIB)
    assert made.window == Window(0, 40 * MIB, ASIDE / (40 * MIB))
    assert made.saved_bytes == pytest.approx(20 * MIB * ASIDE / (40 * MIB))
    far = [pages[0], replace(pages[1], address=90 * MIB)]
    assert plan(H100, far, 500 * MIB).window == Window(0, 10 * MIB, 1.0)


def test_pages_that_are_read_more_often_come_first():
    made = plan(H100, [Range(0, ASIDE), Range(1 << 32, ASIDE, reads=3)], 500 * MIB)
    assert made.window == Window(1 << 32, ASIDE, 1.0)
    assert made.saved_bytes == 3 * ASIDE


def test_many_pages_take_little_time():
    pages = [Range(i * 64 << 10, 64 << 10, 1 + i % 7 // 6, allocation=0) for i in range(20 * MOST_RANGES)]
    made = plan(H100, pages, 1 << 32)
    assert made.window is not None
    assert made.saved_bytes == pytest.approx(ASIDE * 8 / 7, rel=0.02)


NONE_ASIDE = "emulated sm_90a (sm_90a) sets no L2 aside"
KEPT = "MiB, and L2 (50 MiB) keeps the ranges from one read to the next as it is"


@pytest.mark.parametrize(("limits", "ranges", "step", "reason"), [
    (H100, [], 0, "there is nothing to keep"),
    (replace(H100, persisting_l2_limit=0), [Range(0, MIB)], 1 << 30, NONE_ASIDE),
    (replace(H100, window_limit=0), [Range(0, MIB)], 1 << 30, NONE_ASIDE),
    (H100, [Range(0, 40 * MIB)], 0, f"a step reads 40 {KEPT}"),
    # read ten times a step, so 40 MiB pass between two reads
    (H100, [Range(0, MIB, reads=10)], 400 * MIB, f"a step reads 400 {KEPT}"),
    (H100, [Range(0, 60 * MIB, reads=0)], 1 << 30, "nothing is read")])
def test_without_a_window_there_is_a_reason(limits, ranges, step, reason):
    made = plan(limits, ranges, step)
    assert (made.window, made.set_aside_bytes, made.saved_bytes) == (None, 0, 0)
    assert made.reason == reason


piece = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 3), st.sampled_from([0, 1]))
pieces = st.lists(piece, min_size=1, max_size=4)


@given(pieces)
@example([(19, 12, 1, 0), (21, 4, 1, 0), (30, 1, 3, 0)])    # 9.5 bytes and 10.2: both are 10 whole ones
def test_no_other_window_saves_more(pieces: list[tuple[int, int, int, int]]):
    ranges = [Range(1000 * where + start, nbytes, reads, where) for start, nbytes, reads, where in pieces]
    made = plan(SMALL, ranges, step_bytes=1 << 20)

    def saved(start: int, nbytes: int) -> float:
        inside = sum(r.reads * max(0, min(r.end, start + nbytes) - max(r.address, start)) for r in ranges)
        return inside * min(1, SMALL.persisting_l2_limit / nbytes)
    best = max(saved(1000 * where + start, nbytes) for where in (0, 1) for start in range(52)
               for nbytes in range(1, SMALL.window_limit + 1))
    # windows are compared by whole bytes
    assert best - 1 < made.saved_bytes <= best + 1e-6
    if made.window is not None:
        assert saved(made.window.address, made.window.nbytes) == pytest.approx(made.saved_bytes)
        assert made.window.nbytes <= SMALL.window_limit
        assert made.set_aside_bytes == min(made.window.nbytes, SMALL.persisting_l2_limit)
        assert made.window.hit_ratio * made.window.nbytes <= SMALL.persisting_l2_limit * (1 + 1e-9)
