"""Bulk copies without a tensor map, reductions, st.async and red.async, within a CTA and across a cluster.

Data are integers (or floats that are), so results are exact. Each hazard is tried beside its cure.
"""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.async_case import BACK, COPY, DATA, INIT, SEEDS, ZEROS, kinds, run, wait

# **** bulk copies ****

EXPECT = "  @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 %d9, [%r4], {bytes};\n"
COPY_HERE = "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
LOAD = f"  {COPY_HERE} [%r2], [%d0], {{bytes}}, [%r4];\n"
STORE = "  @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [{source}], 512;\n"
FILL = "  st.shared.v4.b32 [%r3], {%r0, %r1, %r2, %r3};\n"
FENCE = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_there_and_back(seed: int) -> None:
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + STORE.format(source="%r2") + DONE)
    report, (source, out) = run(body, DATA, ZEROS, seed=seed)
    assert not report.findings
    assert (out == source).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_bulk_pieces_on_one_mbarrier(seed: int, pieces: int) -> None:
    """Several copies, expected at once, read by all threads."""
    each = 512 // pieces
    body = COPY + INIT.format(count=1) + EXPECT.format(bytes=512)
    for i in range(pieces):
        body += ("@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 f"[%r2+{i * each}], [%d0+{i * each}], {each}, [%r4], %d10;\n")
    made = "createpolicy.fractional.L2::evict_first.b64 %d10;\n"
    report, (source, out) = run(made + body + wait() + BACK, DATA, ZEROS, seed=seed)
    assert not report.findings
    assert (out == source).all()
    # the state of the mbarrier is no policy: an illegal instruction on an H100
    report, _ = run("mov.b64 %d9, 0;\n" + body.replace("%d10", "%d9") + wait() + BACK, DATA, ZEROS, seed=seed)
    assert [finding.kind for finding in report.findings] == ["out-of-bounds"] * pieces
    assert "is no cache policy" in report.findings[0].message


@pytest.mark.parametrize(("old", "new", "kind"), [
    (wait(), "", "async-hazard"),                                        # read before it is there
    ("%d9, [%r4], 512", "%d9, [%r4], 528", "deadlock"),                  # bytes that never come
    ("%d9, [%r4], 512", "%d9, [%r4], 496", "deadlock"),                  # more than were expected
    ("[%d0], 512", "[%d0+8], 496", "misaligned"),
    ("[%r2], [%d0]", "[%r2+4], [%d0]", "misaligned"),
    ("[%d0], 512", "[%d0+16], 512", "out-of-bounds"),
    ("512, [%r4]", "512, [%r4+8]", "barrier"),                           # no mbarrier there
])
def test_bulk_load_mistakes(old: str, new: str, kind: str) -> None:
    body = COPY + INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait() + BACK
    assert old in body
    clean, _ = run(body, DATA, ZEROS)
    report, _ = run(body.replace(old, new), DATA, ZEROS)
    assert not clean.findings
    assert kind in kinds(report)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_one_copy_expected_for_two(seed: int) -> None:
    """The phase ends with the first copy; the second belongs to none."""
    second = LOAD.format(bytes=256).replace("[%r2]", "[%r2+256]")
    body = COPY + INIT.format(count=1) + EXPECT.format(bytes=256) + LOAD.format(bytes=256) + second
    body += wait() + BACK + wait(1, parity=1)
    report, _ = run(body, DATA, ZEROS, seed=seed)
    assert any("completes in a later" in f.message for f in report.findings if f.kind == "async-hazard")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fence", "kind"), [(FENCE, None), ("bar.sync 0;\n", "proxy-fence"),
                                             ("fence.proxy.async.shared::cta;\n", "race"),
                                             (FENCE.replace("shared::cta", "global"), "proxy-fence")])
def test_bulk_store_needs_fence_and_barrier(seed: int, fence: str, kind: str | None) -> None:
    report, (_, out) = run(FILL + fence + STORE.format(source="%r2") + DONE, DATA, ZEROS,
                           seed=seed, block=32)
    if kind == "race": assert kinds(report) & {"race", "async-hazard"}
    else: assert kinds(report) == ({kind} if kind else set())
    assert kind or (out.reshape(32, 4)[:, 0] == np.arange(32)).all()


