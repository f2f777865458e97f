"""GPUs that see each other's memory: flags between them, the scopes of accesses and fences, launches that
follow one another, deadlocks; each with the mistake that is found."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.ptx.emulator import Buffer, Emulator, Finding, Peers
from tinygrad_nv.ptx.emulator.peers import Work, launching

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
WRITE = "st.global.u32 [%data], %value;"
RELEASE = "st.release.sys.global.u32 [%flag], 1;"
ACQUIRE = "ld.acquire.sys.global.u32 %seen, [%flag];"
SEEDS = range(8)


def writer(release: str = RELEASE, write: str = WRITE) -> str:
    return HEAD + f"""
.visible .entry writer(.param .u64 data, .param .u64 flag, .param .u32 value) {{
    .reg .u64 %data, %flag;
    .reg .u32 %value, %old;
    ld.param.u64 %data, [data];
    ld.param.u64 %flag, [flag];
    ld.param.u32 %value, [value];
    {write}
    {release}
    ret;
}}
"""


def reader(acquire: str = ACQUIRE, after: str = "") -> str:
    return HEAD + f"""
.visible .entry reader(.param .u64 data, .param .u64 flag, .param .u64 out) {{
    .reg .u64 %data, %flag, %out;
    .reg .u32 %seen, %value;
    .reg .pred %waits;
    ld.param.u64 %data, [data];
    ld.param.u64 %flag, [flag];
    ld.param.u64 %out, [out];
WAIT:
    {acquire}
    setp.eq.u32 %waits, %seen, 0;
    @%waits bra WAIT;
    {after}
    ld.global.u32 %value, [%data];
    st.global.u32 [%out], %value;
    ret;
}}
"""


def gpus(count: int = 2) -> list[Emulator]: return [Emulator(ordinal=i) for i in range(count)]


def ran(peers: Sequence[Emulator], seed: int, *launches: Sequence[tuple[Any, ...]]) -> list[list[Finding]]:
    """What is found in the launches of each GPU, which run one after the other."""
    found: list[list[Finding]] = [[] for _ in peers]

    def work(number: int) -> Work:
        for text, args in launches[number]:
            report = yield launching(peers[number], text, 1, 1, args)
            assert report is not None
            found[number] += report.findings
    Peers(peers, seed).run([work(number) for number in range(len(peers))])
    return found


def one_flag(write: str, read: str, seed: int) -> tuple[list[list[Finding]], int]:
    """GPU 0 writes a number into its own memory and sets a flag there; GPU 1 waits and reads it."""
    first, second = peers = gpus()
    data, flag, out = first.zeros(4), first.zeros(4), second.zeros(4)
    found = ran(peers, seed, [(write, (data, flag, 7))], [(read, (data, flag, out))])
    return found, int(out.numpy().view(np.uint32)[0])


ORDERED = {
    "release and acquire": (writer(), reader()),
    "fences": (writer("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%flag], 1;"),
               reader("ld.relaxed.sys.global.u32 %seen, [%flag];", "fence.acq_rel.sys;")),
    "membar": (writer("membar.sys; st.volatile.global.u32 [%flag], 1;"),
               reader("ld.volatile.global.u32 %seen, [%flag];", "membar.sys;")),
    "red": (writer("red.release.sys.global.add.u32 [%flag], 1;"), reader()),
    "atom": (writer("atom.acq_rel.sys.global.add.u32 %old, [%flag], 1;"), reader())}
RACES = {
    "release of a GPU": (writer("st.release.gpu.global.u32 [%flag], 1;"), reader()),
    "acquire of a GPU": (writer(), reader("ld.acquire.gpu.global.u32 %seen, [%flag];")),
    "fence of a GPU": (writer("fence.acq_rel.gpu; st.relaxed.sys.global.u32 [%flag], 1;"), reader()),
    "fence of a GPU behind": (writer(), reader("ld.relaxed.sys.global.u32 %seen, [%flag];",
                                               "fence.acq_rel.gpu;")),
    "no fence": (writer("st.relaxed.sys.global.u32 [%flag], 1;"), reader()),
    "membar.gl": (writer("membar.gl; st.volatile.global.u32 [%flag], 1;"), reader()),
    "red of a GPU": (writer("red.release.gpu.global.add.u32 [%flag], 1;"), reader()),
    "flag first": (writer(WRITE, RELEASE), reader())}


@pytest.mark.parametrize("case", ORDERED)
def test_flags_of_system_scope_order_gpus(case: str) -> None:
    for seed in SEEDS: assert one_flag(*ORDERED[case], seed) == ([[], []], 7)


@pytest.mark.parametrize("case", RACES)
def test_other_scopes_do_not(case: str) -> None:
    for seed in SEEDS:
        found = [one for each in one_flag(*RACES[case], seed)[0] for one in each]
        assert {one.kind for one in found} == {"race"}, case
        assert any("GPU" in one.message for one in found)


def test_one_gpu_needs_its_own_scope_alone() -> None:
    """Two CTAs of one GPU, which has peers."""
    text = writer().replace(".sys", ".gpu").replace("{\n    .reg", """{
    .reg .u32 %cta;
    .reg .pred %second, %waits;
    .reg""", 1).replace("    st.global", """    mov.u32 %cta, %ctaid.x;
    setp.ne.u32 %second, %cta, 0;
    @%second bra READ;
    st.global""").replace("    ret;", """    ret;
READ:
    ld.acquire.gpu.global.u32 %old, [%flag];
    setp.eq.u32 %waits, %old, 0;
    @%waits bra READ;
    ld.global.u32 %old, [%data];
    ret;""")
    first, _ = peers = gpus()
    found: list[Finding] = []

    def work() -> Work:
        report = yield launching(first, text, 2, 1, (first.zeros(4), first.zeros(4), 7))
        assert report is not None
        found.extend(report.findings)
    for seed in SEEDS: Peers(peers, seed).run([work()])
    assert found == []


def test_a_launch_knows_what_those_ahead_of_it_knew() -> None:
    """GPU 1 waits in one launch and reads in the next; GPU 0 writes in one and sets the flag in the next."""
    for seed in SEEDS:
        first, second = peers = gpus()
        data, flag, out = first.zeros(4), first.zeros(4), second.zeros(4)
        aside = [each.zeros(4) for each in peers]
        sets = writer(write="").replace("writer(", "sets(")
        reads = reader("mov.u32 %seen, 1;").replace("reader(", "reads(")
        found = ran(peers, seed, [(writer(""), (data, flag, 7)), (sets, (data, flag, 7))],
                    [(reader(), (aside[1], flag, out)), (reads, (data, flag, out))])
        assert found == [[], []]
        assert out.numpy().view(np.uint32)[0] == 7


def test_a_launch_that_writes_too_early_is_found() -> None:
    """GPU 0's next launch writes what GPU 1 may still read; then it waits until GPU 1 has read it."""
    for waits in (False, True):
        kinds = set()
        for seed in SEEDS:
            first, second = peers = gpus()
            data, flag, back, out = (first.zeros(4), first.zeros(4), first.zeros(4), second.zeros(4))
            spare = first.zeros(4)
            ended = writer("st.release.sys.global.u32 [%flag], 1;", "").replace("writer(", "ended(")
            again = writer("").replace("writer(", "again(")
            wait = [(reader(), (spare, back, spare))] if waits else []
            found = ran(peers, seed, [(writer(), (data, flag, 7)), *wait, (again, (data, flag, 8))],
                        [(reader(), (data, flag, out)), (ended, (out, back, 0))])
            kinds |= {one.kind for each in found for one in each}
        assert kinds == (set() if waits else {"race"})


def test_a_deadlock_names_who_polls_what() -> None:
    """Each GPU waits for the other's flag before it sets its own."""
    peers = gpus()
    flags = [each.zeros(4) for each in peers]
    texts = [reader().replace("reader(", f"gpu{i}(") for i in range(2)]
    found = ran(peers, 1, [(texts[0], (flags[0], flags[1], flags[0]))],
                [(texts[1], (flags[1], flags[0], flags[1]))])
    for mine, other in ((0, 1), (1, 0)):
        (one,) = found[mine]
        assert one.kind == "deadlock"
        assert f"polls 4 bytes at {flags[other].ptr:#x} of GPU {other}, which hold 0" in one.message


def test_after_a_deadlock_launches_do_not_run() -> None:
    first, second = peers = gpus()
    flag, out = first.zeros(4), second.zeros(4)
    found = ran(peers, 1, [], [(reader(), (flag, flag, out)), (writer(), (out, flag, 3))])
    assert [one.kind for one in found[1]] == ["deadlock"]
    assert out.numpy().view(np.uint32)[0] == 0


def test_memory_of_no_gpu_is_out_of_bounds() -> None:
    first, second = peers = gpus()
    gone = first.zeros(4)
    first.free(gone)
    found = ran(peers, 0, [], [(writer(), (gone, second.zeros(4), 1))])
    assert [one.kind for one in found[1]] == ["out-of-bounds"]


def test_memory_is_the_same_in_every_order() -> None:
    """A counter that GPUs add to."""
    add = writer("red.relaxed.sys.global.add.u32 [%data], %value;", "")
    for seed in SEEDS:
        peers = gpus(4)
        data, flag = peers[2].zeros(4), peers[0].zeros(4)
        found = ran(peers, seed, *([(add, (data, flag, 1 << 8 * i))] * 3 for i in range(4)))
        assert found == [[]] * 4
        assert data.numpy().view(np.uint32)[0] == 0x03030303


def test_counters_of_a_gpu_alone_race() -> None:
    add = writer("red.relaxed.gpu.global.add.u32 [%data], %value;", "")
    peers = gpus()
    data: Buffer = peers[0].zeros(4)
    found = ran(peers, 1, *([(add, (data, data, 1))] for _ in range(2)))
    assert [one.kind for each in found for one in each] == ["race"]
