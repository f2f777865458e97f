"""The ring of stages: counts that its barriers are made with follow from who reads and writes."""
from __future__ import annotations

import re

import pytest

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline


def kernel() -> Kernel: return Kernel("rings", threads=384, min_ctas=1)


def counts(k: Kernel) -> list[int]:
    """Arrivals of the barriers as they are initialised."""
    return [int(found) for found in re.findall(r"mbarrier\.init\.\S+ \[\w+(?:\+\d+)?\], (\d+);", k.ptx())]


@pytest.mark.parametrize(("depth", "warps", "peers"), [(2, 4, 1), (4, 8, 1), (7, 12, 3), (3, 4, 5)])
def test_a_slot_is_free_when_every_warp_that_reads_it_has_arrived(depth: int, warps: int, peers: int):
    """The producer's one arrival for each full stage; for each empty one the warps of every CTA reached."""
    k = kernel()
    Pipeline(k, depth, 1024, warps, peers).init()
    assert counts(k) == [count for _ in range(depth) for count in (1, warps * peers)]


def test_a_turn_is_given_by_every_warp():
    k = kernel()
    OrderedBarrier(k, 3, 4).init()
    assert counts(k) == [4, 4, 4]


def test_a_producer_names_the_bytes_of_a_stage():
    k = kernel()
    ring = Pipeline(k, 4, 49152, 8)
    ring.acquire(ring.cursor(producer=True))
    assert re.search(r"arrive\.expect_tx\.\S+ _, \[%u\d+\], 49152;", k.ptx())


def test_producers_pass_on_fresh_barriers_and_readers_wait():
    k = kernel()
    ring = Pipeline(k, 2, 16, 4)
    stages = [ring.cursor(producer) for producer in (True, False)]
    text = k.ptx()
    for cursor, parity in zip(stages, (1, 0), strict=True):
        assert f"mov.u32 {cursor.parity}, {parity};" in text
        assert f"mov.u32 {cursor.stage}, 0;" in text


@pytest.mark.parametrize(("count", "stage", "flips"), [(0, 0, 0), (3, 3, 0), (4, 0, 1), (11, 3, 2)])
def test_skipping_stages_counts_rounds(count: int, stage: int, flips: int):
    """Of a ring of 4: what is added to the stage, and how often the parity turns besides the wrap."""
    k = kernel()
    cursor = Pipeline(k, 4, 16, 4).cursor()
    before = k.ptx()
    cursor.skip(count)
    added = k.ptx().removeprefix(before[:before.index("{")])
    assert f"add.u32 {cursor.stage}, {cursor.stage}, {stage};" in added
    assert added.count(f"xor.b32 {cursor.parity}, {cursor.parity}, 1;") == flips % 2


@pytest.mark.parametrize(("peers", "space"), [(1, "cta"), (3, "cluster")])
def test_slots_are_given_back_where_they_came_from(peers: int, space: str):
    k = kernel()
    ring = Pipeline(k, 2, 16, 4, peers)
    rank = k.special("cluster_ctarank") if peers > 1 else None
    lane = k.special("laneid")
    ring.release(ring.empty_barriers(rank), lane, lane < peers)
    assert f"mbarrier.arrive.shared::{space}.b64 _" in k.ptx()
    assert ("mapa" in k.ptx()) == (peers > 1)
