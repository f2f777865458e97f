"""cp.async: sizes, groups, mbarriers, hazards. Each hazard is tried beside its cure."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.async_case import (
    BACK,
    CG,
    COMMIT,
    COPY,
    DATA,
    INIT,
    SEEDS,
    SEVENS,
    ZEROS,
    kinds,
    numbers,
    run,
    wait,
)
from tinygrad_nv.errors import PTXError


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("end", ["cp.async.commit_group;\n cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_copy_arrives(seed: int, end: str) -> None:
    report, (source, out) = run(COPY + CG + end + BACK, DATA, ZEROS, seed=seed)
    assert not report.findings
    assert (out == source).all()
    assert report.stats.asynchronous_bytes == report.stats.global_read_bytes == 512


def test_copy_without_wait_is_found() -> None:
    body = COPY + CG + COMMIT + BACK
    report, (_, out) = run(body, DATA, ZEROS)
    assert kinds(report) == {"async-hazard"}     # of poison, but not of bytes that nothing writes
    assert (out == 0xffffffff).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("size", "bytes_", "wanted"),
                         [(16, 16, 4), (16, 8, 2), (16, 0, 0), (8, 4, 1), (4, 4, 1)])
def test_source_size_fills_with_zeros(seed: int, size: int, bytes_: int, wanted: int) -> None:
    body = COPY + f"cp.async.ca.shared.global [%r3], [%d2], {size}, %r20;\ncp.async.wait_all;\n"
    for i in range(0, size, 4): body += f"ld.shared.b32 %r10, [%r3+{i}];\nst.global.b32 [%d3+{i}], %r10;\n"
    source = DATA
    report, (_, out) = run(body, source, SEVENS, bytes_, scalars=1, seed=seed)
    expected = np.full((32, 4), 7, np.uint32)
    expected[:, :size // 4] = 0
    expected[:, :wanted] = source.reshape(32, 4)[:, :wanted]
    assert not report.findings
    assert (out.reshape(32, 4) == expected).all()


def test_source_size_zero_reads_nothing() -> None:
    report, (_, out) = run("mov.u64 %d2, 16;\nadd.u64 %d3, %d1, %d8;\n"
                           "cp.async.cg.shared.global [%r3], [%d2], 16, 0;\ncp.async.wait_all;\n" + BACK,
                           DATA, SEVENS)
    assert not report.findings
    assert not out.any()


def test_ignore_source_predicate() -> None:
    report, (source, out) = run(COPY + "setp.lt.u32 %p2, %r0, 8;\n"
                                "cp.async.cg.shared.global [%r3], [%d2], 16, %p2;\ncp.async.wait_all;\n"
                                + BACK, DATA, SEVENS)
    assert not report.findings
    assert not out[:32].any()
    assert (out[32:] == source[32:]).all()


def test_source_size_too_large_is_found() -> None:
    report, _ = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16, 20;\ncp.async.wait_all;\n", DATA,
                    ZEROS)
    assert kinds(report) == {"out-of-bounds"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("left", [0, 1])
def test_groups_end_in_order(seed: int, left: int) -> None:
    """Two groups; wait_group 1 is enough for the first, not for the second."""
    body = COPY + ("cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.commit_group;\n"
                   "cp.async.cg.shared.global [%r6], [%d2], 16;\ncp.async.commit_group;\n"
                   f"cp.async.wait_group {left};\n") + BACK
    report, (source, out) = run(body, DATA, ZEROS, seed=seed)
    assert not report.findings
    assert (out == source).all()
    second, _ = run(body.replace("[%r3];", "[%r6];"), DATA, ZEROS, seed=seed)
    assert ("async-hazard" in kinds(second)) == bool(left)


@pytest.mark.parametrize("who", ["", "@%p0 "])
def test_one_thread_does_not_wait_for_all(who: str) -> None:
    """A wait is for the thread's own copies: with @%p0 only thread 0 waits, and all read."""
    body = COPY + CG + COMMIT + who + "cp.async.wait_group 0;\nbar.sync 0;\n" + BACK
    report, (source, out) = run(body, DATA, ZEROS)
    assert ("async-hazard" in kinds(report)) == bool(who)
    assert who or (out == source).all()


def test_own_copy_after_a_wait_of_some_lanes() -> None:
    """Lane 0 waits and reads what it copied itself while the others have not waited: no hazard."""
    report, (source, out) = run(COPY + CG + COMMIT + "@!%p0 bra L;\ncp.async.wait_group 0;\n" + BACK
                                + "L: cp.async.wait_group 0;\n",
                                DATA, ZEROS)
    assert not report.findings
    assert (out[:4] == source[:4]).all()


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;\n"])
def test_copies_of_another_warp_need_a_barrier(barrier: str) -> None:
    body = COPY + ("cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.wait_all;\n" + barrier
                   + "xor.b32 %r7, %r3, 512;\n" + BACK.replace("[%r3]", "[%r7]"))
    report, (source, out) = run(body, numbers(256), np.zeros(256, np.uint32), block=64)
    assert bool(kinds(report) & {"async-hazard", "uninitialized"}) == (not barrier)
    assert not barrier or (out.reshape(2, 128) == source.reshape(2, 128)[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("noinc", "count"), [(".noinc", 32), ("", 1)])
def test_copies_arrive_at_an_mbarrier(seed: int, noinc: str, count: int) -> None:
    arrive = "" if noinc else "@%p0 mbarrier.arrive.shared::cta.b64 %d9, [%r4];\n"
    body = COPY + INIT.format(count=count) + ("cp.async.cg.shared.global [%r3], [%d2], 16;\n"
        f"cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r4];\nbar.warp.sync 0xffffffff;\n{arrive}")
    body += wait() + BACK
    report, (source, out) = run(body, DATA, ZEROS, seed=seed)
    assert not report.findings
    assert (out == source).all()


def test_mbarrier_does_not_cover_later_copies() -> None:
    body = COPY + INIT.format(count=32) + (
        "cp.async.cg.shared.global [%r6], [%d2], 16;\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4];\n"
        "cp.async.cg.shared.global [%r3], [%d2], 16;\n") + wait() + BACK
    report, _ = run(body, DATA, ZEROS)
    assert "async-hazard" in kinds(report)


@pytest.mark.parametrize(("change", "kind"),
                         [("[%d2+4], 16", "misaligned"), ("[%d2+512], 16", "out-of-bounds")])
def test_bad_source(change: str, kind: str) -> None:
    report, _ = run(COPY + f"cp.async.cg.shared.global [%r3], {change};\ncp.async.wait_all;\n", DATA, ZEROS)
    assert kind in kinds(report)


@pytest.mark.parametrize("text", ["cp.async.cg.shared.global [%r3], [%d2], 8;", "cp.async.wait_group -1;"])
def test_copies_that_ptx_does_not_have(text: str) -> None:
    with pytest.raises(PTXError): run(COPY + text, DATA, ZEROS)


def test_overwriting_a_source_in_flight_is_found() -> None:
    report, _ = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\nst.global.b32 [%d2], %r0;\n"
                    "cp.async.wait_all;\n", DATA, ZEROS)
    assert kinds(report) == {"async-hazard"}
