"""Asynchronous copies without a tensor map: cp.async and its groups, bulk copies, reductions, st.async.

Data are integers (or floats that are), so results are exact. Each hazard is tried beside its cure.
"""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator

SEEDS = (0, 1, 2, 3)
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k({params}) {{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<20>; .reg .f32 %f<8>;
  .shared .align 128 .b8 tile[4096];
  .shared .align 128 .b8 other[4096];
  .shared .align 8 .b64 bar[4];
{loads}
  mov.u32 %r0, %tid.x;
  shl.b32 %r1, %r0, 4;
  mov.u32 %r2, tile;
  add.u32 %r3, %r2, %r1;
  mov.u32 %r4, bar;
  mov.u32 %r5, other;
  add.u32 %r6, %r5, %r1;
  cvt.u64.u32 %d8, %r1;
  setp.eq.u32 %p0, %r0, 0;
{body}
  ret;
}}
"""
INIT = """
  @%p0 mbarrier.init.shared::cta.b64 [%r4], {count};
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4{at}], {parity};
  @!%p1 bra W{n};
"""


def wait(n: int = 0, parity: int = 0, at: str = "") -> str: return WAIT.format(n=n, parity=parity, at=at)


def kernel(body: str, pointers: int = 2, scalars: int = 0) -> str:
    """A kernel whose pointer parameters are in %d0…, 32-bit ones in %r20…; thread t's 16 bytes of `tile` are
    at %r3, of `other` at %r6, and %d8 is 16 t."""
    names = [*(f".param .u64 p{i}" for i in range(pointers)), *(f".param .u32 s{i}" for i in range(scalars))]
    loads = [*(f"  ld.param.u64 %d{i}, [p{i}];" for i in range(pointers)),
             *(f"  ld.param.u32 %r{20 + i}, [s{i}];" for i in range(scalars))]
    return HEAD.format(params=", ".join(names), loads="\n".join(loads), body=body)


def kinds(report) -> set[str]: return {finding.kind for finding in report.findings}


def run(body: str, *args, seed: int = 0, block: int = 32, scalars: int = 0, **more):
    emu = Emulator(seed=seed)
    buffers = [emu.alloc(a) if isinstance(a, np.ndarray) else a for a in args]
    pointers = len(args) - scalars
    return emu.launch(kernel(body, pointers, scalars), grid=more.pop("grid", 1), block=block, args=buffers,
                      **more), [b.numpy() for b in buffers[:pointers]]


def numbers(count: int) -> np.ndarray: return np.arange(1, count + 1, dtype=np.uint32)


# **** cp.async ****

COPY = "  add.u64 %d2, %d0, %d8;\n  add.u64 %d3, %d1, %d8;\n"
BACK = """  ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];
  st.global.v4.b32 [%d3], {%r10, %r11, %r12, %r13};
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("end", ["cp.async.commit_group;\n cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_copy_arrives(seed: int, end: str) -> None:
    report, (source, out) = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\n" + end + BACK, numbers(128),
                                np.zeros(128, np.uint32), seed=seed)
    assert not report.findings
    assert (out == source).all()
    assert report.stats.asynchronous_bytes == report.stats.global_read_bytes == 512


def test_copy_without_wait_is_found() -> None:
    body = COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.commit_group;\n" + BACK
    report, (_, out) = run(body, numbers(128), np.zeros(128, np.uint32))
    assert {"async-hazard", "uninitialized"} <= kinds(report)
    assert (out == 0xffffffff).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("size", "bytes_", "wanted"), [(16, 16, 4), (16, 8, 2), (16, 0, 0), (8, 4, 1), (4, 4, 1)])
