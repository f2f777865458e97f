"""What both templates of attention's backward pass must do, on the emulator: heads, bands, layouts,
schedules, a fixed order of sums, extents of a launch, dropout; what is exact comes out bit for bit."""
from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tinygrad.dtype import DType

from tests.support.tile.backward_case import Given, arguments, backward, launched, lies, near, places
from tests.support.tile.flash_backward_case import (
    HALVED,
    LOW,
    MMA,
    SHARED,
    SMALL,
    WGMMAS,
    WIDE,
    BackwardSchedule,
    arch_of,
    built,
    close,
    gradients,
    mma,
)
from tests.support.tile.flash_case import BF16, CAUSAL, F16, F32
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, SYMBOLS, Band
from tinygrad_nv.tile.expression import Load, Sum, tanh
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SMALLEST = pytest.mark.parametrize("schedule", [MMA, LOW], ids=["mma", "wgmma"])
EACH = pytest.mark.parametrize("schedule", [MMA, *WGMMAS], ids=str)


def each(mma: Any, wgmma: Any) -> pytest.MarkDecorator:
    """A small schedule of each template, and what differs between their cases."""
    return pytest.mark.parametrize(("schedule", "own"), [(MMA, mma), (LOW, wgmma)], ids=["mma", "wgmma"])


# **** heads ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("schedule", "d"), [
    *((MMA, d) for d in (8, 40, 64, 72, 96, 128)), (SHARED, 160), (WIDE, 8), (SMALL, 16), (WIDE, 40),
    (WIDE, 64), (LOW, 64), (LOW, 72), (SMALL, 80), (LOW, 96), (LOW, 128), (HALVED, 128), (HALVED, 160),
    (HALVED, 192), (HALVED, 256)], ids=str)
def test_heads(schedule: BackwardSchedule, d: int, dtype: DType):
    """Of a window that begins and ends within blocks, of 3 or 4 blocks of rows; and of keys that end within
    one."""
    s_q, s_kv, start = (140, 150, 20) if schedule in WGMMAS else (120, 70, 0)
    close(backward(s_q, s_kv, d, dtype, band=Band(-50, 3), start=start), schedule, seed=d % 4)
    close(backward(70, 40, d, dtype), schedule, seed=d % 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schedule", "d", "d_v"), [
    *((MMA, *pair) for pair in ((64, 128), (128, 64), (72, 40), (24, 8), (32, 72), (16, 64))),
    (WIDE, 64, 16), (WIDE, 32, 72), (LOW, 128, 64), (LOW, 72, 128), (SMALL, 16, 64), (SMALL, 24, 8),
    (HALVED, 200, 40)], ids=str)
def test_values_of_another_width_than_keys(schedule: BackwardSchedule, d: int, d_v: int):
    s_q, s_kv, heads = (150, 140, 1) if schedule in WGMMAS else (70, 50, 2)
    close(backward(s_q, s_kv, d, d_v=d_v, band=CAUSAL, heads=heads), schedule)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize(("schedule", "arch"), [*((MMA, arch) for arch in SMEM_BYTES), (LOW, "sm_90a"),
                                                (HALVED, "sm_90a")], ids=str)
def test_architectures_and_results(schedule: BackwardSchedule, arch: str, out: DType):
    s_kv, d = (130, 56) if schedule in WGMMAS else (40, 64)
    close(backward(70, s_kv, d, F16, out=out, heads=2, group=2), schedule, arch)


# **** bands ****

@pytest.mark.sampled(10)
@pytest.mark.parametrize(("schedule", "start"), [
    (MMA, 0), (MMA, 33), *(pytest.param(MMA, at, marks=pytest.mark.slow) for at in (1, 31, 150)), (LOW, 0),
    (LOW, 150)], ids=str)
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-31, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, schedule: BackwardSchedule, start: int):
    """Rows may see nothing, and keys may be seen by no row."""
    s_q, s_kv, seed = (140, 290, len(str(band))) if schedule == LOW else (70, 100, start)
    close(backward(s_q, s_kv, 16, band=band, start=start), schedule, seed=seed % 4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("schedule", "s_q", "s_kv"), [
    *((one, *pair) for one in (MMA, LOW)
      for pair in ((1, 1), (1, 33), (31, 32), (33, 1), (95, 31), (97, 33))),
    *((WIDE, s, s) for s in (127, 128, 129))], ids=str)
