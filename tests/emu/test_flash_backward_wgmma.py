"""The wgmma template of attention's backward pass on the emulator: heads, bands, rings, layouts, extents of a
launch; what is exact comes out bit for bit."""
from __future__ import annotations

import pytest
import torch
from attention_case import matrix
from backward_case import arguments, backward, lies, near, run
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention import SYMBOLS, Band
from tinygrad_nv.tile.attention_backward import BackwardSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.templates.flash_backward_wgmma import flash_backward_wgmma

F16, BF16, F32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
CAUSAL = Band(None, 0)
W = Schedule().using("flash_backward_wgmma")
WIDE, LOW, SMALL = W.block(128, 128), W.block(64, 128), W.block(64, 64).warps(8)


def close(spec: BackwardSpec, schedule: Schedule = WIDE, seed: int = 0, scale: float = 1.0,
          **extents: int) -> None:
    """Asserts that a random backward pass is near the exact one."""
    given = arguments(spec, seed, scale, **extents)
    got = run(flash_backward_wgmma(spec, schedule), spec, given, "sm_90a", seed, **extents)
    near(spec, given, got, **extents)


# **** rings ****

@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", [WIDE, LOW, SMALL], ids=str)
def test_interleavings(schedule: Schedule, seed: int):
    """Warps run in another order for every seed; five blocks of rows of each of two heads, of two stages."""
    rows, keys = 5 * schedule.block_m, 2 * schedule.block_n
    close(backward(rows - 3, keys, 64, F16, group=2, band=Band(-300, 0)), schedule, seed)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", [LOW, SMALL], ids=str)
def test_rings(schedule: Schedule, stages: int):
    """At least `stages` + 2 blocks of rows, fewer blocks than stages, and one."""
    for s_q in (64 * (stages + 2), 70, 5): close(backward(s_q, 128, 64), schedule.stages(stages))


# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize(("d", "schedule"), [(8, WIDE), (16, SMALL), (40, WIDE), (64, WIDE), (64, LOW),
                                             (72, LOW), (80, SMALL), (96, LOW), (128, LOW)], ids=str)
def test_heads(d: int, schedule: Schedule, dtype: DType):
    """Of 4 blocks of rows or 2, and keys that end within a block; and a window."""
    close(backward(250, 150, d, dtype), schedule, seed=d % 4)
    close(backward(250, 150, d, dtype, band=Band(-90, 3), start=20), schedule, seed=d % 4)


@pytest.mark.parametrize(("d", "d_v", "schedule"), [(64, 16, WIDE), (32, 72, WIDE), (128, 64, LOW),
                                                    (72, 128, LOW), (16, 64, SMALL)], ids=str)
def test_values_of_another_width_than_keys(d: int, d_v: int, schedule: Schedule):
    close(backward(150, 140, d, d_v=d_v, band=CAUSAL, heads=2), schedule)


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_results(out: DType):
    close(backward(70, 130, 64, F16, out=out, heads=2, group=2))


# **** bands ****

@pytest.mark.parametrize("start", [0, 1, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(None, 20), Band(-10, None), Band(5, 60),
                                  Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing, and keys may be seen by none."""
    close(backward(270, 330, 32, band=band, start=start), W.block(64, 128), seed=start % 4)


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_lengths_at_the_edges_of_blocks(edge: int):
    for band in (Band(), CAUSAL): close(backward(256 + edge, 128 + edge, 64, band=band), WIDE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("band", [CAUSAL, Band(160, None)], ids=str)
def test_keys_that_no_row_sees_do_not_count(band: Band, seed: int):
    """They and their values are NaN, within a block of others too."""
    spec = backward(150, 500, 64, band=band, start=40)
    given = arguments(spec, seed)
    got_exact = run(flash_backward_wgmma(spec, LOW), spec, given, "sm_90a", seed)
    near(spec, given, got_exact)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv":
        keys = matrix(spec.forward, spoilt, name)
        if band == CAUSAL: keys[..., 190:, :] = torch.nan
        else: keys[..., :200, :] = torch.nan
    got = run(flash_backward_wgmma(spec, LOW), spec, spoilt, "sm_90a", seed)
    for mine, right in zip(got, got_exact, strict=True): assert torch.equal(mine, right)


# **** exact ****

def test_one_key_takes_all():
    """Rows that see one key each have p = 1 and ds = 0: dv is the gradient, dq and dk are zeros."""
    spec = backward(150, 150, 64, F16, band=Band(0, 0))
    given = arguments(spec)
    for name in ("q", "k", "v", "grad"): given[name].copy_((given[name] * 2).round())
    given["l"].zero_()
    sums = (matrix(spec.forward, given, "q").double() * matrix(spec.forward, given, "k").double()).sum(-1)
    lies(spec, given, "l").copy_(sums / 8)
    same = matrix(spec.forward, given, "v").double()
    lies(spec, given, "delta").copy_((same * lies(spec, given, "grad").double()).sum(-1))
    got = run(flash_backward_wgmma(spec, WIDE), spec, given, "sm_90a")
    assert torch.equal(got.dv, lies(spec, given, "grad").double().squeeze(2))
    assert (got.dk == 0).all()
    assert (got.dq == 0).all()


# **** layouts and extents ****

@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize("gap", [0, 8])
def test_layouts(order: str, gap: int):
    """Heads in either order, shared by a group."""
    close(backward(140, 130, 40, batch=2, heads=2, group=3, order=order, gap=gap))


@pytest.mark.parametrize("s_kv", [1, 128, 129])
@pytest.mark.parametrize("s_q", [1, 127, 200])
def test_extents_of_a_launch(s_q: int, s_kv: int):
    spec = backward(200, 200, 64, band=CAUSAL, start=60, group=2, order="brh", symbolic=SYMBOLS)
    close(spec, seed=s_kv % 4, s_q=s_q, s_kv=s_kv, start=max(0, min(60, s_kv - s_q)))


# **** one order of sums ****

@pytest.mark.parametrize("band", [Band(), CAUSAL, Band(-100, 0), Band(100, None)], ids=str)
@pytest.mark.parametrize(("d", "schedule"), [(128, LOW), (64, WIDE), (48, SMALL)], ids=str)
def test_a_deterministic_sum_is_the_same_whatever_is_done_first(d: int, schedule: Schedule, band: Band):
    """Of three blocks of keys; five for the small one."""
    spec = backward(200, 270, d, band=band, group=2, heads=2, deterministic=True)
    made, given = flash_backward_wgmma(spec, schedule), arguments(spec)
    first, second = (run(made, spec, given, "sm_90a", seed) for seed in (1, 2))
    near(spec, given, first)
    assert torch.equal(first.dq, second.dq)
