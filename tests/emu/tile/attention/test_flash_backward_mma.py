"""The mma.sync template of attention's backward pass on the emulator: heads, bands, layouts and schedules."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from backward_case import Given, arguments, backward, launched, near, places, run
from flash_backward_mma_case import BF16, CAUSAL, F16, F32, SMALL, close, scheduled
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [8, 40, 64, 72, 96, 128])
def test_heads(d: int, dtype: DType):
    """The band is a window that begins and ends within blocks; 120 rows are 4 blocks."""
    close(backward(120, 70, d, dtype, band=Band(-50, 3)), seed=d % 4)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (72, 40), (24, 8)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    close(backward(70, 50, d, d_v=d_v, band=CAUSAL, heads=2))


@pytest.mark.parametrize(("arch", "out"), [("sm_80", F32), ("sm_89", F16), ("sm_90a", BF16), ("sm_90a", F32)])
def test_architectures_and_results(arch: str, out: DType):
    close(backward(70, 40, 64, F16, out=out, heads=2, group=2), arch=arch)


# **** bands ****

@pytest.mark.parametrize("start", [0, 33, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 31, 150))])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-31, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing, and keys may be seen by no row."""
    close(backward(70, 100, 16, band=band, start=start), seed=start % 4)


@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 1), (1, 33), (31, 32), (33, 1), (95, 31), (97, 33)])
def test_lengths(s_q: int, s_kv: int):
    for band in (FULL, CAUSAL): close(backward(s_q, s_kv, 16, band=band), seed=s_q % 4)


# **** layouts ****

@pytest.mark.parametrize(("order", "gap"), [("bhr", 0), ("brh", 2), ("bhr", 4), ("brh", 8)])
def test_layouts(order: str, gap: int):
    """Rows aligned to 4 bytes and more, heads in either order, shared by a group."""
    close(backward(40, 50, 40, batch=2, heads=2, group=3, order=order, gap=gap))


def test_offsets():
    spec = backward(40, 50, 64)
    one = spec.forward
    moved = {name: replace(getattr(one, name), offset=at) for name, at in {"q": 8, "k": 2, "v": 4}.items()}
    close(replace(spec, forward=replace(one, **moved), grad=replace(spec.grad, offset=6),
                  dk=replace(spec.dk, offset=1), dv=replace(spec.dv, offset=8)))


# **** schedules ****

@pytest.mark.parametrize("stages", [2, 3, 4])
def test_rings(stages: int):
    """At least `stages` + 2 blocks of rows, of one head and of several, and fewer blocks than stages."""
    for s_q, group in ((32 * (stages + 2), 1), (32 * stages - 5, 3), (20, 1), (20, 2)):
        close(backward(s_q, 40, 16, group=group), scheduled(32, 32, 2, stages))


@pytest.mark.parametrize("schedule", [
    scheduled(64, 64, 4), scheduled(32, 64, 4), scheduled(64, 128, 8), scheduled(32, 64, 2),
    scheduled(32, 128, 8), scheduled(128, 64, 4, 3)], ids=str)
def test_blocks_and_warps(schedule: BackwardMma):
    for d, d_v in ((64, 48), (32, 8)) if schedule.warps_m < 8 else ((64, 48),):
        close(backward(200, 140, d, d_v=d_v, band=CAUSAL), schedule)


@pytest.mark.parametrize(("schedule", "d", "d_v"), [
    (scheduled(64, 64, 2).warps(2, 2), 64, 64), (scheduled(64, 32, 2, 3).warps(2, 2), 32, 96),
    (scheduled(64, 32, 1).warps(1, 4), 64, 128), (scheduled(32, 32, 2).warps(2, 2), 136, 72),
    pytest.param(scheduled(32, 64, 4).warps(4, 2), 256, 256, marks=pytest.mark.slow),
    pytest.param(scheduled(64, 64, 4).warps(4, 2), 192, 192, marks=pytest.mark.slow),
    pytest.param(scheduled(32, 32, 2).warps(2, 2), 200, 256, marks=pytest.mark.slow)], ids=str)
def test_warps_that_share_keys(schedule: BackwardMma, d: int, d_v: int):
    """p and ds go through shared memory. Widths that warps cannot share are padded."""
    close(backward(140, 50, d, d_v=d_v, band=CAUSAL, group=2), schedule)
    close(backward(70, 90, d, F16, d_v=d_v, band=Band(-30, 20), deterministic=True), schedule, "sm_90a")


@pytest.mark.parametrize("seed", range(4))
def test_interleavings(seed: int):
    """Warps run in another order for every seed."""
    close(backward(128, 96, 32, F16, heads=2, group=2, band=CAUSAL), SMALL, seed=seed)


# **** a fixed order ****