def test_source_size_fills_with_zeros(seed: int, size: int, bytes_: int, wanted: int) -> None:
    body = COPY + f"cp.async.ca.shared.global [%r3], [%d2], {size}, %r20;\ncp.async.wait_all;\n"
    for i in range(size // 4): body += f"ld.shared.b32 %r10, [%r3+{4 * i}];\nst.global.b32 [%d3+{4 * i}], %r10;\n"
    source = numbers(128)
    report, (_, out) = run(body, source, np.full(128, 7, np.uint32), bytes_, scalars=1, seed=seed)
    expected = np.full((32, 4), 7, np.uint32)
    expected[:, :size // 4] = 0
    expected[:, :wanted] = source.reshape(32, 4)[:, :wanted]
    assert not report.findings
    assert (out.reshape(32, 4) == expected).all()


def test_source_size_zero_reads_nothing() -> None:
    report, (_, out) = run("mov.u64 %d2, 16;\nadd.u64 %d3, %d1, %d8;\n"
                           "cp.async.cg.shared.global [%r3], [%d2], 16, 0;\ncp.async.wait_all;\n" + BACK,
                           numbers(128), np.full(128, 7, np.uint32))
    assert not report.findings
    assert not out.any()


def test_ignore_source_predicate() -> None:
    report, (source, out) = run(COPY + "setp.lt.u32 %p2, %r0, 8;\n"
                                "cp.async.cg.shared.global [%r3], [%d2], 16, %p2;\ncp.async.wait_all;\n" + BACK,
                                numbers(128), np.full(128, 7, np.uint32))
    assert not report.findings
    assert not out[:32].any()
    assert (out[32:] == source[32:]).all()


def test_source_size_too_large_is_found() -> None:
    report, _ = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16, 20;\ncp.async.wait_all;\n", numbers(128),
                    np.zeros(128, np.uint32))
    assert kinds(report) == {"out-of-bounds"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("left", [0, 1])
def test_groups_end_in_order(seed: int, left: int) -> None:
    """Two groups; wait_group 1 is enough for the first, not for the second."""
    body = COPY + ("cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.commit_group;\n"
                   "cp.async.cg.shared.global [%r6], [%d2], 16;\ncp.async.commit_group;\n"
                   f"cp.async.wait_group {left};\n") + BACK
    report, (source, out) = run(body, numbers(128), np.zeros(128, np.uint32), seed=seed)
    assert not report.findings
    assert (out == source).all()
    second, _ = run(body.replace("[%r3];", "[%r6];"), numbers(128), np.zeros(128, np.uint32), seed=seed)
    assert ("async-hazard" in kinds(second)) == bool(left)


@pytest.mark.parametrize("who", ["", "@%p0 "])
def test_one_thread_does_not_wait_for_all(who: str) -> None:
    """A wait is for the thread's own copies: with @%p0 only thread 0 waits, and all read."""
    report, (source, out) = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.commit_group;\n"
                                + who + "cp.async.wait_group 0;\nbar.sync 0;\n" + BACK, numbers(128),
                                np.zeros(128, np.uint32))
    assert ("async-hazard" in kinds(report)) == bool(who)
    assert who or (out == source).all()


def test_own_copy_after_a_wait_of_some_lanes() -> None:
    """Lane 0 waits and reads what it copied itself while the others have not waited: no hazard."""
    report, (source, out) = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\ncp.async.commit_group;\n"
                                "@!%p0 bra L;\ncp.async.wait_group 0;\n" + BACK + "L: cp.async.wait_group 0;\n",
                                numbers(128), np.zeros(128, np.uint32))
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
        f"cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r4];\nbar.warp.sync 0xffffffff;\n{arrive}") + wait() + BACK
    report, (source, out) = run(body, numbers(128), np.zeros(128, np.uint32), seed=seed)
    assert not report.findings
    assert (out == source).all()


def test_mbarrier_does_not_cover_later_copies() -> None:
    body = COPY + INIT.format(count=32) + (
        "cp.async.cg.shared.global [%r6], [%d2], 16;\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4];\n"
        "cp.async.cg.shared.global [%r3], [%d2], 16;\n") + wait() + BACK
    report, _ = run(body, numbers(128), np.zeros(128, np.uint32))
    assert "async-hazard" in kinds(report)


@pytest.mark.parametrize(("change", "kind"), [("[%d2+4], 16", "misaligned"), ("[%d2+512], 16", "out-of-bounds")])
def test_bad_source(change: str, kind: str) -> None:
    report, _ = run(COPY + f"cp.async.cg.shared.global [%r3], {change};\ncp.async.wait_all;\n", numbers(128),
                    np.zeros(128, np.uint32))
    assert kind in kinds(report)


@pytest.mark.parametrize("text", ["cp.async.cg.shared.global [%r3], [%d2], 8;", "cp.async.wait_group -1;"])
def test_copies_that_ptx_does_not_have(text: str) -> None:
    with pytest.raises(PTXError): run(COPY + text, numbers(128), np.zeros(128, np.uint32))


