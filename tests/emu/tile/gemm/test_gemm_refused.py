"""What templates of matmuls refuse, in words with the arithmetic, and nothing that they could do; and CTAs
that wait for others on a GPU that has room for few of the grid."""
from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile import backward_case, gemm_case
from tests.support.tile.backward_case import backward
from tests.support.tile.flash_backward_case import WIDE, mma
from tests.support.tile.flash_case import CAUSAL
from tests.support.tile.gemm_case import operand, product, reference, result
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.expression import Sum, silu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32, E4M3, S8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
M, W, V, HOPPER, AMPERE = Mma(), Wgmma().block(128, 128), Gemv(), "sm_90a", "sm_80"
W2 = W.k(64).stages(2)
SPEC = product(512, 512, 512)
SMALL = product(64, 64, 64, F16, majors="MK")


def strided(**more: int) -> GemmSpec: return replace(SPEC, a=replace(SPEC.a, **more))


def parted(m: int, n: int, parts: int, major: str = "K") -> GemmSpec:
    weight = operand(BF16, parts * n, 64, major)
    return GemmSpec(m, n, 64, operand(BF16, m, 64), weight, result(BF16, m, n), parts=parts,
                    part=n * weight.mn, epilogue=(silu(Sum()) * Sum(part=1)).cast(BF16))


def few(m: int) -> GemmSpec: return product(m, 4096, 16384)