@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-40, 3), Band(-20, None)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_deterministic_bits_are_the_same_for_every_order(arch: str, band: Band):
    """Of CTAs, warps and additions: the emulator's order changes with the seed. Others' bits differ."""
    spec = backward(100, 140, 16, batch=2, heads=2, group=2, band=band, deterministic=True)
    given = arguments(spec)
    made = TABLE.build(spec, SMALL, GPU(arch))
    assert "%ctaid" not in made.ptx  # what a CTA does depends on when it starts alone
    found = [run(made, spec, given, arch, seed) for seed in range(4)]
    near(spec, given, found[0])
    for other in found[1:]:
        assert all(torch.equal(one, same) for one, same in zip(found[0], other, strict=True))


def test_without_it_orders_differ():
    """So that the test above can fail."""
    spec = backward(100, 140, 16, batch=2, heads=2, group=2)
    given = arguments(spec)
    made = TABLE.build(spec, SMALL, GPU("sm_80"))
    one, other = (run(made, spec, given, "sm_80", seed) for seed in (0, 1))
    assert not torch.equal(one.dq, other.dq)
    assert torch.equal(one.dk, other.dk)


def test_bits_do_not_depend_on_other_heads():
    spec = backward(70, 50, 16, heads=3, group=2, deterministic=True)
    given = arguments(spec)
    alone = replace(spec, forward=replace(spec.forward, batch=(1, 1, 2)))
    many, few = (run(TABLE.build(each, SMALL, GPU("sm_80")), each, given | shorter(each, given))
                 for each in (spec, alone))
    for one, other in zip(many, few, strict=True): assert torch.equal(one[:, :1], other)


def shorter(spec: BackwardSpec, given: Given) -> Given:
    """The beginnings of storages that a spec needs."""
    made = {}
    for name, (_, (offset, shape, strides)) in places(spec).items():
        made[name] = given[name][:offset + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + 1]
    return made


# **** extents of a launch ****

@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("symbolic", [("s_q", "s_kv", "start"), ("s_q",), ("s_kv",)], ids=str)
def test_extents_of_a_launch(symbolic: tuple[str, ...], deterministic: bool):
    spec = backward(96, 128, 16, heads=2, group=2, band=Band(-60, 0), start=64, symbolic=symbolic,
                    deterministic=deterministic)
    for extents in ({}, {"s_q": 1, "s_kv": 1, "start": 0}, {"s_q": 33, "s_kv": 63, "start": 5},
                    {"s_q": 95, "s_kv": 97, "start": 40}):
        close(spec, **{name: value for name, value in extents.items() if name in symbolic})


# **** memory ****

def test_blocks_that_see_nothing_of_the_keys_are_skipped():
    """Bytes copied: each of 8 blocks of keys is seen by its own rows and those after; of a window, two."""
    rows, nbytes = 256, 32 * 64 * 2
    found = {}
    for band in (FULL, CAUSAL, Band(-31, 0)):
        spec = backward(rows, rows, 64, band=band)
        _, report = launched(TABLE.build(spec, SMALL, GPU("sm_80")), spec, arguments(spec), "sm_80")
        found[band] = report.stats.asynchronous_bytes - 2 * rows * 64 * 2
    assert found == {FULL: 64 * 2 * nbytes, CAUSAL: 36 * 2 * nbytes, Band(-31, 0): 15 * 2 * nbytes}


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_hopper_memory_is_touched_after_the_kernel_before(deterministic: bool):
    """And the next kernel may begin when dq has been added to."""
    made = TABLE.build(backward(64, 128, 64, deterministic=deterministic), SMALL, GPU("sm_90a"))
    wait, done = (made.ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    assert made.pdl
    touched = [found.start() for found in re.finditer(r"cp\.async\.c|(ld|atom|red)\.[a-z.]*global", made.ptx)]
    assert wait < touched[0] < touched[-1] < done < made.ptx.index("st.global")
    assert not TABLE.build(backward(64, 128, 64), SMALL, GPU("sm_80")).pdl


# **** what cannot be ****

def test_refusals():
    spec = backward(64, 64, 64)
    for schedule, words in ((scheduled(64, 64, 3), "3 warps"), (scheduled(48, 64, 4), "block_m=48"),
                            (scheduled(128, 128, 4), "sums a thread"), (scheduled(128, 32, 2), "64 threads"),
                            (scheduled(64, 64, 4, 9), "9 stages"),
                            (scheduled(64, 128, 8, 8), "of shared memory")):
        with pytest.raises(ScheduleError, match=words): TABLE.build(spec, schedule, GPU("sm_80"))
    with pytest.raises(ScheduleError, match="d=12"): TABLE.build(backward(64, 64, 12), SMALL, GPU("sm_80"))
    with pytest.raises(ScheduleError, match="aligned"):
        TABLE.build(backward(64, 64, 16, gap=1), SMALL, GPU("sm_80"))
    with pytest.raises(ScheduleError, match="derivative"):
        TABLE.build(backward(64, 64, 16, score=Sum().cast(dtypes.int32).cast(F32)), SMALL, GPU("sm_80"))
