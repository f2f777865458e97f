"""Barriers of a CTA and of a cluster, fences, setmaxnreg: who waits for whom, what is ordered, what is
reported."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import found, kinds, run, sound, words
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator

SHARED = ".shared .align 16 .b32 tile[1024];\n"
# each thread writes its number, and after {} reads that of the thread opposite
EXCHANGE = """mov.u32 %r1, %ntid.x; sub.u32 %r1, %r1, 1; sub.u32 %r1, %r1, %t; mov.u32 %r2, tile;
    shl.b32 %r3, %t, 2; add.u32 %r3, %r2, %r3; shl.b32 %r4, %r1, 2; add.u32 %r4, %r2, %r4;
    st.shared.u32 [%r3], %t;
    {}
    ld.shared.u32 %r5, [%r4]; mad.wide.u32 %d1, %t, 4, %a0; st.global.u32 [%d1], %r5;"""
SEEDS = range(4)


def exchange(barrier: str, block: int = 128, seed: int = 0) -> tuple[list[str], bool]:
    """The kinds of findings, and whether each thread read what the one opposite wrote."""
    emu = Emulator(seed=seed)
    out = emu.alloc(4 * block)
    report = run(EXCHANGE.format(barrier), out, emu=emu, block=block, variables=SHARED)
    return kinds(report), words(out).tolist() == list(range(block))[::-1]


# **** named barriers ****

@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("barrier", [
    "bar.sync 0;", "bar.cta.sync 3;", "barrier.sync 0;", "barrier.cta.sync.aligned 15;", "bar.sync 1, 128;",
    "mov.u32 %r9, 2; bar.sync %r9;", "mov.u32 %r9, 2; mov.u32 %r10, 128; barrier.sync %r9, %r10;",
    "bar.red.popc.u32 %r9, 0, %p1;", "bar.sync 0; bar.sync 0; bar.sync 1;"])
def test_a_barrier_orders_the_threads_of_a_cta(barrier: str, seed: int) -> None:
    assert exchange("setp.ne.u32 %p1, %t, 0;" + barrier, seed=seed) == ([], True)


def test_without_one_they_race() -> None:
    assert "race" in exchange("")[0]
    assert "race" in exchange("bar.arrive 1, 128;")[0]  # who only arrives has not waited


@pytest.mark.parametrize("seed", range(8))
def test_a_write_races_with_a_reader_that_is_not_the_last(seed: int) -> None:
    """It waits for one warp that reads, and not for the other."""
    emu = Emulator(seed=seed)
    found(run("""mov.u32 %r2, tile; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.u32 [%r2], 1; bar.sync 0;
        setp.ge.u32 %p2, %t, 64; @%p2 bra WRITER; ld.shared.u32 %r1, [%r2]; setp.lt.u32 %p3, %t, 32; @%p3 ret;
        bar.sync 1, 64; ret;
        WRITER: bar.sync 1, 64; setp.eq.u32 %p1, %t, 64; @%p1 st.shared.u32 [%r2], 2;""",
              emu=emu, block=96, variables=SHARED), "race")


@pytest.mark.parametrize("block", [1, 31, 33, 40, 100])
def test_blocks_that_are_not_whole_warps(block: int) -> None:
    assert exchange("bar.sync 0;", block) == ([], True)
    assert exchange("barrier.sync 0;", block) == ([], True)
    assert exchange(f"bar.sync 1, {-(-block // 32) * 32};", block) == ([], True)
    assert exchange(f"barrier.sync 1, {-(-block // 32) * 32};", block) == ([], True)


def test_threads_that_have_exited_are_not_waited_for() -> None:
    """Whole warps, and parts of one; the barrier has no count."""
    for number in (96, 100):
        emu = Emulator()
        out = emu.alloc(np.zeros(128, np.uint32))
        sound(run(f"""setp.ge.u32 %p1, %t, {number}; @%p1 exit; barrier.sync 0;
                      mad.wide.u32 %d1, %t, 4, %a0; st.global.u32 [%d1], 1;""", out, emu=emu, block=128))
        assert words(out).sum() == number


def test_lanes_of_a_warp_that_come_by_different_ways() -> None:
    """barrier.sync without .aligned counts threads; both sides of a branch wait at barriers of their own."""
    emu = Emulator()
    out = emu.alloc(4 * 64)
    sound(run("""shl.b32 %r1, %t, 2; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %t;
        and.b32 %r3, %t, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra EVEN;
        barrier.sync 1, 64; bra BOTH;
        EVEN: barrier.sync 1, 64;
        BOTH: xor.b32 %r4, %r1, 252; ld.shared.u32 %r5, [%r4]; mad.wide.u32 %d1, %t, 4, %a0;
        st.global.u32 [%d1], %r5;""", out, emu=emu, block=64, variables=SHARED))
    # tile is at 0x400, so that the address with its low bits turned over is that of thread 63 - t
    assert words(out).tolist() == list(range(64))[::-1]


PIPE = """shl.b32 %r1, %t, 2; and.b32 %r1, %r1, 127; mov.u32 %r2, tile; add.u32 %r1, %r1, %r2; mov.u32 %r9, 0;
    mov.u32 %r8, 0; setp.ge.u32 %p1, %t, 32; @%p1 bra CONSUMER;
    PRODUCER: {free_wait} add.u32 %r3, %r9, %t; st.shared.u32 [%r1], %r3; {full_arrive}
    add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 6; @%p2 bra PRODUCER; {last} ret;
    CONSUMER: {full_wait} ld.shared.u32 %r4, [%r1]; add.u32 %r8, %r8, %r4; {free_arrive}
    add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 6; @%p2 bra CONSUMER;
    sub.u32 %r5, %t, 32; mad.wide.u32 %d1, %r5, 4, %a0; st.global.u32 [%d1], %r8;"""
WHOLE = {"free_wait": "bar.sync 2, 64;", "full_arrive": "bar.arrive 1, 64;", "full_wait": "bar.sync 1, 64;",
         "free_arrive": "bar.arrive 2, 64;", "last": "bar.sync 2, 64;"}


def pipe(seed: int = 0, start: str = "setp.ge.u32 %p3, %t, 32; @%p3 bar.arrive 2, 64;", **changed: str):  # type: ignore[no-untyped-def]
    """One warp hands six values to another through one slot. The report, and what arrived."""
    emu = Emulator(seed=seed)
    out = emu.alloc(np.zeros(32, np.uint32))
    report = run(start + PIPE.format(**{**WHOLE, **changed}), out, emu=emu, block=64, variables=SHARED)
    return report, words(out).tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_producer_and_consumer(seed: int) -> None:
    """bar.arrive does not wait; bar.sync on the other side does."""
    report, got = pipe(seed)
    sound(report)
    assert got == [6 * t + 15 for t in range(32)]


def test_a_producer_that_does_not_wait_for_the_slot_races() -> None:
    assert "race" in kinds(pipe(start="", free_wait="", free_arrive="", last="")[0])


def test_a_consumer_that_does_not_wait_for_the_value_reads_too_soon() -> None:
    assert {"race", "uninitialized"} & set(kinds(pipe(full_wait="", full_arrive="")[0]))


def test_reductions() -> None:
    emu = Emulator()
    out = emu.alloc(4 * 64 * 4)
    sound(run("""setp.lt.u32 %p1, %t, 40; setp.lt.u32 %p2, %t, 64; setp.gt.u32 %p3, %t, 64;
        bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p4, 0, %p1; bar.red.and.pred %p5, 0, %p2;
        barrier.red.or.pred %p6, 1, 64, %p1; barrier.red.or.pred %p7, 1, 64, %p3;
        bar.red.popc.u32 %r2, 2, 64, !%p1;
        selp.u32 %r3, 1, 0, %p4; selp.u32 %r4, 2, 0, %p5;
        selp.u32 %r5, 4, 0, %p6; selp.u32 %r6, 8, 0, %p7;
        or.b32 %r3, %r3, %r4; or.b32 %r3, %r3, %r5; or.b32 %r3, %r3, %r6;
        mad.wide.u32 %d1, %t, 16, %a0; st.global.v4.u32 [%d1], {%r1, %r2, %r3, 0};""", out, emu=emu,
              block=64))
    assert (words(out).reshape(64, 4) == [40, 24, 2 | 4, 0]).all()


WRONG = {
    "two counts": ("setp.lt.u32 %p1, %t, 64; @%p1 bar.sync 1, 96; @!%p1 bar.sync 1, 128;",
                   {"barrier", "deadlock"}, "barrier 1 is used for"),
    "a count of 48": ("mov.u32 %r9, 48; bar.sync 1, %r9;", {"barrier"}, "a multiple of 32"),
    "a count beyond the CTA": ("bar.sync 1, 256;", {"barrier"}, "up to the CTA's 128"),
    "barrier 16": ("mov.u32 %r9, 16; bar.sync %r9;", {"barrier"}, "there are 0 to 15"),
    "lanes that differ": ("and.b32 %r9, %t, 1; bar.sync %r9;", {"barrier", "deadlock"},
                          "name different ones"),
    "one warp stays away": ("setp.lt.u32 %p1, %t, 96; @%p1 bar.sync 1, 128; bar.sync 2, 128;", {"deadlock"},
                            "barrier 1: 96 of 128")}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(name: str) -> None:
    text, allowed, message = WRONG[name]
    report = run(text, block=128)
    assert set(kinds(report)) <= allowed
    assert any(message in f.message for f in report.findings), [str(f) for f in report.findings]


def test_more_arrivals_than_expected() -> None:
    """8 lanes and then all 32, at a barrier for 32; the twin has 24 and 8."""
    text = """setp.lt.u32 %p1, %t, 8; @%p1 barrier.arrive 1, 32; bar.warp.sync -1;
              {} barrier.arrive 1, 32;"""
    found(run(text.format("")), "barrier", "40 threads arrive at barrier 1, which is for 32")
    sound(run(text.format("@!%p1")))


def test_a_divergent_barrier_is_found_and_its_twin_is_not() -> None:
    text = "setp.lt.u32 %p1, %t, 16; @!%p1 bra DONE; bar.sync 0; DONE: mov.u32 %r1, 0;"
    assert "barrier" in kinds(run(text, block=64))
    sound(run(text.replace("16", "64"), block=64))


@pytest.mark.parametrize(("text", "message"), [
    ("bar.sync 16;", r"not one of 0\.\.15"), ("bar.sync 1, 40;", "in steps of 32"),
    ("bar.arrive 1;", "no count"),
    ("bar.sync 1, 2, 3;", "do not fit")])
def test_what_ptx_does_not_allow(text: str, message: str) -> None:
    with pytest.raises(PTXError, match=message): run(text)


def test_the_deadlock_report_says_who_waits_for_what() -> None:
    report = run("setp.lt.u32 %p1, %t, 64; @%p1 bra HERE; ret; HERE: bar.sync 5, 96;", block=128)
    found(report, "deadlock", "of CTA 0 waits for ever", "barrier 5: 64 of 96 threads have arrived")
    assert report.findings[0].ptx_line == 5


# **** clusters ****

REMOTE = """mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, tile; shl.b32 %r3, %t, 2; add.u32 %r2, %r2, %r3;
    mad.lo.u32 %r4, %r1, 100, %t; st.shared.u32 [%r2], %r4;
    {arrive}
    {wait}
    xor.b32 %r5, %r2, 0x1000000; ld.shared::cluster.u32 %r6, [%r5];
    mov.u32 %r7, %ntid.x; mad.lo.u32 %r8, %c, %r7, %t; mad.wide.u32 %d1, %r8, 4, %a0;
    st.global.u32 [%d1], %r6;
    {end}"""
END = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def remote(arrive: str, wait: str, end: str = END, seed: int = 0) -> tuple[list[str], bool]:
    """Two CTAs read each other's shared memory."""
    emu = Emulator(seed=seed)
    out = emu.alloc(4 * 4 * 64)
    report = run(REMOTE.format(arrive=arrive, wait=wait, end=end), out, emu=emu, grid=4, block=64, cluster=2,
                 variables=SHARED)
    expected = [100 * rank + t for _ in range(2) for rank in (1, 0) for t in range(64)]
    return kinds(report), words(out).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("arrive", "wait"), [
    ("barrier.cluster.arrive;", "barrier.cluster.wait;"),
    ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"),
    ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.aligned;"),
    (END + END + "barrier.cluster.arrive;", "mov.u32 %r9, 1; barrier.cluster.wait;")])
