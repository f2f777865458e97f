"""GPUs that see each other's memory: multimem, flags between them, scopes, launches that follow one another,
deadlocks; each with the mistake that is found."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Buffer, Emulator, Finding, Peers
from tinygrad_nv.ptx.emulator.peers import Work, launching

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
F16, F32 = np.float16, np.float32


def kernel(body: str) -> str:
    return HEAD + f"""
.visible .entry k(.param .u64 all, .param .u64 out) {{
    .reg .u64 %all, %out;
    .reg .b32 %a, %b, %c, %d;
    .reg .b64 %w;
    ld.param.u64 %all, [all];
    ld.param.u64 %out, [out];
    {body}
    ret;
}}
"""


def reduced(body: str, contents: list[np.ndarray], offset: int = 0,
        seed: int = 1) -> tuple[bytes, list[bytes], list[Finding]]:
    """What GPU 1 stores, the memory of all GPUs after that, and what is found."""
    gpus = [Emulator(ordinal=i) for i in range(len(contents))]
    peers = Peers(gpus, seed)
    buffers: list[Buffer] = [gpu.alloc(each) for gpu, each in zip(gpus, contents, strict=True)]
    every = peers.multicast(buffers)
    out, found = gpus[1].zeros(16), list[Finding]()

    def nothing() -> Work: yield from ()

    def work() -> Work:
        report = yield launching(gpus[1], kernel(body), 1, 1, (every.ptr + offset, out.ptr))
        assert report is not None
        found.extend(report.findings)
    peers.run([nothing(), work(), *(nothing() for _ in gpus[2:])])
    return out.numpy().tobytes(), [each.numpy().tobytes() for each in buffers], found


STORE = "st.global.v4.b32 [%out], {%a, %b, %c, %d};"


@pytest.mark.parametrize(("body", "numbers", "result"), [
    ("multimem.ld_reduce.weak.global.add.u32 %a, [%all]; st.global.u32 [%out], %a;",
     [np.array([each, 9], np.uint32) for each in (1, 2, 0xFFFFFFFF)], np.uint32(2)),
    ("multimem.ld_reduce.weak.global.max.s32 %a, [%all]; st.global.u32 [%out], %a;",
     [np.array([each, 9], np.int32) for each in (-5, -2, -7)], np.int32(-2)),
    ("multimem.ld_reduce.weak.global.and.b64 %w, [%all]; st.global.b64 [%out], %w;",
     [np.array([each, 9], np.uint64) for each in (7, 13, 0xFF)], np.uint64(5)),
    ("multimem.ld_reduce.relaxed.sys.global.add.f64 %w, [%all]; st.global.b64 [%out], %w;",
     [np.array([each, 9.0]) for each in (0.5, 0.25, 4.0)], np.float64(4.75)),
    (f"multimem.ld_reduce.weak.global.add.v4.f32 {{%a, %b, %c, %d}}, [%all]; {STORE}",
     [np.array([each, 2, 3, 4], F32) for each in (1, 2, 3)], np.array([6, 6, 9, 12], F32)),
    (f"multimem.ld_reduce.acquire.sys.global.add.acc::f32.v4.f16x2 {{%a, %b, %c, %d}}, [%all]; {STORE}",
     [np.array([each, 1, 2, 3, 4, 5, 6, 7], F16) for each in (1, 2, 3)],
     np.array([6, 3, 6, 9, 12, 15, 18, 21], F16))])
def test_reads_reduce_all_gpus(body: str, numbers: list[np.ndarray], result: np.generic | np.ndarray) -> None:
    for seed in range(3):
        out, _, found = reduced(body, numbers, seed=seed)
        assert found == []
        assert out[:result.nbytes] == result.tobytes()


def test_sums_of_halves_in_float32_are_rounded_once() -> None:
    """2048 + 1 + 1: each addition in f16 loses the 1."""
    numbers = [np.array([each] * 8, F16) for each in (2048, 1, 1)]
    for sums, right in ((".acc::f32", 2050), ("", 2048)):
        body = f"multimem.ld_reduce.weak.global.add{sums}.v4.f16x2 {{%a, %b, %c, %d}}, [%all]; {STORE}"
        results = {float(np.frombuffer(reduced(body, numbers, seed=seed)[0], F16)[0]) for seed in range(8)}
        assert right in results
        assert sums == "" or results == {2050}


@pytest.mark.parametrize(("body", "result"), [
    ("mov.u32 %a, 7; multimem.st.weak.global.u32 [%all], %a;", [7, 7, 7]),
    ("mov.u32 %a, 7; multimem.red.relaxed.sys.global.add.u32 [%all], %a;", [8, 9, 10]),
    ("mov.u32 %a, 2; multimem.red.release.sys.global.max.u32 [%all], %a;", [2, 2, 3]),
    ("mov.u32 %a, 1; multimem.red.global.or.b32 [%all], %a;", [1, 3, 3])])
def test_writes_reach_all_gpus(body: str, result: list[int]) -> None:
    _, memory, found = reduced(body, [np.array([each, 9], np.uint32) for each in (1, 2, 3)])
    assert found == []
    assert [np.frombuffer(each, np.uint32).tolist() for each in memory] == [[each, 9] for each in result]


READ = "multimem.ld_reduce.weak.global.add.u32 %a, [%all];"


@pytest.mark.parametrize(("body", "offset", "kind", "words"), [
    (READ, 8, "out-of-bounds", "no address of a multicast object"), (READ, 2, "misaligned", "not a multiple"),
    ("multimem.st.weak.global.v4.f32 [%all], {%a, %b, %c, %d};", 0, "out-of-bounds", "no address of a"),
    ("ld.global.u32 %a, [%all];", 0, "out-of-bounds", "read of 4 bytes")])
def test_what_is_outside(body: str, offset: int, kind: str, words: str) -> None:
    """Ordinary loads do not reach a multicast object."""
    *_, found = reduced(body, [np.zeros(2, np.uint32)] * 3, offset)
    assert [each.kind for each in found] == [kind]
    assert words in found[0].message


def test_races_are_seen_in_every_gpu() -> None:
    """GPU 0 writes its own memory while GPU 1 reads that of all."""
    gpus = [Emulator(ordinal=i) for i in range(2)]
    peers = Peers(gpus, 1)
    buffers = [gpu.zeros(16) for gpu in gpus]
    every, found = peers.multicast(buffers), list[Finding]()

    def work(gpu: int, body: str, address: int) -> Work:
        report = yield launching(gpus[gpu], kernel(body), 1, 1, (address, gpus[gpu].zeros(16)))
        assert report is not None
        found.extend(report.findings)
    peers.run([work(0, "mov.u32 %a, 1; st.global.u32 [%all], %a;", buffers[0].ptr), work(1, READ, every.ptr)])
    assert [each.kind for each in found] == ["race"]


def test_objects_that_cannot_be() -> None:
    gpus = [Emulator(ordinal=i) for i in range(2)]
    with pytest.raises(PTXError, match="2 buffers of"):
        Peers(gpus).multicast([gpus[0].zeros(16), gpus[1].zeros(32)])


# **** flags, scopes and fences between GPUs ****

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


def test_a_programmatic_launch_publishes_what_is_ahead_of_it_once_it_has_waited() -> None:
    """GPU 0 writes in one launch, and sets the flag in the next, which may begin before that has ended."""
    for waits in (True, False):
        kinds = set()
        for seed in SEEDS:
            first, second = peers = gpus()
            data, flag, out = first.zeros(4), first.zeros(4), second.zeros(4)
            order = ("griddepcontrol.wait;", RELEASE) if waits else (RELEASE, "griddepcontrol.wait;")
            sets = writer("\n".join(order), "").replace("writer(", "sets(")
            found: list[Finding] = []

            def writes(first: Emulator = first, args: tuple[Any, ...] = (data, flag, 7),
                       sets: str = sets, found: list[Finding] = found) -> Work:
                report = yield launching(first, writer(""), 1, 1, args, footprint=True)
                assert report is not None
                assert report.footprint is not None
                report = yield launching(first, sets, 1, 1, args, ahead=[report.footprint])
                assert report is not None
                found += report.findings

            def reads(second: Emulator = second, args: tuple[Any, ...] = (data, flag, out),
                      found: list[Finding] = found) -> Work:
                report = yield launching(second, reader(), 1, 1, args)
                assert report is not None
                found += report.findings
            Peers(peers, seed).run([writes(), reads()])
            kinds |= {one.kind for one in found}
        assert kinds == (set() if waits else {"race"})
