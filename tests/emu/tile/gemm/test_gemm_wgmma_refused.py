"""What the wgmma template refuses: each in words with the arithmetic, and nothing that it could do."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
from gemm_case import operand, product, result
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F32, E4M3, S8 = dtypes.bfloat16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
W = Wgmma().block(128, 128)
SPEC = product(512, 512, 512)


def strided(spec: GemmSpec, **more: int) -> GemmSpec: return replace(spec, a=replace(spec.a, **more))


GATE = GemmSpec(64, 24, 64, operand(BF16, 64, 64), operand(BF16, 48, 64, "MN"), result(BF16, 64, 24), parts=2,
                part=24)

SCHEDULES = {
    "5 warps: a producer and 1 to 3 consumers of 4 warps each are 8, 12 or 16": W.warps(5),
    "ping-pong with 1 consumer: 8 warps - 4 of the producer, at least 8": W.warps(8).pingpong(),
    "block_n=100 is not a multiple of 8 up to 256: no such wgmma": W.block(128, 100),
    "block_m=192 is not a multiple of 2 consumers × 64 = 128 rows up to 256": W.block(192, 128),
    "block_m=100 is not a multiple of 64 rows up to 256": W.block(100, 128).pingpong(),
    "block_k=24 × 2 B = 48 B is not a multiple of 32 B": W.k(24),
    "9 stages are not 2 to 8": W.stages(9),
    "8 stages × (16384 B of A + 32768 B of B)": W.block(128, 256).stages(8),
    "256 × 256 / 128 threads = 512 sums a thread, at most 200 with 1 consumers": W.block(256, 256).warps(8),
    "128 × 256 / 128 threads = 256 sums a thread, at most 200 with 2 consumers": W.block(256, 256).stages(2),
    "swizzle 128B is wider than the box's row, block_k: a row of 32 × 2 B = 64 B": W.k(32).swizzle("128B"),
    "swizzle 64B: block_k: a row of 48 × 2 B = 96 B is not made of rows of 64 B": W.k(48).swizzle("64B"),
    "cluster 3x1: 1, 2 or 4 along each side, at most 8 in all": W.cluster(3),
    "cluster 4x4: 1, 2 or 4 along each side, at most 8 in all": W.cluster(4, 4),
    "128 × 192 / 128 threads = 192 sums a thread, at most 160 with 2 consumers and those of other CTAs":
        W.block(256, 192).stages(3).streamed(),
    "3 splits: a cluster of 2, 4 or 8 CTAs shares a tile": W.split(3),
    "8 splits of K=512 / block_k=128 = 4 stages": W.k(128).stages(2).split(8),
    "2 splits in ping-pong: consumers share the tile's rows instead": W.pingpong().split(2),
    "stream-K with a cluster of 2x1: 1x1": W.streamed().cluster(2),
    "2 splits and stream-K: one of them": W.split(2).streamed(),
    "2 splits: 128 × 128 sums × 4 B = 65536 B do not fit in the ring's 3 × 16384 = 49152 B, where they meet":
        W.k(32).stages(3).split(2),
    "cluster 4x1: 24 rows of B / 4 CTAs are no multiple of 8": W.block(128, 24).cluster(4)}


@pytest.mark.parametrize("words", SCHEDULES)
def test_schedules_that_cannot_be(words: str):
    assert any(words in each for each in TABLE.problems(SPEC, SCHEDULES[words], GPU("sm_90a")))
    with pytest.raises(ScheduleError, match="a schedule without these problems"):
        TABLE.build(SPEC, SCHEDULES[words], GPU("sm_90a"))


def test_shared_memory_is_added_up():
    """Stages, the tile that results are stored from, two barriers of 8 bytes a stage."""
    [words] = TABLE.problems(SPEC, W.block(128, 256).stages(8), GPU("sm_90a"))
    sides, total = words.split(" = ")
    stages, a, b, *others = map(int, re.findall(r"\d+", sides))
    assert others[-1] == 8 * 2 * stages
    assert stages * (a + b) + sum(others) == int(total.split()[0]) > 232448


SPECS = {
    "a: MN stride 6 B is not a multiple of 16 B: no TMA": product(64, 64, 3),
    "a: K stride 1026 B is not a multiple of 16 B: no TMA": product(513, 512, 64, majors="MK"),
    "a: offset 2 B is not a multiple of 16 B: no TMA": strided(SPEC, offset=1),
    "a: batch[0] stride 130 B is not a multiple of 16 B: no TMA":
        replace(product(8, 64, 64, batch=(2,)), a=Operand(BF16, 64, 1, (65,))),
    "a: strides of 1024 along MN and 2 along K: elements lie side by side along neither, no TMA":
        strided(SPEC, mn=1024, k=2),
    f"a: MN-major operands of {E4M3.name}: wgmma takes them K-major only":
        product(64, 64, 64, E4M3, F32, "MK"),
    f"a: MN-major operands of {S8.name}: wgmma takes them K-major only": product(64, 64, 64, S8, majors="MK"),
    "float32 operands: wgmma has them cut to 10 bits": replace(product(64, 64, 64, F32), tf32=False)}


@pytest.mark.parametrize("words", SPECS)
def test_operands_that_tma_or_wgmma_cannot_take(words: str):
    found = TABLE.problems(SPECS[words], W.k(64).stages(2), GPU("sm_90a"))
    assert any(words in each for each in found), found


@pytest.mark.parametrize(("schedule", "words"), [
    (W.block(128, 24), "block_n=24 of 2 parts is not a multiple of 8 × 2"),
    (W.block(128, 48), "swizzle 32B: block_n: a row of 24 × 2 B = 48 B is not made of rows of 32 B"),
    (W.swapped(), "swapped: several parts cannot be columns")])
def test_tiles_that_parts_cannot_have(schedule: GemmSchedule, words: str):
    assert any(words in each for each in TABLE.problems(GATE, schedule, GPU("sm_90a")))


def test_parts_that_tma_cannot_reach():
    assert any("b: parts 40 B apart are not a multiple of 16 B: no TMA" in each
               for each in TABLE.problems(replace(GATE, part=20), W, GPU("sm_90a")))


@pytest.mark.parametrize("columns", [40, 56, 72, 104])
def test_bytes_have_fewer_widths(columns: int):
    found = TABLE.problems(product(512, 512, 512, S8), W.block(128, columns).k(128), GPU("sm_90a"))
    assert found == [f"block_n={columns} for bytes is not 8, 16, 24 or a multiple of 16 up to 256"]


def test_fp8_is_summed_twice():
    schedule = W.block(128, 256).k(128).stages(2)
    found = TABLE.problems(product(512, 512, 512, E4M3, F32), schedule, GPU("sm_90a"))
    assert found == ["64 × 256 / 128 threads × 2 (fp8 is summed twice) = 256 sums a thread, at most 200 "
                     "with 2 consumers"]


def test_three_consumers_have_fewer_registers():
    found = TABLE.problems(SPEC, W.block(192, 256).warps(16).stages(2).pingpong(), GPU("sm_90a"))
    assert any("192 × 256 / 128 threads = 384 sums a thread, at most 100 with 3 consumers" in each
               for each in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_other_architectures_have_no_wgmma(arch: str):
    assert TABLE.problems(SPEC, W, GPU(arch)) == [f"wgmma needs sm_90a, the target is {arch}"]


def test_a_batch_of_three_dimensions_and_a_matrix_are_five():
    spec = product(64, 64, 64, batch=(2, 2, 2))
    assert TABLE.problems(spec, W, GPU("sm_90a")) == []


@pytest.mark.parametrize("schedule", [W, W.block(128, 256), W.pingpong(), W.block(64, 8).warps(8),
                                      W.block(192, 128).warps(16), W.cluster(2, 2), W.swapped(),
                                      W.block(128, 192), W.split(4), W.streamed(), W.block(256, 128)])
def test_what_can_be_is_not_refused(schedule: GemmSchedule):
    assert TABLE.problems(SPEC, schedule, GPU("sm_90a")) == []