def test_lengths(schedule: BackwardSchedule, s_q: int, s_kv: int):
    d, seed = (64, 0) if schedule == WIDE else (16, s_q % 4)
    for band in (FULL, CAUSAL): close(backward(s_q, s_kv, d, band=band), schedule, seed=seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "s", "d", "blocks"), [
    (MMA, 256, 64, {FULL: 64, CAUSAL: 36, Band(-31, 0): 15}),
    (LOW, 256, 128, {FULL: 8, CAUSAL: 6, Band(-63, 0): 5})], ids=["mma", "wgmma"])
def test_blocks_that_see_nothing_of_the_keys_are_skipped(schedule: BackwardSchedule, s: int, d: int,
                                                         blocks: dict[Band, int]):
    """Bytes copied: each block of keys is seen by its own rows and those after; of a window, by two blocks
    (wgmma: three), as far as there are so many."""
    found = {}
    for band in blocks:
        spec = backward(s, s, d, band=band, out=F32 if schedule == LOW else None)
        _, report = launched(built(spec, schedule), spec, arguments(spec), arch_of(schedule),
                             check=schedule == MMA)
        # keys and values are read once; a block of rows is that of q and grad, wgmma writes its float32 dq
        copied = report.stats.asynchronous_bytes - 2 * s * d * 2
        found[band] = copied / (schedule.block_m * d * 2 * (4 if schedule == LOW else 2))
    assert found == blocks


# **** layouts ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "gap"), [*((MMA, gap) for gap in (0, 2, 4, 8)), (LOW, 0), (LOW, 8)],
                         ids=str)
@pytest.mark.parametrize("order", ["bhr", "brh"])
def test_layouts(schedule: BackwardSchedule, order: str, gap: int):
    """Rows aligned as little as may be, heads in either order, shared by a group."""
    s_kv = 130 if schedule == LOW else 50
    close(backward(40, s_kv, 40, batch=2, heads=2, group=3, order=order, gap=gap), schedule)


@each(mma=(50, 8, 2, 4, 6), wgmma=(130, 8, 16, 24, 40))
def test_offsets(schedule: BackwardSchedule, own: tuple[int, ...]):
    """Gradients of keys may begin anywhere."""
    s_kv, q, k, v, grad = own
    spec = backward(40, s_kv, 64)
    one = spec.forward
    moved = {name: replace(getattr(one, name), offset=at) for name, at in (("q", q), ("k", k), ("v", v))}
    close(replace(spec, forward=replace(one, **moved), grad=replace(spec.grad, offset=grad),
                  dk=replace(spec.dk, offset=1), dv=replace(spec.dv, offset=8)), schedule)


# **** schedules ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", [MMA, LOW, SMALL, HALVED], ids=str)
def test_rings(schedule: BackwardSchedule, stages: int):
    """At least `stages` + 2 blocks of rows, of one head and of several, fewer blocks than stages, and one."""
    m = schedule.block_m
    s_kv, counts = (64, ((70, 1), (5, 1), (5, 2))) if schedule in WGMMAS else (
        40, ((m * stages - 5, 3), (20, 1), (20, 2)))
    for s_q, group in ((m * (stages + 2), 1), *counts):
        close(backward(s_q, s_kv, 16, group=group), schedule.stages(stages))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", [mma(64, 64, 4), mma(32, 64, 4), mma(64, 128, 8), mma(32, 64, 2),
                                      mma(32, 128, 8), mma(128, 64, 4, stages=3), *WGMMAS], ids=str)
def test_blocks_and_warps(schedule: BackwardSchedule):
    for d, d_v in ((64, 48), (32, 8)) if schedule.warps_m < 8 else ((64, 48),):
        close(backward(200, 140, d, d_v=d_v, band=CAUSAL), schedule)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "d", "d_v"), [
    (mma(64, 64, 2, 2), 64, 64), (mma(64, 32, 2, 2, 3), 32, 96), (mma(64, 32, 1, 4), 64, 128),
    (SHARED, 136, 72), (HALVED, 136, 72), (HALVED, 200, 256),
    pytest.param(mma(32, 64, 4, 2), 256, 256, marks=pytest.mark.slow),
    pytest.param(mma(64, 64, 4, 2), 192, 192, marks=pytest.mark.slow),
    pytest.param(SHARED, 200, 256, marks=pytest.mark.slow)], ids=str)
