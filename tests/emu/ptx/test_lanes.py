"""Collectives of a warp on the emulator: values against the manual's formulas, lanes that come by different
ways, sets that act apart, and what is wrong to do."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx.lanewise import HEADER, apply, apply1, integers
from tinygrad_nv.ptx.emulator import Emulator

COUNT = 256
FULL = 0xffffffff


def launch(body: str, threads: int = 32, words: int = 1) -> tuple[np.ndarray, list]:
    """One warp (or more) that runs `body` with %lane and %out, the address of its `words` words of output."""
    text = HEADER + f""".shared .align 4 .b32 box[64];
.visible .entry lanes(.param .u64 out) {{
    .reg .b32 %lane, %r<9>; .reg .b64 %out, %rd<9>; .reg .pred %p<9>;
    ld.param.u64 %out, [out]; mov.u32 %lane, %tid.x; mad.wide.u32 %out, %lane, {4 * words}, %out;
    {body}
    ret; }}"""
    emu = Emulator(arch="sm_90a", check=True, seed=0)
    out = emu.alloc(np.zeros(threads * words, np.uint32))
    report = emu.launch(text, grid=(1, 1, 1), block=(threads, 1, 1), args=[out])
    return out.numpy().reshape(threads, words), list(report.findings)


# **** values ****

def shuffled(mode: str, lane: int, by: int, control: int) -> tuple[int, bool]:
    """The lane that shfl reads, and whether it is in range: the manual's pseudocode."""
    by, clamp, segment = by & 31, control & 31, control >> 8 & 31
    limit = (lane & segment) | (clamp & ~segment & 31)
    least = lane & segment
    at = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | (by & ~segment & 31)}[mode]
    valid = at >= limit if mode == "up" else at <= limit
    return (at if valid else lane), valid


