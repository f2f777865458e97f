"""Ragged batches through the templates of attention: lengths, bands, scores; sequences do not meet."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tests.support.tile.flash_case import CAUSAL, F16, F32, W, mma
from tests.support.tile.ragged_case import Case, Given, arguments, near, ragged, run
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Expression, Load, Position, Sum, tanh
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SMALL = mma(32, 32, 2)
# block edges ± 1, none at all, more rows than keys, at least four blocks of keys
LENGTHS = [(40, 140), (1, 1), (0, 20), (20, 0), (31, 33), (32, 32), (33, 31), (0, 0), (64, 5), (2, 129)]


def close(case: Case, schedule: Schedule = SMALL, arch: str = "sm_80", seed: int = 0) -> None:
    """Asserts that every sequence of a random batch is near its own attention."""
    given = arguments(case, seed)
    near(case, given, run(TABLE.build(case.spec, schedule, GPU(arch)), case, given, arch, seed))


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 0), Band(-40, 10), Band(3, None)], ids=str)
def test_bands(band: Band):
    """Aligned at their ends: rows that stand before the first key see nothing of a causal band."""
    close(ragged(LENGTHS, 32, heads=2, group=2, band=band, slack=3), seed=len(str(band)) % 4)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rings(arch: str, stages: int):
    close(ragged([(17, 16 * stages * 3 - 5), (40, 16), (3, 16 * (stages + 2))], 64, F16, band=CAUSAL),
          mma(32, 16, 2, stages), arch, stages % 4)


@pytest.mark.parametrize(("d", "d_v", "out", "gap"),
                         [(72, 40, F32, 0), (128, 128, None, 4), (24, 64, F16, 8)])
def test_heads_and_results(d: int, d_v: int, out: DType | None, gap: int):
    close(ragged(LENGTHS, d, heads=2, band=CAUSAL, d_v=d_v, out=out, gap=gap, more=7, lse=gap > 0))


SCALED = Sum() * 0.125
SCORES: dict[str, Expression] = {
    "soft-cap": tanh(SCALED * 0.2) * 5.0,
    "bias": SCALED + Load(0, F32, 140, 1, (64 * 140, 7, 0)),
    "ALiBi": SCALED + Load(0, F32, 0, 0, (2, 1, 0)) * (Position("n").cast(F32) - Position("m").cast(F32))}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str):
    """Rows and columns count from the sequence's first, the batch's index is the sequence's number."""
    close(ragged(LENGTHS, 64, heads=2, score=SCORES[name], band=CAUSAL))


def beside(case: Case, storages: Given, number: int) -> Given:
    """The storages with NaN in all rows, of one head of 64, but a sequence's."""
    spoilt = {name: storage.clone() for name, storage in storages.items()}
    for name, begins in (("q", case.begins[0]), ("k", case.begins[1]), ("v", case.begins[1])):
        rows = spoilt[name][:-64].view(-1, 64)  # the last row is of no sequence
        begin, end = begins[number:number + 2]
        rows[:begin], rows[end:] = torch.nan, torch.nan
    return spoilt


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
def test_neighbours_change_no_bit(band: Band):
    """Even if they are NaN."""
    case = ragged(LENGTHS, 64, band=band)
    made, storages = TABLE.build(case.spec, SMALL, GPU("sm_80")), arguments(case)
    usual = run(made, case, storages)
    for number in (0, 4, 5):
        spoilt = run(made, case, beside(case, storages, number))[number]
        for got, expected in zip(spoilt, usual[number], strict=True):
            assert got is not None
            assert expected is not None
            assert torch.equal(got, expected)


def test_a_sequence_alone_has_the_same_bits():
    lengths = [(33, 100), (40, 140), (5, 7)]
    case, alone = ragged(lengths, 64, band=CAUSAL), ragged([lengths[1]], 64, band=CAUSAL)
    storages = arguments(case)
    own = arguments(alone)
    for name, begins in (("q", case.begins[0]), ("k", case.begins[1]), ("v", case.begins[1])):
        own[name] = storages[name][64 * begins[1]:64 * begins[2] + 1].clone()
    many = run(TABLE.build(case.spec, SMALL, GPU("sm_80")), case, storages)[1]
    one = run(TABLE.build(alone.spec, SMALL, GPU("sm_80")), alone, own)[0]
    assert torch.equal(many[0], one[0])


