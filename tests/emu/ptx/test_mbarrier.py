"""mbarriers: phases, counts and bytes; states and parities; remote arrivals; order; misuse."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import found, kinds, run, sound, words
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Buffer, Emulator, Report

SHARED = ".shared .align 16 .b64 bar[8];\n.shared .align 16 .b32 tile[256];\n"
INIT = "setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], {}; bar.sync 0;"
WAIT = "W{0}: mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar+{1}], {2}; @!%p2 bra W{0};"
SEEDS = range(4)


def wait(number: int, parity: int | str, offset: int = 0) -> str:
    """A loop until the phase has ended."""
    return WAIT.format(number, offset, parity)


def single(text: str, emu: Emulator | None = None, out: int = 16) -> tuple[list[str], list[int]]:
    """One thread: kinds of findings, and the 32-bit words it stores to %a0."""
    emu = emu or Emulator()
    a = emu.alloc(np.zeros(out, np.uint32))
    report = run(text, a, emu=emu, block=1, variables=SHARED)
    return kinds(report), words(a).tolist()


# **** phases ****

@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("forms", [
    ("mbarrier.arrive.shared::cta.b64 _, [bar];", wait(0, 0)),
    ("mbarrier.arrive.release.cta.shared::cta.b64 %d5, [bar];",
     "W: mbarrier.try_wait.shared::cta.b64 %p2, [bar], %d5; @!%p2 bra W;"),
    ("mov.b64 %d6, bar; cvta.shared.u64 %d6, %d6; mbarrier.arrive.b64 %d5, [%d6];",
     "W: mbarrier.test_wait.b64 %p2, [%d6], %d5; @!%p2 bra W;"),
    ("mbarrier.arrive.shared.b64 %d5, [bar];",
     "W: mbarrier.try_wait.acquire.cluster.shared::cta.b64 %p2, [bar], %d5, 1000; @!%p2 bra W;"),
    ("mbarrier.arrive.shared::cluster.b64 _, [bar];",
     "W: mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 %p2, [bar], 0; @!%p2 bra W;")])
def test_a_phase_orders_those_who_arrive_and_those_who_wait(forms: tuple[str, str], seed: int) -> None:
    """Every thread writes, arrives, waits, and reads what the one opposite wrote; warps and lanes alike."""
    emu = Emulator(seed=seed)
    out = emu.alloc(4 * 64)
    body = INIT.format(64) + f"""shl.b32 %r1, %t, 2; mov.u32 %r2, tile; add.u32 %r3, %r2, %r1;
        xor.b32 %r4, %r1, 252; add.u32 %r4, %r2, %r4; st.shared.u32 [%r3], %t;
        {forms[0]}
        {forms[1]}
        ld.shared.u32 %r5, [%r4]; mad.wide.u32 %d1, %t, 4, %a0; st.global.u32 [%d1], %r5;"""
    sound(run(body, out, emu=emu, block=64, variables=SHARED))
    assert words(out).tolist() == list(range(64))[::-1]
    early = body.replace(forms[1], "")
    assert "race" in kinds(run(early, out, emu=emu, block=64, variables=SHARED))


@pytest.mark.parametrize("seed", [0, "late"])
def test_the_parity_of_a_phase(seed: int | str) -> None:
    """Of a fresh mbarrier the phase before, parity 1, has ended; each arrival flips it."""
    step = """mbarrier.test_wait.parity.shared.b64 %p{0}, [bar], {1}; selp.u32 %r1, {2}, 0, %p{0};
              add.u32 %r9, %r9, %r1;"""
    look = step.format(3, 0, 1) + step.format(4, 1, 2) + "shl.b32 %r9, %r9, 2;"
    arrive = "mbarrier.arrive.shared.b64 _, [bar];"
    text = INIT.format(1) + "mov.u32 %r9, 0;" + look + (arrive + look) * 3 + "st.global.u32 [%a0], %r9;"
    kinds_found, stored = single(text, Emulator(seed=seed))
    assert kinds_found == []
    assert stored[0] >> 2 == 0b10_01_10_01


def test_the_state_holds_phase_and_pending_count() -> None:
    text = INIT.format(5) + """mbarrier.arrive.shared.b64 %d1, [bar]; mbarrier.pending_count.b64 %r1, %d1;
        mbarrier.arrive.shared.b64 %d2, [bar], 3; mbarrier.pending_count.b64 %r2, %d2;
        mbarrier.test_wait.shared.b64 %p3, [bar], %d1;
        {}; mbarrier.pending_count.b64 %r5, %d5; st.global.v4.u32 [%a0], {{%r1, %r2, %r5, 0}};"""
    found_kinds, got = single(text.format("mbarrier.arrive.shared.b64 %d5, [bar]"))
    assert (found_kinds, got[:3]) == ([], [5, 4, 1])
    # it completes the phase
    assert single(text.format("mbarrier.arrive.noComplete.shared.b64 %d5, [bar], 1"))[0] == ["barrier"]


def test_the_words_in_memory() -> None:
    """As ptxas encodes them: init for n arrivals stores (2^20 - n) << 1 and (2^20 - n) << 11."""
    for count in (1, 2, 77, (1 << 20) - 1):
        found_kinds, got = single(INIT.format(count) + "ld.shared.v2.b32 {%r1, %r2}, [bar]; "
                                  "st.global.v2.b32 [%a0], {%r1, %r2};")
        assert found_kinds == []
        assert got[:2] == [(2**20 - count) << 1, (2**20 - count) << 11 & 0xffffffff]


def test_dropped_arrivals_are_not_expected_again() -> None:
    """Three expected; one drops out; then two complete a phase."""
    arrive, end = "mbarrier.arrive.shared.b64 _, [bar];", "st.global.u32 [%a0], 1;"
    drop = "mbarrier.arrive_drop.shared.b64 %d1, [bar];"
    text = INIT.format(3) + drop + arrive * 2 + wait(0, 0) + arrive * 2 + wait(1, 1) + end
    assert single(text) == ([], [1] + [0] * 15)
    assert single(text.replace("_drop", ""))[0] == ["deadlock"]
    two = "mbarrier.arrive{}.shared.b64 _, [bar], 2;"
    text = INIT.format(4) + two.format("_drop") + two.format("") + wait(0, 0) + two.format("") + wait(1, 1)
    text += end
    assert single(text) == ([], [1] + [0] * 15)


def test_bytes_hold_a_phase_open() -> None:
    """expect_tx adds, complete_tx takes away, in either order, and the phase waits for arrivals and bytes."""
    done = "mbarrier.test_wait.parity.shared.b64 %p3, [bar], 0; selp.u32 %r{0}, 1, 0, %p3;"
    text = INIT.format(2) + """
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 100;
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], 300;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 20;
        mbarrier.complete_tx.shared.b64 [bar], 220;""" + done.format(1) + """
        mbarrier.expect_tx.shared.b64 [bar], 5; mbarrier.arrive.shared.b64 _, [bar];""" + done.format(2) + \
        "mbarrier.complete_tx.shared.b64 [bar], 5;" + done.format(3) + \
        "st.global.v4.u32 [%a0], {%r1, %r2, %r3, 0};"
    assert single(text) == ([], [0, 0, 1] + [0] * 13)


def test_ring_of_phases() -> None:
    """A producer warp and two consumer warps, 3 slots, 8 rounds each; consumers free slots once a warp."""
    for seed in SEEDS:
        emu = Emulator(seed=seed)
        out = emu.alloc(np.zeros(64, np.uint32))
        sound(run(RING.format(free=FREE, take=TAKE), out, emu=emu, block=96, variables=SHARED))
        assert words(out).tolist() == [sum(100 * i + t for i in range(8)) for t in range(64)]


# slot s: full at bar + 16 s (1 arrival of each producer lane), empty at bar + 16 s + 8 (2 arrivals)
RING = """setp.eq.u32 %p1, %t, 0; @!%p1 bra READY;
    mbarrier.init.shared.b64 [bar], 32; mbarrier.init.shared.b64 [bar+8], 2;
    mbarrier.init.shared.b64 [bar+16], 32; mbarrier.init.shared.b64 [bar+24], 2;
    mbarrier.init.shared.b64 [bar+32], 32; mbarrier.init.shared.b64 [bar+40], 2;
    READY: bar.sync 0; mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0; mov.u32 %r10, bar; mov.u32 %r11, tile;
    mov.u32 %r20, 0; setp.lt.u32 %p1, %t, 32; @!%p1 bra CONSUMER;
    PRODUCER: shl.b32 %r4, %r2, 4; add.u32 %r4, %r4, %r10; xor.b32 %r5, %r3, 1;
    {free}
    mad.lo.u32 %r6, %r1, 100, %t; add.u32 %r7, %r6, 32;
    shl.b32 %r8, %r2, 8; add.u32 %r8, %r8, %r11; shl.b32 %r9, %t, 2; add.u32 %r8, %r8, %r9;
    st.shared.u32 [%r8], %r6; st.shared.u32 [%r8+128], %r7;
    mbarrier.arrive.shared.b64 _, [%r4];
    add.u32 %r2, %r2, 1; setp.eq.u32 %p3, %r2, 3; selp.u32 %r2, 0, %r2, %p3; @%p3 xor.b32 %r3, %r3, 1;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 8; @%p4 bra PRODUCER; ret;
    CONSUMER: sub.u32 %r19, %t, 32;
    AGAIN: shl.b32 %r4, %r2, 4; add.u32 %r4, %r4, %r10;
    {take}
    shl.b32 %r8, %r2, 8; add.u32 %r8, %r8, %r11; shl.b32 %r9, %r19, 2; add.u32 %r8, %r8, %r9;
    ld.shared.u32 %r6, [%r8]; add.u32 %r20, %r20, %r6; bar.warp.sync -1; and.b32 %r12, %t, 31;
    setp.eq.u32 %p5, %r12, 0; @%p5 mbarrier.arrive.shared.b64 _, [%r4+8];
    add.u32 %r2, %r2, 1; setp.eq.u32 %p3, %r2, 3; selp.u32 %r2, 0, %r2, %p3; @%p3 xor.b32 %r3, %r3, 1;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 8; @%p4 bra AGAIN;
    mad.wide.u32 %d1, %r19, 4, %a0; st.global.u32 [%d1], %r20;"""
FREE = "WP: mbarrier.try_wait.parity.shared.b64 %p2, [%r4+8], %r5; @!%p2 bra WP;"
TAKE = "WC: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], %r3; @!%p2 bra WC;"


@pytest.mark.parametrize(("free", "take"), [
    ("", TAKE), (FREE, ""), (FREE.replace("%r5", "%r3"), TAKE), (FREE, TAKE.replace("%r3", "%r5"))])
def test_broken_rings_are_found(free: str, take: str) -> None:
    """No wait for a free slot, none for a full one, and both with the wrong parity."""
    emu = Emulator()
    out = emu.alloc(np.zeros(64, np.uint32))
    text = RING.format(free=free, take=take).replace("AGAIN:", "xor.b32 %r5, %r3, 1; AGAIN:")
    assert kinds(run(text, out, emu=emu, block=96, variables=SHARED))


# **** clusters ****

def remote(text: str, out: Buffer, emu: Emulator) -> Report:
    """A cluster of two CTAs."""
    return run(text, out, emu=emu, grid=2, block=64, cluster=2, variables=SHARED)


def test_remote_arrivals() -> None:
    """Each CTA of two writes into the other's memory and arrives at the other's mbarrier."""
    emu = Emulator()
    out = emu.alloc(np.zeros(128, np.uint32))
    waited = wait(0, 0).replace("parity", "parity.acquire.cluster")     # .cta, the default, is too small
    text = """setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared::cta.b64 [bar], 64;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive{how}.aligned; barrier.cluster.wait.aligned;
        mov.u32 %r1, bar; xor.b32 %r1, %r1, 0x1000000;
        shl.b32 %r2, %t, 2; mov.u32 %r3, tile; add.u32 %r3, %r3, %r2;
        xor.b32 %r4, %r3, 0x1000000; mov.u32 %r5, %cluster_ctarank; mad.lo.u32 %r5, %r5, 100, %t;
        st.shared::cluster.u32 [%r4], %r5; {arrive}
        """ + waited + """ld.shared.u32 %r6, [%r3]; mov.u32 %r7, %ntid.x; mad.lo.u32 %r7, %c, %r7, %t;
        mad.wide.u32 %d1, %r7, 4, %a0; st.global.u32 [%d1], %r6;
        barrier.cluster.arrive; barrier.cluster.wait;"""
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];"
    for how in ("", ".relaxed"):  # the fence makes the relaxed one enough for the mbarriers
        sound(remote(text.format(how=how, arrive=arrive), out, emu))
        assert words(out).tolist() == [100 + t for t in range(64)] + list(range(64))
    relaxed = text.format(how="", arrive=arrive.replace("release", "relaxed"))
    found(remote(relaxed, out, emu), "race")
    unfenced = text.replace("fence.mbarrier_init.release.cluster;", "").format(how=".relaxed", arrive=arrive)
    found(remote(unfenced, out, emu), "race")
    fenced = text.format(how="", arrive="fence.acq_rel.cluster; " + arrive.replace("release", "relaxed"))
    sound(remote(fenced, out, emu))


# **** misuse ****

ARRIVE = "mbarrier.arrive.shared.b64 _, [bar];"
MISUSE = {
    "not initialised": ("mbarrier.arrive.shared.b64 _, [bar+8];",
                        "no mbarrier is initialised at shared address 0x408"),
    "invalidated": (INIT.format(1) + "mbarrier.inval.shared.b64 [bar];" + ARRIVE,
                    "no mbarrier is initialised"),
    "too many arrivals": (INIT.format(2) + "mbarrier.arrive.shared.b64 _, [bar], 3;",
                          "expects 2 and has 2 pending in phase 0"),
    "no arrivals": (INIT.format(2) + "mov.u32 %r1, 0; mbarrier.arrive.shared.b64 _, [bar], %r1;",
                    "0 arrivals"),
    "too many bytes": (INIT.format(1) + "mbarrier.expect_tx.shared.b64 [bar], 1048575;"
                       "mbarrier.expect_tx.shared.b64 [bar], 1;", "at most 2^20 - 1"),
    "too few bytes": (INIT.format(1) + "mbarrier.complete_tx.shared.b64 [bar], 1048576;", "at most 2^20 - 1"),
    "written over": (INIT.format(1) + "st.shared.b32 [bar+4], 5;" + ARRIVE, "was written over"),
    "a count of 0": ("mov.u32 %r1, 0; mbarrier.init.shared.b64 [bar], %r1;", "an mbarrier for 0 arrivals"),
    "global memory": ("mbarrier.init.b64 [%a0], 1;", "which is not shared memory")}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_found(name: str) -> None:
    text, message = MISUSE[name]
    emu = Emulator()
    report = run(text, emu.alloc(np.zeros(8, np.uint32)), emu=emu, block=1, variables=SHARED)
    found(report, "barrier", message)


def test_other_findings() -> None:
    emu = Emulator()
    found(run("mbarrier.init.shared.b64 [bar+4], 1;", emu=emu, block=1, variables=SHARED), "misaligned")
    outside = "mov.u32 %r1, bar; mbarrier.init.shared.b64 [%r1+65536], 1;"
    found(run(outside, emu=emu, block=1, variables=SHARED), "out-of-bounds")
    # others use it before they can know that it was initialised
    late = "setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [bar], 64; {}" + ARRIVE
    assert set(kinds(run(late.format(""), emu=emu, block=64, variables=SHARED))) & {"race", "barrier"}
    sound(run(late.format("bar.sync 0;"), emu=emu, block=64, variables=SHARED))


def test_initialised_again_without_inval() -> None:
    text = INIT.format(1) + "mbarrier.arrive.shared.b64 _, [bar];" + wait(0, 0)
    again = text + "mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar], 2;" + wait(1, 0)
    assert single(again + "st.global.u32 [%a0], 7;") == ([], [7] + [0] * 15)


def test_memory_is_free_after_inval() -> None:
    end = INIT.format(1) + "mbarrier.inval.shared.b64 [bar];"
    assert single(end + "st.shared.b64 [bar], 1; ld.shared.b64 %d1, [bar];")[0] == []
    assert single(end + "ld.shared.b64 %d1, [bar];")[0] == ["uninitialized"]


# **** waits that never end ****

def test_the_deadlock_report_says_what_is_missing() -> None:
    text = INIT.format(3) + "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 96;\n" + wait(0, 0)
    found(run(text, block=1, variables=SHARED), "deadlock", "warp 0 of CTA 0",
          "the mbarrier at shared address 0x400", "phase 0", "2 of 3 arrivals pending",
          "96 bytes outstanding")
    text = INIT.format(2) + ARRIVE + "mbarrier.complete_tx.shared.b64 [bar], 32;\n" + wait(0, 0)
    found(run(text, block=1, variables=SHARED), "deadlock", "1 of 2 arrivals pending",
          "32 bytes more came than were expected")


def test_an_off_by_one_parity_never_ends() -> None:
    text = INIT.format(1) + "mbarrier.arrive.shared.b64 _, [bar];" + wait(0, 1)
    found(run(text, block=1, variables=SHARED), "deadlock", "phase 1 (parity 1)")
    assert single(text.replace("[bar+0], 1", "[bar+0], 0"))[0] == []


def test_try_wait_may_fail_and_the_thread_goes_on() -> None:
    """A loop that gives up after three looks is no deadlock."""
    text = INIT.format(1) + """mov.u32 %r1, 0;
        LOOK: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @%p2 bra DONE; add.u32 %r1, %r1, 1;
        setp.lt.u32 %p3, %r1, 3; @%p3 bra LOOK;
        DONE: st.global.u32 [%a0], %r1;"""
    assert single(text) == ([], [3] + [0] * 15)


def test_lanes_of_a_warp_that_wait_for_one_another() -> None:
    """Lane 0 waits for what lane 1 does only behind the branch."""
    emu = Emulator()
    out = emu.alloc(np.zeros(1, np.uint32))
    text = INIT.format(31) + "setp.eq.u32 %p1, %t, 0; @!%p1 bra OTHERS;" + wait(0, 0) + """
        ld.shared.u32 %r1, [tile]; st.global.u32 [%a0], %r1; ret;
        OTHERS: setp.eq.u32 %p3, %t, 1; @%p3 st.shared.u32 [tile], 9;""" + ARRIVE
    sound(run(text, out, emu=emu, variables=SHARED))
    assert words(out)[0] == 9


@pytest.mark.parametrize(("text", "message"), [
    ("mbarrier.init.shared.b64 [bar], 0;", r"0 is not one of 1\.\.1048575"),
    ("mbarrier.init.shared.b64 [bar], 1048576;", "1048576 is not one of"),
    ("mbarrier.init.global.b64 [%a0], 1;", "no instruction"),
    ("mbarrier.arrive.expect_tx.shared.b64 _, [bar];", "no count"),
    ("mbarrier.arrive.shared::cluster.b64 %d1, [bar];", "the state of a remote mbarrier")])
def test_what_ptx_does_not_allow(text: str, message: str) -> None:
    emu = Emulator()
    with pytest.raises(PTXError, match=message): run(text, emu.alloc(8), emu=emu, block=1, variables=SHARED)


HASTY = INIT.format(1) + """setp.ge.u32 %p1, %t, 32; @%p1 bra READER;
    st.shared.b32 [tile], 7; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.arrive.shared.b64 _, [bar];
    bra END;
    READER: mov.u32 %r3, 0;
    IDLE: add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 500; @%p3 bra IDLE;
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
    ld.shared.b32 %r1, [tile];
    END:"""


def test_a_late_run_fails_every_first_wait() -> None:
    """The phase has ended when the other warp asks once; that it need not have shows in a late run."""
    for seed in SEEDS: sound(run(HASTY, emu=Emulator(seed=seed), block=64, variables=SHARED))
    found(run(HASTY, emu=Emulator(seed="late"), block=64, variables=SHARED), "race")
    with pytest.raises(PTXError, match="an integer, or 'late'"): Emulator(seed="later")


def test_a_late_run_tells_lanes_apart() -> None:
    """Lanes that wait at two places by turns come to an end."""
    text = INIT.format(32) + "setp.lt.u32 %p1, %t, 16; @%p1 bra LEFT;" + wait(0, 1) + ARRIVE + wait(1, 0) + \
        "bra END; LEFT: " + wait(2, 1) + ARRIVE + wait(3, 0) + "END:"
    sound(run(text, emu=Emulator(seed="late", step_limit=100_000), variables=SHARED))


# **** what is a note ****

COPY = """setp.ne.u32 %p3, %t, 0; @%p3 bra READY; mbarrier.init.shared::cta.b64 [bar], 1; {mine}
    READY: bar.sync 0; setp.ne.u32 %p4, %t, 32; mov.u32 %r1, tile; mov.u32 %r2, bar; {after}
    @!%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {bytes};
    @!%p4 {copy}
    """ + wait(0, 0)
LOAD = ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%a0], 16, [%r2];", 16)
STORE = ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %t, [%r2];", 4)


@pytest.mark.parametrize(("copy", "places", "noted"), [
    (LOAD, {}, True), (LOAD, {"mine": "fence.proxy.async.shared::cta;"}, False),
    (LOAD, {"mine": "fence.mbarrier_init.release.cluster;"}, False),
    (LOAD, {"after": "fence.proxy.async;"}, False), (LOAD, {"mine": "fence.proxy.async.global;"}, True),
    (LOAD, {"mine": "fence.acq_rel.cluster;"}, True),
    (LOAD, {"after": "fence.mbarrier_init.release.cluster;"}, True),  # nothing orders it
    (STORE, {}, False)])
def test_an_init_is_made_visible_to_the_async_proxy(copy: tuple[str, int], places: dict[str, str],
                                                    noted: bool) -> None:
    """What signals is of the async proxy, but for st.async."""
    emu = Emulator()
    text = COPY.format(**{"mine": "", "after": ""} | places, copy=copy[0], bytes=copy[1])
    report = run(text, emu.alloc(np.zeros(4, np.uint32)), emu=emu, block=64, variables=SHARED)
    sound(report)
    said = ["has passed neither fence.mbarrier_init" in note.message for note in report.notes]
    assert said == [True] * noted


def test_notes_leave_room_for_findings() -> None:
    """A report has room for 256 of both; this kernel is worth 300 notes before it is wrong."""
    copies = "\n".join(f"@!%p4 {LOAD[0].replace('[%r1]', f'[%r1+{16 * i}]')}" for i in range(300))
    text = COPY.format(mine="", after="", copy=copies.removeprefix("@!%p4 "), bytes=16 * 300)
    emu = Emulator()
    a = emu.alloc(np.zeros(4, np.uint32))
    report = run(f"{text} st.global.u32 [%a0+16], %t;", a, emu=emu, block=64,
                 variables=SHARED.replace("tile[256]", "tile[1200]"))
    found(report, "out-of-bounds")
    assert len(report.notes) == 128


RINGS = """setp.ne.u32 %p1, %t, 0; @%p1 bra READY; mbarrier.init.shared::cta.b64 [bar], 2;
    fence.mbarrier_init.release.cluster;
    READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    mov.u32 %r1, bar; mapa.shared::cluster.u32 %r2, %r1, %t; mov.u32 %r5, %cluster_ctarank;
    setp.lt.u32 %p1, %t, 2; setp.eq.u32 %p3, %t, %r5; xor.b32 %r6, %r5, 1; setp.eq.u32 %p4, %t, %r6;
    mov.u32 %r3, 0;
    AGAIN: {}
    and.b32 %r4, %r3, 1;
    """ + wait(0, "%r4") + """
    add.u32 %r3, %r3, 1; setp.lt.u32 %p5, %r3, 4; @%p5 bra AGAIN;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""