@pytest.mark.parametrize("wait_", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;", ""])
def test_source_of_a_bulk_store_is_reused(wait_: str) -> None:
    """.read is enough to write over the source, nothing is not."""
    again = f"cp.async.bulk.commit_group;\n{wait_}\nbar.sync 0;\n" + FILL.replace("%r0", "%r5")
    body = FILL + FENCE + STORE.format(source="%r2") + again + "cp.async.bulk.wait_group 0;\n"
    report, (_, out) = run(body, DATA, ZEROS)
    assert kinds(report) == (set() if wait_ else {"async-hazard"})
    if wait_: assert (out.reshape(32, 4)[:, 0] == np.arange(32)).all()


@pytest.mark.parametrize("read", [".read", ""])
def test_destination_of_a_bulk_store_needs_the_full_wait(read: str) -> None:
    body = FILL + FENCE + STORE.format(source="%r2") + (
        f"cp.async.bulk.commit_group;\ncp.async.bulk.wait_group{read} 0;\n"
        "@%p0 ld.global.b32 %r10, [%d1];\n@%p0 st.global.b32 [%d0], %r10;\ncp.async.bulk.wait_group 0;\n")
    report, (first, _) = run(body, DATA, np.full(128, 5, np.uint32))
    assert kinds(report) == ({"async-hazard"} if read else set())
    assert read or first[0] == 0


@pytest.mark.parametrize("fence", ["", "fence.proxy.async.shared::cta;\n"])
def test_a_tile_is_refilled_after_it_was_read(fence: str) -> None:
    """A note: PTX asks for a fence between the reads and the next copy; CUTLASS's pipelines do without."""
    load = EXPECT.format(bytes=512) + LOAD.format(bytes=512)
    read = wait() + COPY + BACK + fence + "bar.sync 0;\n"
    body = INIT.format(count=1) + load + read + load + wait(1, parity=1)
    report, (source, out) = run(body, DATA, ZEROS)
    assert not report.findings
    assert (out == source).all()
    noted = ["a read (line" in note.message and "fence.proxy.async" in note.message for note in report.notes]
    assert noted == ([] if fence else [True])


def test_exit_before_the_source_is_read() -> None:
    """A note: PTX asks for the wait, but DeepGEMM's last stores run right without."""
    report, _ = run(FILL + FENCE + STORE.format(source="%r2") + "cp.async.bulk.commit_group;\n", DATA, ZEROS)
    assert not report.findings
    assert ["wait_group.read" in note.message for note in report.notes] == [True]


def test_prefetch_is_a_hint_that_checks_bounds() -> None:
    report, _ = run("cp.async.bulk.prefetch.L2.global [%d0], 512;\n", DATA)
    assert not report.findings
    report, _ = run("cp.async.bulk.prefetch.L2.global [%d0], 528;\n", DATA)
    assert kinds(report) == {"out-of-bounds"}


# **** reductions ****

REDUCE = "  @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{how} [%d1], [%r2], 512;\n"

REDUCTIONS = [("add.u32", np.uint32, np.add), ("add.s32", np.int32, np.add), ("add.u64", np.uint64, np.add),
              ("min.u32", np.uint32, np.minimum), ("max.s32", np.int32, np.maximum),
              ("min.s64", np.int64, np.minimum), ("max.u64", np.uint64, np.maximum),
              ("and.b32", np.uint32, np.bitwise_and),
              ("or.b64", np.uint64, np.bitwise_or), ("xor.b32", np.uint32, np.bitwise_xor),
              ("add.f32", np.float32, np.add), ("add.f64", np.float64, np.add),
              ("add.noftz.f16", np.float16, np.add),
              ("min.f16", np.float16, np.minimum), ("max.f16", np.float16, np.maximum),
              ("inc.u32", np.uint32, lambda x, y: np.where(x >= y, 0, x + 1)),
              ("dec.u32", np.uint32, lambda x, y: np.where((x == 0) | (x > y), y, x - 1))]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "dtype", "how"), REDUCTIONS)
def test_bulk_reductions(seed: int, name: str, dtype: type, how) -> None:
    check_reduction(seed, name, dtype, how)


@pytest.mark.parametrize(("name", "dtype", "how"), REDUCTIONS[-2:])
def test_bulk_counters_wrap(name: str, dtype: type, how) -> None: check_reduction(0, name, dtype, how)