def test_a_cluster_barrier_orders_its_ctas(arrive: str, wait: str, seed: int) -> None:
    assert remote(arrive, wait, seed=seed) == ([], True)


def test_a_relaxed_arrival_does_not_order() -> None:
    assert "race" in remote("barrier.cluster.arrive.relaxed;", "barrier.cluster.wait;")[0]


def test_a_peer_must_not_exit_early() -> None:
    found_kinds = remote("barrier.cluster.arrive;", "barrier.cluster.wait;", end="")[0]
    assert set(found_kinds) in ({"race"}, {"out-of-bounds"}, {"race", "out-of-bounds"})


def test_cluster_barriers_out_of_step() -> None:
    found(run("barrier.cluster.wait;"), "barrier", "without barrier.cluster.arrive")
    report = run("""barrier.cluster.arrive; setp.eq.u32 %p1, %c, 0; @%p1 barrier.cluster.arrive;
                    barrier.cluster.wait;""", grid=2, cluster=2)
    found(report, "barrier", "barrier.cluster.arrive again")


def test_exited_threads_are_no_part_of_the_cluster() -> None:
    sound(run("setp.eq.u32 %p1, %t, 0; @!%p1 exit; barrier.cluster.arrive; barrier.cluster.wait;", grid=2,
              cluster=2))