GATE = parted(64, 24, 2, "MN")
REFUSED: dict[str, tuple[GemmSpec, GemmSchedule, str]] = {
    # mma
    "block_m=100 is not a multiple of 2 warps × 16 = 32": (SMALL, M.block(100, 128), AMPERE),
    "block_k=48": (SMALL, M.k(48), AMPERE),
    "1 stages": (SMALL, M.stages(1), AMPERE),
    "2048 threads": (SMALL, M.warps(8, 8), AMPERE),
    "extents below 1": (SMALL, M.warps(0, 2), AMPERE),
    "block_m=192 / 4 warps × 2 B = 96 B neither divide 128": (SMALL, M.block(192, 128).warps(4, 2), AMPERE),
    "256 × 256 / 128 threads = 512 sums a thread": (SMALL, M.block(256, 256), AMPERE),
    "3x1 warps are 96 threads, not a power of 2": (SMALL, M.block(96, 96).warps(3, 1), AMPERE),
    "3 splits of 64 / 32 = 2 steps": (SMALL, M.split(3), AMPERE),
    "4 stages × (128 + 128) × 128 × 2 B = 262144 B|166912": (SMALL, M.k(128).stages(4), AMPERE),
    "begins with sm_89, this is sm_80": (product(64, 64, 64, E4M3, F32), M, AMPERE),
    "without tf32": (replace(product(64, 64, 64, F32), tf32=False), M, AMPERE),
    "block_n=128 is not a multiple of 2 warps × 3 parts × 16 = 96": (parted(64, 64, 3), M, AMPERE),
    # gemv
    "m=17 is above 16": (few(17), V.columns(32).k(512), AMPERE),
    "block_n=40 is not a multiple of the 16 columns": (few(4), V.columns(40).k(128), AMPERE),
    "block_k=100 is not a multiple of the 32": (few(4), V.columns(32).k(100), AMPERE),
    "32 steps × 2 chunks × 1 parts × 4 = 256 registers": (few(4), V.columns(64).k(1024), AMPERE),
    "512 columns of a warp × 16 rows × 1 parts = 256 sums": (few(16), V.columns(4096).k(32), AMPERE),
    "16 rows × 16384 of K × 2 B = 525312 B of shared|166912": (few(16), V.columns(64).k(128), AMPERE),
    "16 sums + 32 of loads + 8 of activations + 28 = 84 registers, 1024 threads have 64 each":
        (few(16), V.columns(1024).k(64).warps(32), AMPERE),
    "65 splits of 16384 / 256 = 64 iterations": (few(1), V.columns(64).k(256).split(65), AMPERE),
    "33 warps are 1056 threads": (few(1), V.columns(64).k(256).warps(33), AMPERE),
    # wgmma: schedules
    **{words: (SPEC, schedule, HOPPER) for words, schedule in {
        "5 warps: a producer and 1 to 3 consumers of 4 warps each are 8, 12 or 16": W.warps(5),
        "ping-pong with 1 consumer: 8 warps - 4 of the producer, at least 8": W.warps(8).pingpong(),
        "block_n=100 is not a multiple of 8 up to 256: no such wgmma": W.block(128, 100),
        "block_m=192 is not a multiple of 2 consumers × 64 = 128 rows up to 256": W.block(192, 128),
        "block_m=100 is not a multiple of 64 rows up to 256": W.block(100, 128).pingpong(),
        "block_k=24 × 2 B = 48 B is not a multiple of 32 B": W.k(24),
        "9 stages are not 2 to 8": W.stages(9),
        "8 stages × (16384 B of A + 32768 B of B)": W.block(128, 256).stages(8),
        "256 × 256 / 128 threads = 512 sums a thread, at most 200 with 1 consumers":
            W.block(256, 256).warps(8),
        "128 × 256 / 128 threads = 256 sums a thread, at most 200 with 2 consumers":
            W.block(256, 256).stages(2),
        "192 × 256 / 128 threads = 384 sums a thread, at most 100 with 3 consumers":
            W.block(192, 256).warps(16).stages(2).pingpong(),
        "swizzle 128B is wider than the box's row, block_k: a row of 32 × 2 B = 64 B":
            W.k(32).swizzle("128B"),
        "swizzle 64B: block_k: a row of 48 × 2 B = 96 B is not made of rows of 64 B": W.k(48).swizzle("64B"),
        "cluster 3x1: 1, 2 or 4 along each side, at most 8 in all": W.cluster(3),
        "cluster 4x4: 1, 2 or 4 along each side, at most 8 in all": W.cluster(4, 4),
        "128 × 192 / 128 threads = 192 sums a thread, at most 160 with 2 consumers and those of other CTAs":
            W.block(256, 192).stages(3).stream_k(),
        "3 splits: a cluster of 2, 4 or 8 CTAs shares a tile": W.split(3),
        "8 splits of K=512 / block_k=128 = 4 stages": W.k(128).stages(2).split(8),
        "2 splits in ping-pong: consumers share the tile's rows instead": W.pingpong().split(2),
        "2 splits with a cluster of 2x1: 1x1": W.split(2).cluster(2),
        "2 splits and stream-K: one of them": W.split(2).stream_k(),
        "2 splits: 128 × 128 sums × 4 B = 65536 B do not fit in the ring's 3 × 16384 = 49152 B, where they "
        "meet": W.k(32).stages(3).split(2),
        "cluster 4x1: 24 rows of B / 4 CTAs are no multiple of 8": W.block(128, 24).cluster(4)}.items()},
    # wgmma: operands that it or TMA cannot take
    "a: MN stride 6 B is not a multiple of 16 B: no TMA": (product(64, 64, 3), W2, HOPPER),
    "a: K stride 1026 B is not a multiple of 16 B: no TMA": (product(513, 512, 64, majors="MK"), W2, HOPPER),
    "a: offset 2 B is not a multiple of 16 B: no TMA": (strided(offset=1), W2, HOPPER),
    "a: batch[0] stride 130 B is not a multiple of 16 B: no TMA":
        (replace(product(8, 64, 64, batch=(2,)), a=Operand(BF16, 64, 1, (65,))), W2, HOPPER),
    "a: strides of 1024 along MN and 2 along K: elements lie side by side along neither, no TMA":
        (strided(mn=1024, k=2), W2, HOPPER),
    f"a: MN-major operands of {E4M3.name}: wgmma takes them K-major only":
        (product(64, 64, 64, E4M3, F32, "MK"), W2, HOPPER),
    f"a: MN-major operands of {S8.name}: wgmma takes them K-major only":
        (product(64, 64, 64, S8, majors="MK"), W2, HOPPER),
    "float32 operands: wgmma has them cut to 10 bits":
        (replace(product(64, 64, 64, F32), tf32=False), W2, HOPPER),
    # wgmma: parts
    "block_n=24 of 2 parts is not a multiple of 8 × 2": (GATE, W.block(128, 24), HOPPER),
    "swizzle 32B: block_n: a row of 24 × 2 B = 48 B is not made of rows of 32 B":
        (GATE, W.block(128, 48), HOPPER),
    "swapped: several parts cannot be columns": (GATE, W.swap_operands(), HOPPER),
    "b: parts 40 B apart are not a multiple of 16 B: no TMA": (replace(GATE, part=20), W, HOPPER)}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused_with_the_arithmetic(words: str):
    spec, schedule, arch = REFUSED[words]
    found = TABLE.problems(spec, schedule, GPU(arch))
    assert all(any(word in each for each in found) for word in words.split("|")), found
    with pytest.raises(ScheduleError, match="a schedule without these problems") as error:
        TABLE.build(spec, schedule, GPU(arch))
    assert all(word in str(error.value) for word in words.split("|"))