def check_reduction(seed: int, name: str, dtype: type, how) -> None:
    rng = np.random.default_rng(5)
    low = -100 if np.dtype(dtype).kind in "if" else 0
    x, y = (rng.integers(low, 100, 512 // np.dtype(dtype).itemsize).astype(dtype) for _ in range(2))
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + REDUCE.format(how=name) + DONE)
    report, (_, out) = run(body, y, x, seed=seed)
    assert not report.findings
    assert (out == how(x, y).astype(dtype)).all()


def test_bulk_reduction_of_bf16() -> None:
    x, y = np.arange(256, dtype=np.float32), np.arange(256, dtype=np.float32)[::-1] / 2
    half = [(v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for v in (x, y)]
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + REDUCE.format(how="add.noftz.bf16") + DONE)
    report, (_, out) = run(body, half[1], half[0])
    kept = [(h.astype(np.uint32) << 16).view(np.float32) for h in half]
    bits = (kept[0] + kept[1]).view(np.uint32)
    assert not report.findings
    assert (out == ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)).all()


def test_reductions_of_two_ctas_do_not_race() -> None:
    body = "mov.b32 %r10, 1;\n" + FILL.replace("{%r0, %r1, %r2, %r3}", "{%r10, %r10, %r10, %r10}")
    body += FENCE + REDUCE.format(how="add.u32") + DONE
    report, (_, out) = run(body, DATA, ZEROS, grid=3)
    assert not report.findings
    assert (out == 3).all()
    body = body.replace("cp.reduce", "cp").replace(".add.u32", "")
    copies, _ = run(body, DATA, ZEROS, grid=3)
    assert kinds(copies) == {"async-hazard"}


@pytest.mark.parametrize(("how", "want"), [("min", [-0.0, -0.0, 3, 2, np.nan]),
                                           ("max", [0.0, 0.0, 3, 2, np.nan])])
def test_extremes_of_zeros_and_nans(how: str, want: list[float]) -> None:
    """-0 is less than +0, and a NaN gives way to a number."""
    x = np.resize(np.array([0.0, -0.0, np.nan, 2, np.nan], np.float16), 255)
    y = np.resize(np.array([-0.0, 0.0, 3, np.nan, np.nan], np.float16), 255)
    x, y = np.append(x, x[:1]), np.append(y, y[:1])
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + REDUCE.format(how=f"{how}.f16") + DONE)
    report, (_, out) = run(body, y, x)
    assert not report.findings
    for got, expected in zip(out, np.resize(np.array(want, np.float16), 256), strict=True):
        assert np.isnan(got) if np.isnan(expected) else got.tobytes() == expected.tobytes()


# **** clusters ****

SPIN = """  mov.u32 %r30, 0;
SPIN: add.u32 %r30, %r30, 1; setp.lt.u32 %p5, %r30, 3000;
  @%p5 bra SPIN;
"""