def test_the_deadlock_report_of_a_cluster() -> None:
    report = run("""setp.eq.u32 %p1, %c, 0; @%p1 bra OTHER; barrier.cluster.arrive; barrier.cluster.wait; ret;
                    OTHER: setp.lt.u32 %p2, %t, 32; @%p2 bar.sync 1, 64;
                    @!%p2 bar.sync 2, 64;
                    bar.sync 3;""", grid=2, cluster=2, block=64)
    assert set(kinds(report)) == {"deadlock"}
    messages = " ".join(f.message for f in report.findings)
    assert "barrier.cluster: 64 arrivals of the cluster's 128 threads" in messages
    assert "barrier 1: 32 of 64" in messages
    assert "barrier 2: 32 of 64" in messages


# **** fences ****

@pytest.mark.parametrize(("fence", "ok"), [
    ("fence.acq_rel.gpu;", True), ("fence.sc.gpu;", True), ("membar.sys;", True), ("membar.gl;", True),
    ("", False), ("fence.proxy.async;", False)])
def test_fences_give_order_to_relaxed_accesses(fence: str, ok: bool) -> None:
    emu = Emulator()
    data, flag = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.uint32))
    report = run(f"""setp.ne.u32 %p1, %c, 0; @%p1 bra READER;
        st.global.u32 [%a0], 42; {fence} st.relaxed.gpu.global.u32 [%a1], 1; ret;
        READER: ld.relaxed.gpu.global.u32 %r1, [%a1]; setp.eq.u32 %p2, %r1, 0; @%p2 bra READER; {fence}
        ld.global.u32 %r2, [%a0];""", data, flag, emu=emu, grid=2, block=1)
    if ok: sound(report)
    else: found(report, "race")