ALONE: dict[str, tuple[GemmSpec, GemmSchedule, str]] = {
    **{f"block_n={columns} for bytes is not 8, 16, 24 or a multiple of 16 up to 256":
       (product(512, 512, 512, S8), W.block(128, columns).k(128), HOPPER) for columns in (40, 56, 72, 104)},
    "64 × 256 / 128 threads + 128 (fp8 is summed twice) = 256 sums a thread, at most 200 with 2 consumers":
        (product(512, 512, 512, E4M3, F32), W.block(128, 256).k(128).stages(2), HOPPER),
    "wgmma needs sm_90a, the target is sm_80": (SPEC, W, AMPERE),
    "wgmma needs sm_90a, the target is sm_89": (SPEC, W, "sm_89"),
    "swapped: rows known at launch cannot be columns":
        (product(64, 128, 256, symbolic=True), W.block(64, 16).warps(8).swap_operands(), HOPPER),
    "m=50 is above 16; n is not: swapped()": (product(50, 4, 64), V, AMPERE),
    "n=40 is above 16": (product(50, 40, 64), V.swap_operands(), AMPERE),
    "the transposed matmul would have symbolic columns":
        (product(50, 4, 64, symbolic=True), V.swap_operands(), AMPERE),
    "the transposed matmul of 2 parts": (parted(50, 4, 2), V.swap_operands(), AMPERE)}


@pytest.mark.parametrize("words", ALONE)
def test_what_is_wrong_alone_is_said_alone(words: str):
    spec, schedule, arch = ALONE[words]
    assert TABLE.problems(spec, schedule, GPU(arch)) == [words]


def test_shared_memory_is_added_up():
    """Stages, the tile that results are stored from, two barriers of 8 bytes a stage."""
    [words] = TABLE.problems(SPEC, W.block(128, 256).stages(8), GPU(HOPPER))
    sides, total = words.split(" = ")
    stages, a, b, *others = map(int, re.findall(r"\d+", sides))
    assert others[-1] == 8 * 2 * stages
    assert stages * (a + b) + sum(others) == int(total.split()[0]) > 232448


@pytest.mark.parametrize("schedule", [W, W.block(128, 256), W.pingpong(), W.block(64, 8).warps(8),
                                      W.block(192, 128).warps(16), W.cluster(2, 2), W.swap_operands(),
                                      W.block(128, 192), W.split(4), W.stream_k(), W.block(256, 128)])
def test_what_can_be_is_not_refused(schedule: GemmSchedule):
    assert TABLE.problems(SPEC, schedule, GPU(HOPPER)) == []


def test_a_batch_of_three_dimensions_and_a_matrix_are_five():
    assert TABLE.problems(product(64, 64, 64, batch=(2, 2, 2)), W, GPU(HOPPER)) == []


# **** CTAs that wait for others ****

STREAMED = Wgmma().block(128, 72).stages(3).stream_k()
STEPS = 2_000_000  # warp instructions, after which what locks up ends; the longest grid here has 0.2 million
THREE = backward(150, 300, 64, band=CAUSAL, start=200, deterministic=True)  # CTAs that add to a block of dq
TURNS = {"wgmma": (TABLE.build(THREE, WIDE, GPU("sm_90a")), "sm_90a"),
         "mma": (TABLE.build(THREE, mma(32, 128, 8), GPU("sm_80")), "sm_80")}


def few_sms(monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    """So many CTAs run at a time in what follows."""
    for case in (gemm_case, backward_case):
        monkeypatch.setattr(case, "Emulator", partial(Emulator, resident=resident, step_limit=STEPS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ctas", [5, 9, 16])
@pytest.mark.parametrize("resident", [1, 2])
def test_stream_k(ctas: int, resident: int, monkeypatch: pytest.MonkeyPatch):
    """4 tiles of 11 stages: CTAs with the end of one and the beginning of another, and tiles of five CTAs."""
    few_sms(monkeypatch, resident)
    spec = product(200, 130, 64 * 11)
    given, made = gemm_case.arguments(spec, resident), TABLE.build(spec, STREAMED, GPU("sm_90a", ctas))
    assert torch.equal(gemm_case.run(made, spec, given, "sm_90a", resident), reference(spec, given))


def test_stream_k_has_the_same_bits_however_many_run(monkeypatch: pytest.MonkeyPatch):
    spec = product(128, 72, 64 * 21)
    given = gemm_case.arguments(spec, integers=False)
    made, found = TABLE.build(spec, STREAMED, GPU("sm_90a", 7)), []
    for resident in (1, 2, 4, 7):
        few_sms(monkeypatch, resident)
        found.append(gemm_case.run(made, spec, given, "sm_90a", resident))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TURNS)
def test_backward_passes_in_turns(name: str, monkeypatch: pytest.MonkeyPatch):
    made, arch = TURNS[name]
    assert isinstance(made, BackwardKernel)
    assert made.grid[0] == 3
    given, found = backward_case.arguments(THREE), []
    for resident in (1, 2, 3):
        few_sms(monkeypatch, resident)
        found.append(backward_case.run(made, THREE, given, arch, resident))
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], each, strict=True))
