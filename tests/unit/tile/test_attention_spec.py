"""Attentions as specs, their kernels' grids, and what flash_mma asks of a schedule. The ring of stages:
counts that its barriers are made with follow from who reads and writes."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.tile.attention.mma.plan import FlashMmaPlan
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, Rows, multiple
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Expression, Load, Position, Sum, tanh
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16 = dtypes.bfloat16
CAUSAL = Band(None, 0)
PLAIN = FlashMma().block(64, 64).warps(4).stages(2)


def dense(s_q: int = 100, s_kv: int = 200, d: int = 64, dtype: DType = BF16, d_v: int = 0) -> AttentionSpec:
    """Two batches of four query heads of two key heads."""
    d_v = d_v or d
    def rows(count: int, width: int, group: int) -> Rows:
        head = count * width
        return Rows(dtype, width, (2 * max(group, 1) * head, max(group, 1) * head, head if group else 0))
    return AttentionSpec(s_q, s_kv, d, d_v, rows(s_q, d, 2), rows(s_kv, d, 0), rows(s_kv, d_v, 0),
                         rows(s_q, d_v, 2), (2, 2, 2))


# **** specs ****

@pytest.mark.parametrize(("change", "words"), [
    ({"s_q": 0}, "s_q=0"), ({"d": 264}, "heads of 264 and 64"), ({"start": -1}, "start=-1"),
    ({"batch": (2, 0, 2)}, r"batch\[1\]=0"), ({"symbolic": ("s_kv", "s_q")}, "symbolic"),
    ({"symbolic": ("d",)}, "symbolic"), ({"score": Sum().cast(dtypes.float16)}, "scores of"),
    ({"score": Sum(part=1)}, "in a score"),
    ({"score": Sum() + Position(3).cast(dtypes.float32)}, "dimension of the batch"),
    ({"score": Sum() + Load(1, dtypes.float32, 0, 1)}, "parameters counted from 0")],
    ids=lambda x: str(x)[:40])
def test_what_cannot_be(change: dict[str, object], words: str):
    with pytest.raises(SpecError, match=words): replace(dense(), **change)  # type: ignore[arg-type]


def test_operands_and_results():
    spec = dense()
    with pytest.raises(SpecError, match="attention of f32, bf16, bf16"):
        replace(spec, q=replace(spec.q, dtype=dtypes.float32))
    with pytest.raises(SpecError, match="one of bf16, f16"):
        replace(spec, v=replace(spec.v, dtype=dtypes.float16))
    with pytest.raises(SpecError, match="a float of 16 or 32 bits"):
        replace(spec, out=replace(spec.out, dtype=dtypes.int32))
    with pytest.raises(SpecError, match="stride 0"): replace(spec, k=replace(spec.k, batch=(1, 2, 3)))


@pytest.mark.parametrize(("row", "offset", "nbytes"),
                         [(64, 0, 16), (64, 4, 8), (66, 0, 4), (65, 0, 2), (72, 0, 16)])
def test_alignment_of_rows(row: int, offset: int, nbytes: int):
    assert Rows(BF16, row, (640, 320, 0), offset).alignment_bytes == nbytes


def test_pairs_and_flops():
    """Of a band: by counting."""
    spec = replace(dense(30, 50), start=10)
    for band in (FULL, CAUSAL, Band(-4, 0), Band(None, -15), Band(3, None), Band(-100, 100), Band(50, 60)):
        first = -1000 if band.first is None else band.first
        last = 1000 if band.last is None else band.last
        pairs = sum(first <= column - row - 10 <= last for row in range(30) for column in range(50))
        banded = replace(spec, band=band)
        assert banded.pairs == pairs
        assert banded.flops == 8 * pairs * 2 * 128


def test_words():
    assert [str(band) for band in (FULL, CAUSAL, Band(-9, 0), Band(-9, 3), Band(2, None))] == \
        ["full", "causal", "window 10", "band -9…3", "band 2…"]
    spec = replace(dense(d_v=32), band=CAUSAL, symbolic=("s_q", "start"), score=Sum() * 0.5, start=7)
    assert str(spec) == "2x≤100x200, 4 heads of 2, d 64/32, bf16, causal, from ≤7, (sum * 0.5)"


def test_specs_are_equal_by_what_they_say():
    one = replace(dense(), score=Sum() * 0.5)
    assert one == replace(dense(), score=Sum() * 0.5)
    assert len({one, replace(dense(), score=Sum() * 0.5), dense()}) == 2


# **** kernels ****

def test_grids_follow_the_rows_of_a_launch():
    made = TABLE.build(replace(dense(), symbolic=("s_q",)), PLAIN, GPU("sm_80"))
    assert (made.grid, made.threads) == ((2, 4, 2), 128)
    assert [made.grid_for(rows)[0] for rows in (1, 64, 65, 100)] == [1, 1, 2, 2]
    assert TABLE.build(dense(), PLAIN, GPU("sm_80")).grid_for(1) == (2, 4, 2)
    assert AttentionKernel("x", "", (12, 1, 1), 32, rows_of_cta=16, ctas_of_rows=3).grid_for(17) == (6, 1, 1)


def test_parameters_are_in_order():
    """out, l, operands, those of the score, symbolic extents."""
    spec = replace(dense(), symbolic=("s_q", "s_kv", "start"), lse=True,
                   score=Sum() + Load(0, dtypes.float32, 200, 1) + Load(1, dtypes.float32, 0, 1))
    head = TABLE.build(spec, PLAIN, GPU("sm_80")).ptx.partition("{")[0]
    names = [line.split()[-1].strip(",)") for line in head.splitlines() if ".param" in line]
    assert names == ["out", "l", "q", "k", "v", "x0", "x1", "s_q", "s_kv", "start"]


@pytest.mark.parametrize(("score", "expected"), [
    (Sum(), 1.0), (Sum() * 0.5, 0.5), (0.5 * Sum(), 0.5), (2.0 * (Sum() * 0.25), 0.5), (Sum() * -1.0, None),
    (Sum() * 0.0, None), (Sum() * 1e-30, None), (Sum() * 1e30, None),
    (Sum() + 1.0, None), (tanh(Sum()), None), (Sum() * Sum(), None)], ids=str)
def test_multiples_of_the_sum(score: Expression, expected: float | None):
    assert multiple(score) == expected


# **** schedules ****

@pytest.mark.parametrize(("schedule", "words"), [
    (PLAIN.block(72, 64), "block_m=72 is not a multiple of 4 warps × 16 = 64"),
    (PLAIN.block(64, 48), "block_n=48 is not 16, 32, 64, 128"), (PLAIN.stages(1), "1 stages are not 2 to 8"),
    (PLAIN.warps(3).block(48, 64), "3 warps are not 1, 2, 4, 8 or 16"),
    (PLAIN.block(0, 64), "extents below 1"),
    (PLAIN.stages(8).block(64, 128), r"8 stages × 32768 B and q are 262144 B of shared memory"),
    (PLAIN.block(256, 128), r"64 rows of a warp × \(64 \+ 128\) / 32 lanes = 384 sums")], ids=str)
def test_impossible_schedules(schedule: FlashMma, words: str):
    with pytest.raises(ScheduleError, match=words): TABLE.build(dense(), schedule, GPU("sm_80"))


def test_impossible_attentions():
    spec = dense()
    odd = replace(spec, k=replace(spec.k, row=65))
    assert TABLE.problems(odd, PLAIN, GPU("sm_80")) == [
        "rows of k are aligned to 2 B, cp.async copies 4 and more"]
    assert TABLE.problems(dense(d=60), PLAIN, GPU("sm_80")) == \
        ["d=60 is not a multiple of 8", "d_v=60 is not a multiple of 8"]
    assert TABLE.problems(replace(spec, batch=(1, 40000, 2)), PLAIN, GPU("sm_80")) == \
        ["80000 heads are above 65535, a grid's"]
    assert TABLE.problems(spec, PLAIN, GPU("sm_70")) == ["sm_70 is not sm_80, sm_89, sm_90a"]
    assert ATTENTION.choose(odd, GPU("sm_80")) is None


def test_legality_agrees_with_what_can_be_built():
    """Shared memory is counted as the kernel takes it."""
    for d, m, n, warps, stages in ((64, 64, 64, 4, 2), (128, 128, 64, 4, 2), (256, 64, 32, 4, 2),
                                   (40, 32, 16, 1, 5), (64, 512, 16, 16, 2)):
        schedule = PLAIN.block(m, n).warps(warps).stages(stages)
        made = TABLE.build(dense(d=d), schedule, GPU("sm_80"))
        needed = FlashMmaPlan.of(dense(d=d), schedule).smem_bytes
        assert made.dynamic_smem == (needed if needed > 48 << 10 else 0)


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