@pytest.mark.sampled(12)
@pytest.mark.parametrize("control", [31, 0, 0x1800 | 31, 0x1800 | 7, 0x1000, 0x1e1f, 5])
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str, control: int) -> None:
    """Every mode, with segments and clamps; the predicate says whether the lane was in range."""
    a, by = integers(32, COUNT, 1), np.random.default_rng(2).integers(0, 40, COUNT).astype(np.uint32)
    body = (f"shfl.sync.{mode}.b32 %d0|%d1, %s0, %s1, {control}, -1;"
            f"shfl.sync.{mode}.b32 %d2, %s0, %s1, {control}, -1;")
    got, inside, again = apply(body, [a, by], [np.uint32, np.bool_, np.uint32])
    for i in range(COUNT):
        lane, valid = shuffled(mode, i % 32, int(by[i]), control)
        assert int(got[i]) == int(again[i]) == int(a[i // 32 * 32 + lane])
        assert bool(inside[i]) == valid


# sets that act apart: everybody, two halves, even and odd, three unequal
PARTITIONS = {"all": lambda lane: FULL, "halves": lambda lane: 0xffff << 16 * (lane >> 4),
              "parity": lambda lane: 0x55555555 << (lane & 1), "own": lambda lane: 1 << lane,
              "three": lambda lane: 0x3ff if lane < 10 else 0xfffffc00 & 0x7fffffff if lane < 31 else 1 << 31}


def sets(name: str) -> np.ndarray:
    """Each lane's member mask."""
    return np.array([PARTITIONS[name](i % 32) for i in range(COUNT)], np.uint32)


def members(masks: np.ndarray, i: int) -> list[int]:
    """Elements that act together with element i."""
    return [i // 32 * 32 + lane for lane in range(32) if int(masks[i]) >> lane & 1]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_votes(partition: str) -> None:
    """all, any, uni, ballot."""
    masks = sets(partition)
    random = np.random.default_rng(1)
    p = np.where(np.arange(COUNT) < 64, np.arange(COUNT) < 32, random.integers(8, size=COUNT) > 0)
    body = ("vote.sync.all.pred %d0, %s0, %s1; vote.sync.any.pred %d1, !%s0, %s1;"
            "vote.sync.uni.pred %d2, %s0, %s1;"
            "vote.sync.ballot.b32 %d3, %s0, %s1;")
    every, some, uniform, ballot = apply(body, [p, masks], [np.bool_, np.bool_, np.bool_, np.uint32])
    for i in range(COUNT):
        votes = [bool(p[j]) for j in members(masks, i)]
        assert bool(every[i]) == all(votes)
        assert bool(some[i]) == (not all(votes))
        assert bool(uniform[i]) == (len(set(votes)) == 1)
        assert int(ballot[i]) == sum(1 << j % 32 for j in members(masks, i) if p[j])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_matches(partition: str, bits: int) -> None:
    """match.any and match.all."""
    masks = sets(partition)
    kind = np.uint32 if bits == 32 else np.uint64
    a = np.random.default_rng(2).integers(0, 3, COUNT).astype(kind) << kind(bits - 8)
    a[:64] = 5
    body = f"match.any.sync.b{bits} %d0, %s0, %s1; match.all.sync.b{bits} %d1|%d2, %s0, %s1;"
    equal, all_, agree = apply(body, [a, masks], [np.uint32, np.uint32, np.bool_])
    for i in range(COUNT):
        same = [j for j in members(masks, i) if a[j] == a[i]]
        everybody = same == members(masks, i)
        assert int(equal[i]) == sum(1 << j % 32 for j in same)
        assert int(all_[i]) == (int(masks[i]) if everybody else 0)
        assert bool(agree[i]) == everybody


REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "add.s32": sum, "add.u32": sum, "min.s32": min, "max.s32": max, "min.u32": min, "max.u32": max,
    "and.b32": lambda x: functools.reduce(operator.and_, x),
                                                     "or.b32": lambda x: functools.reduce(operator.or_, x),
    "xor.b32": lambda x: functools.reduce(operator.xor, x)}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_reductions(partition: str, name: str) -> None:
    """redux."""
    masks, a = sets(partition), integers(32, COUNT, 3)
    typed = a.view(np.int32) if name.endswith("s32") else a
    got = apply1(f"redux.sync.{name} %d0, %s0, %s1;", a, masks, result=np.uint32)
    for i in range(COUNT):
        assert int(got[i]) == REDUCTIONS[name]([int(typed[j]) for j in members(masks, i)]) & FULL


@pytest.mark.parametrize("partition", PARTITIONS)
def test_elections(partition: str) -> None:
    """elect: one lane of each set, and all of them know it."""
    masks = sets(partition)
    leader, leads, alone = apply("elect.sync %d0|%d1, %s0; elect.sync _|%d2, %s0;", [masks],
                                 [np.uint32, np.bool_, np.bool_])
    for i in range(COUNT):
        assert int(masks[i]) >> int(leader[i]) & 1
        assert [int(leader[j]) for j in members(masks, i)] == [int(leader[i])] * len(members(masks, i))
        assert bool(leads[i]) == bool(alone[i]) == (int(leader[i]) == i % 32)


# **** lanes that come by different ways ****

def test_active_lanes() -> None:
    """activemask: the lanes that are here."""
    got, findings = launch("""setp.lt.u32 %p1, %lane, 10; @%p1 bra FEW;
    activemask.b32 %r1; bra JOIN; FEW: activemask.b32 %r1; add.u32 %r1, %r1, 0;
    JOIN: st.global.u32 [%out], %r1;""")
    assert not findings
    assert got[:, 0].tolist() == [0x3ff] * 10 + [0xfffffc00] * 22


# one side might exit, so that the ways do not meet before the collective
APART = """setp.lt.u32 %p1, %lane, 12; @%p1 bra LEFT; mov.u32 %r1, 100; bra HERE;
    LEFT: setp.gt.u32 %p2, %lane, 99; @%p2 exit; mov.u32 %r1, 200; bra HERE; HERE: add.u32 %r1, %r1, %lane;"""


def test_members_are_gathered() -> None:
    """A shuffle, a vote and a reduction whose members come by two ways that never join."""
    got, findings = launch(APART + """shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;
    vote.sync.ballot.b32 %r3, %p1, -1;
    redux.sync.add.u32 %r4, %r1, -1; st.global.u32 [%out], %r2; st.global.u32 [%out+4], %r3;
    st.global.u32 [%out+8], %r4;
    elect.sync %r5|%p3, -1; st.global.u32 [%out+12], %r5;""", words=4)
    assert not findings
    mine = [lane + (200 if lane < 12 else 100) for lane in range(32)]
    assert got[:, 0].tolist() == [mine[lane ^ 16] for lane in range(32)]
    assert set(got[:, 1].tolist()) == {0xfff}
    assert set(got[:, 2].tolist()) == {sum(mine)}
    assert set(got[:, 3].tolist()) == {0}


def test_the_exited_are_not_waited_for() -> None:
    """Lanes that have exited count as absent."""
    got, findings = launch("""setp.ge.u32 %p1, %lane, 20; @%p1 exit; mov.pred %p2, 1;
    vote.sync.ballot.b32 %r1, %p2, -1; redux.sync.add.u32 %r2, %lane, -1; bar.warp.sync -1;
    st.global.u32 [%out], %r1; st.global.u32 [%out+4], %r2;""", words=2)
    assert not findings
    assert got[:20].tolist() == [[0xfffff, sum(range(20))]] * 20
    assert not got[20:].any()


def test_warp_barriers_at_two_places() -> None:
    """bar.warp.sync orders memory, and its members may stand at different ones."""
    body = """mov.u32 %r1, box; mad.lo.u32 %r2, %lane, 4, %r1; setp.lt.u32 %p1, %lane, 16; @%p1 bra WRITERS;
    BARRIER ld.shared.u32 %r3, [%r2+-64]; st.global.u32 [%out], %r3; bra END;
    WRITERS: mul.lo.u32 %r4, %lane, 3; st.shared.u32 [%r2], %r4; bar.warp.sync -1;
    st.global.u32 [%out], %r4; END:"""
    got, findings = launch(body.replace("BARRIER", "bar.warp.sync -1;"))
    assert not findings
    assert got[:, 0].tolist() == [3 * (lane % 16) for lane in range(32)]


def test_exchange_needs_a_barrier() -> None:
    """Lanes that read what others wrote: a race without bar.warp.sync, none with it."""
    body = """mov.u32 %r1, box; mad.lo.u32 %r2, %lane, 4, %r1; st.shared.u32 [%r2], %lane; BARRIER
    xor.b32 %r3, %lane, 1; mad.lo.u32 %r3, %r3, 4, %r1; ld.shared.u32 %r4, [%r3];
    st.global.u32 [%out], %r4;"""
    got, findings = launch(body.replace("BARRIER", "bar.warp.sync 0xffffffff;"))
    assert not findings
    assert got[:, 0].tolist() == [lane ^ 1 for lane in range(32)]
    _, findings = launch(body.replace("BARRIER", ""))
    assert [finding.kind for finding in findings] == ["race"]


# **** what is wrong ****

def test_a_lane_outside_its_mask() -> None:
    """The mask must name the lanes that execute."""
    _, findings = launch("redux.sync.add.u32 %r1, %lane, 0x0000ffff; st.global.u32 [%out], %r1;")
    assert [finding.kind for finding in findings] == ["barrier"]
    assert "ffff0000" in findings[0].message
    assert findings[0].ptx_line > 0


def test_members_that_never_come() -> None:
    """Masks that name lanes which wait for these ones in another collective."""
    _, findings = launch("""setp.lt.u32 %p1, %lane, 8; @%p1 bra FEW; vote.sync.any.pred %p2, %p1, -1; bra END;
    FEW: redux.sync.add.u32 %r1, %lane, -1; st.global.u32 [%out], %r1; END:""")
    assert "barrier" in [finding.kind for finding in findings]
    assert any("ffffff00" in finding.message for finding in findings)