def test_lengths_that_cannot_be_write_nothing_beside_the_results():
    """Of 50 rows there are 40, of -10 none."""
    case = ragged([(40, 70), (0, 20), (10, 30)], 32, heads=2)
    storages = arguments(case)
    storages["cu_q"][1] = 50
    near(case, storages, run(TABLE.build(case.spec, SMALL, GPU("sm_80")), case, storages))


@pytest.mark.parametrize(("d", "gap", "out"), [(64, 0, None), (40, 2, F32), (8, 4, F16), (24, 1, None)])
def test_rows_after_the_last_sequence_are_zeros(d: int, gap: int, out: DType | None):
    """More of them than the grid has rows, too; run asks it."""
    close(replace(ragged([(3, 9), (40, 20)], d, heads=2, group=2, gap=2 * gap, out=out, slack=100), slack=0))


def test_on_hopper_lengths_are_read_after_the_kernel_before():
    made = TABLE.build(ragged(LENGTHS, 64).spec, SMALL, GPU("sm_90a"))
    assert made.pdl
    assert made.ptx.index("griddepcontrol.wait") < made.ptx.index("ld.global")
    assert len(re.findall("griddepcontrol.wait", made.ptx)) == 1


# **** wgmma ****

EDGES = [(70, 200), (1, 1), (0, 20), (20, 0), (63, 65), (64, 64), (65, 63), (0, 0), (130, 5), (2, 257)]


def close_wgmma(case: Case, schedule: Schedule, seed: int = 0) -> None:
    """The same, with wgmma."""
    given = arguments(case, seed)
    near(case, given, run(TABLE.build(case.spec, schedule, GPU("sm_90a")), case, given, "sm_90a", seed))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 10), Band(3, None)], ids=str)
@pytest.mark.parametrize("schedule", [W.block(64, 64).warps(8), W.block(128, 48).stages(3).pingpong()],
                         ids=str)
def test_wgmma(schedule: Schedule, band: Band):
    close_wgmma(ragged(EDGES, 64, group=2, band=band, slack=3), schedule, seed=len(str(band)) % 4)


def test_wgmma_with_everything():
    for name, seed in (("bias", 0), ("ALiBi", 1)):
        close_wgmma(ragged(LENGTHS, 48, F16, heads=2, score=SCORES[name], band=CAUSAL, out=F32, more=3),
                    W.block(64, 64).warps(8), seed)
    close_wgmma(ragged(EDGES, 128, heads=2, group=2, band=CAUSAL, kept=99), W.block(128, 128), 2)


def test_neighbours_change_no_bit_with_wgmma():
    """Even if they are NaN: of keys and values in the block where a sequence ends, and of queries."""
    case = ragged(EDGES, 64, band=CAUSAL)
    made, storages = TABLE.build(case.spec, W.block(64, 64).warps(8), GPU("sm_90a")), arguments(case)
    usual = run(made, case, storages, "sm_90a")
    for number in (0, 4, 6):
        for got, expected in zip(run(made, case, beside(case, storages, number), "sm_90a")[number],
                                 usual[number], strict=True):
            assert got is not None
            assert expected is not None
            assert torch.equal(got, expected)


@pytest.mark.parametrize(("schedule", "arch"), [(SMALL, "sm_80"), (W.block(64, 64).warps(8), "sm_90a")],
                         ids=["mma", "wgmma"])
def test_a_grid_has_room_for_the_rest(schedule: Schedule, arch: str):
    """One more along the batch than sequences, for the rows after the last."""
    spec = ragged([(1, 1)], 64).spec
    assert TABLE.problems(replace(spec, batch=(65534, 1, 1)), schedule, GPU(arch)) == []
    (found,) = TABLE.problems(replace(spec, batch=(65535, 1, 1)), schedule, GPU(arch))
    assert "65536" in found


# **** generated ****

COUNT = st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65]))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(COUNT, COUNT), min_size=1, max_size=5),
       st.sampled_from([FULL, CAUSAL, Band(-9, 4)]),
       st.sampled_from([SMALL, mma(64, 16, 4, 3), mma(16, 64, 1)]), st.integers(0, 3))
def test_generated(lengths: list[tuple[int, int]], band: Band, schedule: Schedule, seed: int):
    close(ragged(lengths, 16 * (seed + 1), heads=1 + seed % 2, group=1 + seed // 2, band=band, slack=seed),
          schedule, seed=seed)