def test_warps_that_share_keys(schedule: BackwardSchedule, d: int, d_v: int):
    """p and ds go through shared memory. Widths that warps cannot share are padded."""
    close(backward(140, 50, d, d_v=d_v, band=CAUSAL, group=2), schedule)
    close(backward(70, 90, d, F16, d_v=d_v, band=Band(-30, 20), deterministic=True), schedule, "sm_90a")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
@EACH
def test_interleavings(schedule: BackwardSchedule, seed: int):
    """Warps run in another order for every seed; two query heads, of two or more blocks of rows each, pass
    two stages."""
    for spec in (backward(128, 96, 32, F16, heads=2, group=2, band=CAUSAL),
                 backward(200 if schedule == WIDE else 192, schedule.block_n + 8, 16, F16, group=2,
                          band=Band(-300, 70))):
        close(spec, schedule, seed=seed)


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_touched_after_the_kernel_before(deterministic: bool):
    """And the next kernel may begin when dq has been added to."""
    spec = backward(64, 128, 64, deterministic=deterministic)
    made = built(spec, MMA, "sm_90a")
    wait, done = (made.ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    assert made.pdl
    touched = [found.start() for found in re.finditer(r"cp\.async\.c|(ld|atom|red)\.[a-z.]*global", made.ptx)]
    assert wait < touched[0] < touched[-1] < done < made.ptx.index("st.global")
    assert not built(spec, MMA, "sm_80").pdl


def test_memory_is_touched_after_the_kernel_before_by_tma():
    """And the next kernel may begin when the last copies are on their way."""
    made = built(backward(64, 128, 64, out=F32), LOW)
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", made.ptx)]
    copies = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor", made.ptx)]
    done = made.ptx.index("griddepcontrol.launch_dependents")
    assert made.pdl
    assert len(waits) == 3
    assert waits[0] < copies[0] < copies[-1] < done < waits[1] < made.ptx.index("ld.global") < waits[2]
    assert waits[2] < made.ptx.index("cp.reduce") < made.ptx.index("st.global")


# **** exact ****

def exact(spec: BackwardSpec, given: Given, names: str) -> list[torch.Tensor]:
    """Operands in float64, and the gradient of the result."""
    return [lies(spec, given, name).double() for name in names.split()]


@EACH
def test_one_key_takes_all(schedule: BackwardSchedule):
    """Rows that see one key each have p = 1 and ds = 0: dv is the gradient, dq and dk are zeros."""
    spec = backward(150, 150, 64, F16, band=Band(0, 0))
    given = arguments(spec)
    for name in ("q", "k", "v", "grad"): given[name].copy_((given[name] * 2).round())
    q, k, v, grad = exact(spec, given, "q k v grad")
    lies(spec, given, "l").copy_((q * k).sum(-1) / 8)
    lies(spec, given, "delta").copy_((v * grad).sum(-1))
    got = gradients(spec, schedule, given)
    assert torch.equal(got.dv, grad.squeeze(2))
    assert (got.dk == 0).all()
    assert (got.dq == 0).all()


@SMALLEST
def test_equal_scores_share(schedule: BackwardSchedule):
    """Queries are 0, so that p is 1/64 for each key of a window of 64; small integers, of which nothing is
    rounded: dk is 0, dv and dq are sums."""
    spec = backward(64, 128, 64, out=F32, band=Band(-63, 0), start=63)
    given = arguments(spec)
    random = torch.Generator().manual_seed(3)
    for name in ("k", "v", "grad"):
        given[name].copy_(torch.randint(-2, 3, given[name].shape, generator=random))
    given["q"].zero_()
    lies(spec, given, "l").fill_(6 * 0.6931471805599453)
    lies(spec, given, "delta").fill_(1.0)
    got = gradients(spec, schedule, given)
    k, v, grad = (one[0, 0, 0] for one in exact(spec, given, "k v grad"))
    row, key = torch.arange(64)[:, None] + 63, torch.arange(128)[None, :]
    p = ((key <= row) & (key >= row - 63)).double() / 64
    assert (got.dk == 0).all()
    assert torch.equal(got.dv[0, 0], p.T @ grad)
    assert torch.equal(got.dq[0, 0, 0], (p * (grad @ v.T - 1) / 8).bfloat16().double() @ k)


# **** one order of sums ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "arch", "d", "band"), [
    *((MMA, arch, 16, band) for arch in ("sm_80", "sm_90a")
      for band in (FULL, CAUSAL, Band(-40, 3), Band(-20, None))),
    *((one, "sm_90a", d, band) for one, d in ((LOW, 80), (WIDE, 32), (SMALL, 16), (HALVED, 32))
      for band in (FULL, Band(-100, 20), Band(100, None)))], ids=str)