def test_overwriting_a_source_in_flight_is_found() -> None:
    report, _ = run(COPY + "cp.async.cg.shared.global [%r3], [%d2], 16;\nst.global.b32 [%d2], %r0;\n"
                    "cp.async.wait_all;\n", numbers(128), np.zeros(128, np.uint32))
    assert kinds(report) == {"async-hazard"}


# **** bulk copies ****

EXPECT = "  @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 %d9, [%r4], {bytes};\n"
LOAD = "  @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], {bytes}, [%r4];\n"
STORE = "  @%p0 cp.async.bulk.global.shared::cta.bulk_group [%d1], [{source}], 512;\n"
FILL = "  st.shared.v4.b32 [%r3], {%r0, %r1, %r2, %r3};\n"
FENCE = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_there_and_back(seed: int) -> None:
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + STORE.format(source="%r2") + DONE)
    report, (source, out) = run(body, numbers(128), np.zeros(128, np.uint32), seed=seed)
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
                 f"[%r2+{i * each}], [%d0+{i * each}], {each}, [%r4], %d9;\n")
    report, (source, out) = run("mov.b64 %d9, 0;\n" + body + wait() + BACK, numbers(128), np.zeros(128, np.uint32),
                                seed=seed)
    assert not report.findings
    assert (out == source).all()


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
    clean, _ = run(body, numbers(128), np.zeros(128, np.uint32))
    report, _ = run(body.replace(old, new), numbers(128), np.zeros(128, np.uint32))
    assert not clean.findings
    assert kind in kinds(report)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_one_copy_expected_for_two(seed: int) -> None:
    """The phase ends with the first copy; the second belongs to none."""
    second = LOAD.format(bytes=256).replace("[%r2]", "[%r2+256]")
    body = COPY + INIT.format(count=1) + EXPECT.format(bytes=256) + LOAD.format(bytes=256) + second + wait() + BACK
    report, _ = run(body, numbers(128), np.zeros(128, np.uint32), seed=seed)
    assert "async-hazard" in kinds(report)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fence", "kind"), [(FENCE, None), ("bar.sync 0;\n", "proxy-fence"),
                                             ("fence.proxy.async.shared::cta;\n", "race")])
def test_bulk_store_needs_fence_and_barrier(seed: int, fence: str, kind: str | None) -> None:
    report, (_, out) = run(FILL + fence + STORE.format(source="%r2") + DONE, numbers(4), np.zeros(128, np.uint32),
                           seed=seed, block=32)
    if kind == "race": assert kinds(report) & {"race", "async-hazard"}
    else: assert kinds(report) == ({kind} if kind else set())
    assert kind or (out.reshape(32, 4)[:, 0] == np.arange(32)).all()