def test_forms_that_do_nothing_here() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(32, np.uint32))
    sound(run("""fence.proxy.alias; fence.proxy.async.global; fence.proxy.async.shared::cta;
        fence.proxy.async.shared::cluster; fence.mbarrier_init.release.cluster; griddepcontrol.wait;
        griddepcontrol.launch_dependents; fence.proxy.tensormap::generic.release.gpu;
        fence.proxy.tensormap::generic.acquire.gpu [%a0], 128; membar.cta;""", a, emu=emu))


# **** setmaxnreg ****

TRADE = """setp.lt.u32 %p1, %t, 128; @%p1 bra GIVER; setmaxnreg.inc.sync.aligned.u32 {more};
    red.global.add.u32 [%a0], 1; ret;
    GIVER: {before} setmaxnreg.dec.sync.aligned.u32 {less}; red.global.add.u32 [%a0], 1;"""


def trade(more: int, less: int, before: str = "") -> tuple[list[str], int]:
    """Two warpgroups begin with 104 registers; kinds of findings, and threads that came through."""
    emu = Emulator()
    a = emu.alloc(np.zeros(1, np.uint32))
    text = TRADE.format(more=more, less=less, before=before)
    report = run(text, a, emu=emu, block=256, directives=".maxnreg 104 ")
    return kinds(report), int(words(a)[0])


def test_registers_go_from_one_warpgroup_to_the_other() -> None:
    assert trade(168, 40) == ([], 256)
    assert trade(176, 40)[0] == ["deadlock"]         # 72 wanted of 64 given
    assert "barrier" in trade(168, 112)[0]           # dec to more


@pytest.mark.parametrize(("directives", "more", "entry"), [
    (".minnctapersm 1", 248, 248), (".minnctapersm 1", 256, 255), (".minnctapersm 2", 200, 128),
    (".maxnreg 128", 120, 120), (".maxnreg 128", 136, 128)])
def test_entry_registers_are_at_most_what_is_asked_for(directives: str, more: int, entry: int) -> None:
    """ptxas 13.0 says "Used 248 registers" of 256 threads that go to 248, where it would give 255:
    going there is no step down. Half of the CTA gives what the other half takes."""
    less = max(24, (2 * entry - more) // 8 * 8)
    text = TRADE.format(more=more, less=less, before="")
    emu = Emulator()
    a = emu.alloc(np.zeros(1, np.uint32))
    sound(run(text, a, emu=emu, block=256, directives=f".maxntid 256 {directives} "))
    assert words(a)[0] == 256


def test_setmaxnreg_without_a_known_count_is_ignored() -> None:
    sound(run("setmaxnreg.inc.sync.aligned.u32 240;", block=128))


def test_the_deadlock_report_of_setmaxnreg() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(1, np.uint32))
    text = TRADE.format(more=176, less=40, before="")
    report = run(text, a, emu=emu, block=256, directives=".maxnreg 104 ")
    found(report, "deadlock", "176 registers a thread: the CTA has")


@pytest.mark.parametrize("count", [20, 36, 264])
def test_counts_that_cannot_be(count: int) -> None:
    with pytest.raises(PTXError, match=r"is not one of 24\.\.256 in steps of 8"):
        run(f"setmaxnreg.dec.sync.aligned.u32 {count};", block=128)