def test_deterministic_bits_are_the_same_for_every_order(schedule: BackwardSchedule, arch: str, d: int,
                                                         band: Band):
    """Of CTAs, warps and additions: the emulator's order changes with the seed. Others' bits differ."""
    wgmma = schedule in WGMMAS
    s_kv, heads, seeds = (2 * schedule.block_n + 10, 1, (1, 2)) if wgmma else (140, 2, range(4))
    spec = backward(100, s_kv, d, batch=heads, heads=heads, group=2, band=band, deterministic=True)
    # what a CTA of mma does depends on when it starts alone
    assert wgmma or "%ctaid" not in built(spec, schedule, arch).ptx
    given = arguments(spec)
    first, *others = (gradients(spec, schedule, given, arch, seed) for seed in seeds)
    near(spec, given, first)
    for other in others: assert all(map(torch.equal, first, other))


@each(mma=140, wgmma=300)
def test_without_it_orders_differ(schedule: BackwardSchedule, own: int):
    """So that the test above can fail."""
    spec = backward(100, own, 16, batch=2, heads=2, group=2)
    one, other = (gradients(spec, schedule, arguments(spec), seed=seed) for seed in (0, 1))
    assert not torch.equal(one.dq, other.dq)
    assert torch.equal(one.dk, other.dk)


def shorter(spec: BackwardSpec, given: Given) -> Given:
    """The beginnings of storages that a spec needs."""
    made = {}
    for name, (_, (offset, shape, strides)) in places(spec).items():
        made[name] = given[name][:offset + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + 1]
    return made


@SMALLEST
def test_bits_do_not_depend_on_other_heads(schedule: BackwardSchedule):
    spec = backward(70, 50, 16, heads=3, group=2, deterministic=True)
    alone, given = replace(spec, forward=replace(spec.forward, batch=(1, 1, 2))), arguments(spec)
    many, few = (gradients(one, schedule, shorter(one, given)) for one in (spec, alone))
    for one, other in zip(many, few, strict=True): assert torch.equal(one[:, :1], other)


@each(mma=32, wgmma=100)
def test_a_rows_share_does_not_depend_on_other_rows(schedule: BackwardSchedule, own: int):
    """dq of five rows, alone and among others: the same bits."""
    spec, alone = (backward(s_q, own, 64) for s_q in (70, 5))
    given = arguments(spec)
    many, few = (gradients(one, schedule, shorter(one, given)) for one in (spec, alone))
    assert torch.equal(few.dq, many.dq[..., :5, :])


@pytest.mark.parametrize(("schedule", "add", "fence"), [(LOW, "cp.reduce", "fence.proxy.async.global"), (
    HALVED, "red.relaxed", "bar.warp.sync")], ids=["by TMA", "from registers"])
def test_what_a_turn_orders(schedule: BackwardSchedule, add: str, fence: str):
    """Between turns other threads, or the other proxy, add: fences that the emulator does not ask for."""
    ptx = built(backward(100, 200, 64, deterministic=True), schedule).ptx
    taken, added = ptx.index("ld.acquire.gpu"), ptx.index(add)
    given = ptx.index("red.release.gpu", added)
    assert taken < ptx.index(fence, taken) < added
    done = ptx[ptx.rindex(add):given] if schedule == HALVED else ptx[added:given]
    wanted = ("fence.acq_rel.gpu", "bar.warp.sync") if schedule == HALVED else ("cp.async.bulk.wait_group",)
    at = [done.index(words) for words in wanted]
    assert at == sorted(at)
    assert "wait_group.read" not in ptx[added:given]


# **** extents of a launch ****