REMOTE = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("arrivals", "noted"), [
    (f"@%p3 {REMOTE} bar.warp.sync -1; @%p4 {REMOTE}", False), (f"@%p1 {REMOTE}", True)])
def test_lanes_that_arrive_at_two_ctas_know_of_each_other(arrivals: str, noted: bool, seed: int) -> None:
    """Lane r arrives at the mbarrier of CTA r, and each CTA waits for its own alone. That the other's phase
    has ended is known from its arrivals: the own CTA's, and that of the other's sibling lane, if lanes are
    ordered."""
    report = run(RINGS.format(arrivals), emu=Emulator(seed=seed), grid=2, cluster=2, variables=SHARED)
    sound(report)
    assert any("with the same instruction" in note.message for note in report.notes) is noted


def test_an_arrival_that_nothing_orders_is_found() -> None:
    """The other CTA's lanes arrive at this one alone: of its own phase nothing is known here."""
    arrivals = f"@%p4 {REMOTE} bar.warp.sync -1; @%p3 {REMOTE}"
    found(run(RINGS.format(arrivals), grid=2, cluster=2, variables=SHARED), "barrier", "does not know phase")


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_arrival_does_not_say_that_bytes_have_come(seed: int, waited: bool) -> None:
    """One's own arrival ended its phase only with what a copy brought, of which a wait alone tells."""
    text = INIT.format(1) + "fence.proxy.async.shared::cta; mov.u32 %r1, tile; mov.u32 %r2, bar;" \
        f"mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16; {LOAD[0]} mov.u32 %r3, 0;" \
        "IDLE: add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 500; @%p3 bra IDLE;"
    emu = Emulator(seed=seed)
    report = run(text + wait(0, 0) * waited + ARRIVE, emu.alloc(np.zeros(4, np.uint32)), emu=emu, block=1,
                 variables=SHARED)
    if waited: sound(report)
    else: found(report, "barrier", "does not know phase 0")