@pytest.mark.parametrize("wait_", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;", ""])
def test_source_of_a_bulk_store_is_reused(wait_: str) -> None:
    """.read is enough to write over the source, nothing is not."""
    again = f"cp.async.bulk.commit_group;\n{wait_}\nbar.sync 0;\n" + FILL.replace("%r0", "%r5")
    body = FILL + FENCE + STORE.format(source="%r2") + again + "cp.async.bulk.wait_group 0;\n"
    report, (_, out) = run(body, numbers(4), np.zeros(128, np.uint32))
    assert kinds(report) == (set() if wait_ else {"async-hazard"})
    if wait_: assert (out.reshape(32, 4)[:, 0] == np.arange(32)).all()


@pytest.mark.parametrize("read", [".read", ""])
def test_destination_of_a_bulk_store_needs_the_full_wait(read: str) -> None:
    body = FILL + FENCE + STORE.format(source="%r2") + (
        f"cp.async.bulk.commit_group;\ncp.async.bulk.wait_group{read} 0;\n"
        "@%p0 ld.global.b32 %r10, [%d1];\n@%p0 st.global.b32 [%d0], %r10;\ncp.async.bulk.wait_group 0;\n")
    report, (first, _) = run(body, numbers(4), np.full(128, 5, np.uint32))
    assert kinds(report) == ({"async-hazard"} if read else set())
    assert read or first[0] == 0


def test_exit_before_the_source_is_read() -> None:
    report, _ = run(FILL + FENCE + STORE.format(source="%r2") + "cp.async.bulk.commit_group;\n", numbers(4),
                    np.zeros(128, np.uint32))
    assert kinds(report) == {"async-hazard"}


def test_prefetch_is_a_hint_that_checks_bounds() -> None:
    report, _ = run("cp.async.bulk.prefetch.L2.global [%d0], 512;\n", numbers(128))
    assert not report.findings
    report, _ = run("cp.async.bulk.prefetch.L2.global [%d0], 528;\n", numbers(128))
    assert kinds(report) == {"out-of-bounds"}


# **** reductions ****

REDUCTIONS = [("add.u32", np.uint32, np.add), ("add.s32", np.int32, np.add), ("add.u64", np.uint64, np.add),
              ("min.u32", np.uint32, np.minimum), ("max.s32", np.int32, np.maximum),
              ("min.s64", np.int64, np.minimum), ("max.u64", np.uint64, np.maximum), ("and.b32", np.uint32, np.bitwise_and),
              ("or.b64", np.uint64, np.bitwise_or), ("xor.b32", np.uint32, np.bitwise_xor),
              ("add.f32", np.float32, np.add), ("add.f64", np.float64, np.add),
              ("add.noftz.f16", np.float16, np.add),
              ("min.f16", np.float16, np.minimum), ("max.f16", np.float16, np.maximum),
              ("inc.u32", np.uint32, lambda x, y: np.where(x >= y, 0, x + 1)),
              ("dec.u32", np.uint32, lambda x, y: np.where((x == 0) | (x > y), y, x - 1))]


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize(("name", "dtype", "how"), REDUCTIONS)
def test_bulk_reductions(seed: int, name: str, dtype: type, how) -> None:
    rng = np.random.default_rng(5)
    low = -100 if np.dtype(dtype).kind in "if" else 0
    x, y = (rng.integers(low, 100, 512 // np.dtype(dtype).itemsize).astype(dtype) for _ in range(2))
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + f"@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{name} [%d1], [%r2], 512;\n" + DONE)
    report, (_, out) = run(body, y, x, seed=seed)
    assert not report.findings
    assert (out == how(x, y).astype(dtype)).all()


def test_bulk_reduction_of_bf16() -> None:
    x, y = np.arange(256, dtype=np.float32), np.arange(256, dtype=np.float32)[::-1] / 2
    half = [(v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for v in (x, y)]
    body = (INIT.format(count=1) + EXPECT.format(bytes=512) + LOAD.format(bytes=512) + wait()
            + "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d1], [%r2], 512;\n" + DONE)
    report, (_, out) = run(body, half[1], half[0])
    kept = [(h.astype(np.uint32) << 16).view(np.float32) for h in half]
    bits = (kept[0] + kept[1]).view(np.uint32)
    assert not report.findings
    assert (out == ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)).all()


def test_reductions_of_two_ctas_do_not_race() -> None:
    body = "mov.b32 %r10, 1;\n" + FILL.replace("{%r0, %r1, %r2, %r3}", "{%r10, %r10, %r10, %r10}")
    body += FENCE + "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r2], 512;\n" + DONE
    report, (_, out) = run(body, numbers(4), np.zeros(128, np.uint32), grid=3)
    assert not report.findings
    assert (out == 3).all()
    body = body.replace("cp.reduce", "cp").replace(".add.u32", "")
    copies, _ = run(body, numbers(4), np.zeros(128, np.uint32), grid=3)
    assert kinds(copies) == {"async-hazard"}


# **** clusters ****

RANK = "  mov.u32 %r14, %cluster_ctarank;\n  xor.b32 %r15, %r14, 1;\n"
SYNC = "  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"
OUT = "  mul.wide.u32 %d7, %r14, 512;\n  add.u64 %d1, %d1, %d7;\n  add.u64 %d3, %d1, %d8;\n"


@pytest.mark.parametrize("seed", SEEDS)
def test_copy_into_another_cta(seed: int) -> None:
    """Each CTA copies its `other` into its peer's `tile`."""
    body = RANK + OUT + INIT.format(count=1) + EXPECT.format(bytes=512) + SYNC + (
        "mad.lo.u32 %r10, %r14, 1000, %r0;\nst.shared.v4.b32 [%r6], {%r10, %r10, %r10, %r10};\n" + FENCE +
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\nmapa.shared::cluster.u32 %r17, %r4, %r15;\n"
        "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r16], [%r5], 512, [%r17];\n"
        ) + wait() + BACK + SYNC
    report, (_, out) = run(body, numbers(4), np.zeros(256, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
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
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{form}.b32 [%r16], {operand}, [%r17];\n") + wait() + (
        "ld.shared.b32 %r11, [%r3];\nst.global.b32 [%d3], %r11;\n") + SYNC
    report, (_, out) = run(body, numbers(4), np.zeros(256, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
    assert not report.findings
    assert (out.reshape(2, 32, 4)[:, :, 0] == np.array([1000, 0])[:, None] + np.arange(32)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_red_async(seed: int) -> None:
    """All threads of both CTAs add to one word of CTA 0."""
    body = RANK + INIT.format(count=1) + "@%p0 mov.b32 %r10, 7;\n@%p0 st.shared.b32 [%r2], %r10;\n" + EXPECT.format(
        bytes=256) + SYNC + ("mov.b32 %r18, 0;\n"
        "mapa.shared::cluster.u32 %r16, %r2, %r18;\nmapa.shared::cluster.u32 %r17, %r4, %r18;\n"
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r16], %r0, [%r17];\n"
        "setp.ne.u32 %p2, %r14, 0;\n@%p2 bra END;\n") + wait() + (
        "@%p0 ld.shared.b32 %r11, [%r2];\n@%p0 st.global.b32 [%d1], %r11;\nEND:\n") + SYNC
    report, (_, out) = run(body, numbers(4), np.zeros(4, np.uint32), seed=seed, grid=2, cluster=(2, 1, 1))
    assert not report.findings
    assert out[0] == 7 + 2 * sum(range(32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mask", [1, 2, 3])
def test_bulk_multicast(seed: int, mask: int) -> None:
    """CTA 0 copies to the CTAs of the mask, each of which waits on its own mbarrier."""
    body = RANK + OUT + INIT.format(count=1) + (
        "shr.b32 %r18, %r20, %r14;\nand.b32 %r18, %r18, 1;\nsetp.eq.u32 %p3, %r18, 1;\ncvt.u16.u32 %h0, %r20;\n"
        "mul.lo.u32 %r19, %r18, 512;\n") + EXPECT.format(bytes="%r19") + SYNC + (
        "setp.eq.u32 %p4, %r14, 0;\nand.pred %p4, %p4, %p0;\n"
        "@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r2], [%d0], 512, [%r4], %h0;\n") + wait() + "@!%p3 bra END;\n" + BACK + "END:\n" + SYNC
    report, (source, out) = run(body, numbers(128), np.zeros(256, np.uint32), mask, scalars=1, seed=seed, grid=2,
                                cluster=(2, 1, 1))
    assert not report.findings
    for rank in range(2): assert (out.reshape(2, 128)[rank] == (source if mask >> rank & 1 else 0)).all()


def test_multicast_beyond_the_cluster() -> None:
    body = INIT.format(count=1) + ("mov.b16 %h0, 2;\n@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::"
                                   "bytes.multicast::cluster [%r2], [%d0], 512, [%r4], %h0;\n")
    report, _ = run(body, numbers(128))
    assert kinds(report) == {"out-of-bounds"}


def test_mbarrier_in_another_cta_than_the_data() -> None:
    body = RANK + INIT.format(count=1) + SYNC + (
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\n"
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r16], [%d0], 512, [%r4];\n") + SYNC
    report, _ = run(body, numbers(128), grid=2, cluster=(2, 1, 1))
    assert kinds(report) == {"barrier"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_exit_while_a_peer_copies_here(seed: int, waits: bool) -> None:
    body = RANK + INIT.format(count=1) + EXPECT.format(bytes=512) + SYNC + (
        "mapa.shared::cluster.u32 %r16, %r2, %r15;\nmapa.shared::cluster.u32 %r17, %r4, %r15;\n"
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r16], [%d0], 512, [%r17];\n"
        + SYNC) + (wait() if waits else "")
    report, _ = run(body, numbers(128), seed=seed, grid=2, cluster=(2, 1, 1))
    assert kinds(report) == (set() if waits else {"async-hazard"})