@pytest.mark.sampled(5)
@SMALLEST
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("symbolic", [SYMBOLS, ("s_q",), ("s_kv",)], ids=str)
def test_extents_of_a_launch(schedule: BackwardSchedule, symbolic: tuple[str, ...], deterministic: bool):
    spec = backward(96, 128, 16, heads=2, group=2, band=Band(-60, 0), start=64, symbolic=symbolic,
                    deterministic=deterministic)
    for extents in ({}, {"s_q": 1, "s_kv": 1, "start": 0}, {"s_q": 33, "s_kv": 63, "start": 5},
                    {"s_q": 95, "s_kv": 97, "start": 40}):
        close(spec, schedule, **{name: value for name, value in extents.items() if name in symbolic})


@SMALLEST
@pytest.mark.parametrize("s_kv", [1, 128, 129])
@pytest.mark.parametrize("s_q", [1, 127, 140])
def test_extents_about_the_edges_of_blocks(schedule: BackwardSchedule, s_q: int, s_kv: int):
    spec = backward(140, 150, 32, band=CAUSAL, start=60, group=2, order="brh", symbolic=SYMBOLS)
    close(spec, schedule, seed=s_kv % 4, s_q=s_q, s_kv=s_kv, start=max(0, min(60, s_kv - s_q)))


@pytest.mark.sampled(4)
@SMALLEST
@pytest.mark.parametrize("symbolic", [("s_q",), ("s_kv",), ("start",), ("s_q", "start")], ids="+".join)
def test_some_symbolic_extents(schedule: BackwardSchedule, symbolic: tuple[str, ...]):
    spec = backward(140, 150, 40, band=Band(-100, 0), start=20, symbolic=symbolic, out=F32,
                    score=Sum() * 0.1 + Load(0, F32, 150, 1))
    counts = {"s_q": 130, "s_kv": 131, "start": 1}
    close(spec, schedule, **{name: counts[name] for name in symbolic})


@each(mma=(10, 1, 4, 5), wgmma=(3, 1, 1, 2))
def test_a_launch_has_the_blocks_of_its_keys(schedule: BackwardSchedule, own: tuple[int, ...]):
    made = built(backward(64, 300, 64, heads=3, group=2, batch=5, symbolic=("s_kv",)), schedule)
    assert [made.grid, *map(made.grid_for, (1, 128, 129))] == [(blocks, 3, 5) for blocks in own]


# **** dropout ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [MMA, mma(64, 64, 4), mma(32, 32, 1), mma(64, 128, 8, stages=3),
                                      mma(64, 64, 4, 2), *WGMMAS], ids=str)
def test_dropout(schedule: BackwardSchedule):
    """The elements that the forward pass dropped. 16 or 32 keys of a warp, several blocks of both."""
    d, seed = (64, 1) if schedule in WGMMAS else (32, schedule.block_n % 4)
    close(backward(150, 140, d, heads=2, group=2, kept=150), schedule, seed=seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("schedule", "seed"), [
    *((MMA, seed) for seed in range(4)), *((one, seed) for one in WGMMAS for seed in (2, 3))], ids=str)
def test_dropout_beside_everything_else(schedule: BackwardSchedule, seed: int):
    d, heads, d_2, score = (48, 1, 64, Sum() * -0.1) if schedule in WGMMAS else (64, 3, 32, None)
    close(backward(100, 130, d, F16, band=Band(-70, 3), start=20, heads=heads, kept=200, out=F32), schedule,
          seed=seed)
    close(backward(70, 90, d_2, BF16, band=CAUSAL, symbolic=SYMBOLS, start=60, kept=77, score=score),
          schedule, "sm_90a", seed=seed, s_q=50, s_kv=66, start=5 * seed)


@pytest.mark.parametrize(("schedule", "name"), [(MMA, "tanh"), (MMA, "bias"), (MMA, "negative"),
                                                (LOW, "bias"), (LOW, "negative")], ids=str)
def test_dropout_of_scores(schedule: BackwardSchedule, name: str):
    scaled = Sum() * 0.1
    scores = {"tanh": tanh(scaled) * 3.0, "bias": scaled + Load(0, F32, 90, 1), "negative": scaled * -1.0}
    close(backward(70, 90, 32, score=scores[name], kept=100, deterministic=name == "negative"), schedule)


def test_what_wgmma_does_not_drop():
    spec = backward(70, 90, 64, score=tanh(Sum() * 0.1), kept=100)
    assert any("whose derivative differs" in words for words in TABLE.problems(spec, LOW, GPU("sm_90a")))
    assert not TABLE.problems(replace(spec, forward=replace(spec.forward, kept=256)), LOW, GPU("sm_90a"))