RANK = "  mov.u32 %r14, %cluster_ctarank;\n  xor.b32 %r15, %r14, 1;\n"
SYNC = "  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"
OUT = "  mul.wide.u32 %d7, %r14, 512;\n  add.u64 %d1, %d1, %d7;\n  add.u64 %d3, %d1, %d8;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_into_another_cta(seed: int) -> None:
    """Each CTA copies its `other` into its peer's `tile`."""
    body = RANK + OUT + INIT.format(count=1) + EXPECT.format(bytes=512) + SYNC + (
        "mad.lo.u32 %r10, %r14, 1000, %r0;\nst.shared.v4.b32 [%r6], {%r10, %r10, %r10, %r10};\n" + FENCE +
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\nmapa.shared::cluster.u32 %r17, %r4, %r15;\n"
        "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r16], [%r5], 512, [%r17];\n") + wait() + BACK + SYNC
    report, (_, out) = run(body, DATA, np.zeros(256, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
    assert not report.findings
    assert (out.reshape(2, 32, 4)[:, :, 0] == np.array([1000, 0])[:, None] + np.arange(32)).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_st_async(seed: int, vector: int) -> None:
    """Each thread stores to its peer's tile; the mbarrier there gets the bytes."""
    values = ["%r10", "%r0", "%r14", "%r10"][:vector]
    operand = "{" + ", ".join(values) + "}" if vector > 1 else values[0]
    form = f".v{vector}" if vector > 1 else ""
    body = RANK + OUT + INIT.format(count=1) + EXPECT.format(bytes=32 * 4 * vector) + SYNC + (
        "mad.lo.u32 %r10, %r14, 1000, %r0;\n"
        "mapa.shared::cluster.u32 %r16, %r3, %r15;\nmapa.shared::cluster.u32 %r17, %r4, %r15;\n"
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{form}.b32 [%r16], {operand}, [%r17];\n"
        ) + wait() + ("ld.shared.b32 %r11, [%r3];\nst.global.b32 [%d3], %r11;\n") + SYNC
    report, (_, out) = run(body, DATA, np.zeros(256, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
    assert not report.findings
    assert (out.reshape(2, 32, 4)[:, :, 0] == np.array([1000, 0])[:, None] + np.arange(32)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_red_async(seed: int) -> None:
    """All threads of both CTAs add to one word of CTA 0."""
    seven = "@%p0 mov.b32 %r10, 7;\n@%p0 st.shared.b32 [%r2], %r10;\n"
    body = RANK + INIT.format(count=1) + seven + EXPECT.format(bytes=256) + SYNC + ("mov.b32 %r18, 0;\n"
        "mapa.shared::cluster.u32 %r16, %r2, %r18;\nmapa.shared::cluster.u32 %r17, %r4, %r18;\n"
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
        "[%r16], %r0, [%r17];\n"
        "setp.ne.u32 %p2, %r14, 0;\n@%p2 bra END;\n") + wait() + (
        "@%p0 ld.shared.b32 %r11, [%r2];\n@%p0 st.global.b32 [%d1], %r11;\nEND:\n") + SYNC
    report, (_, out) = run(body, DATA, np.zeros(4, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
    assert not report.findings
    assert out[0] == 7 + 2 * sum(range(32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mask", [1, 2, 3])
def test_bulk_multicast(seed: int, mask: int) -> None:
    """CTA 0 copies to the CTAs of the mask, each of which waits on its own mbarrier."""
    body = RANK + OUT + INIT.format(count=1) + (
        "shr.b32 %r18, %r20, %r14;\nand.b32 %r18, %r18, 1;\nsetp.eq.u32 %p3, %r18, 1;\n"
        "cvt.u16.u32 %h0, %r20;\n"
        "mul.lo.u32 %r19, %r18, 512;\n") + EXPECT.format(bytes="%r19") + SYNC + (
        "setp.eq.u32 %p4, %r14, 0;\nand.pred %p4, %p4, %p0;\n"
        "@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r2], [%d0], 512, [%r4], %h0;\n") + wait() + "@!%p3 bra END;\n" + BACK + "END:\n" + SYNC
    report, (source, out) = run(body, DATA, np.zeros(256, np.uint32), mask, scalars=1, seed=seed, grid=2,
                                cluster=(2, 1, 1))
    assert not report.findings
    for rank in range(2): assert (out.reshape(2, 128)[rank] == (source if mask >> rank & 1 else 0)).all()


def test_multicast_beyond_the_cluster() -> None:
    body = INIT.format(count=1) + "mov.b16 %h0, 2;\n" + (
        f"{COPY_HERE}.multicast::cluster [%r2], [%d0], 512, [%r4], %h0;\n")
    report, _ = run(body, DATA)
    assert kinds(report) == {"out-of-bounds"}


def test_mbarrier_in_another_cta_than_the_data() -> None:
    body = RANK + INIT.format(count=1) + SYNC + (
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\n"
        f"{COPY_HERE} [%r16], [%d0], 512, [%r4];\n") + SYNC
    report, _ = run(body, DATA, grid=2, cluster=(2, 1, 1))
    assert kinds(report) == {"barrier"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_exit_while_a_peer_copies_here(seed: int, waits: bool) -> None:
    """Without the wait it is a hazard even when the copy happens to be complete."""
    body = RANK + INIT.format(count=1) + EXPECT.format(bytes=512) + SYNC + (
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\nmapa.shared::cluster.u32 %r17, %r4, %r15;\n"
        f"{COPY_HERE} [%r16], [%d0], 512, [%r17];\n"
        + SYNC) + (wait() if waits else SPIN)
    report, _ = run(body, DATA, seed=seed, grid=2, cluster=(2, 1, 1))
    assert kinds(report) == (set() if waits else {"async-hazard"})
