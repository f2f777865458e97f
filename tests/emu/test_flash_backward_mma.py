"""The mma.sync template of attention's backward pass on the emulator: heads, bands, layouts and schedules."""
from __future__ import annotations

from dataclasses import replace

import pytest
from backward_case import backward
from flash_backward_mma_case import BF16, CAUSAL, F16, F32, SMALL, close, scheduled
from tinygrad.dtype import DType

from tinygrad_nv.tile.attention import Band
from tinygrad_nv.tile.schedule import Schedule

# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [8, 16, 40, 64, 72, 96, 128])
def test_heads(d: int, dtype: DType):
    """The band is a window that begins and ends within blocks; 120 rows are 4 blocks."""
    close(backward(120, 70, d, dtype, band=Band(-50, 3)), seed=d % 4)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (72, 40), (24, 8)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    close(backward(70, 50, d, d_v=d_v, band=CAUSAL, heads=2))


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_architectures_and_results(arch: str, out: DType):
    close(backward(70, 40, 64, F16, out=out, heads=2, group=2), arch=arch)


# **** bands ****

@pytest.mark.parametrize("start", [0, 1, 31, 33, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-31, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing, and keys may be seen by no row."""
    close(backward(70, 100, 16, band=band, start=start), seed=start % 4)


@pytest.mark.parametrize("s_q", [1, 31, 32, 33, 95, 97])
@pytest.mark.parametrize("s_kv", [1, 31, 32, 33])
def test_lengths(s_q: int, s_kv: int):
    for band in (Band(), CAUSAL): close(backward(s_q, s_kv, 16, band=band), seed=s_q % 4)


# **** layouts ****

@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize("gap", [0, 2, 4, 8])
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
def test_blocks_and_warps(schedule: Schedule):
    for d, d_v in ((64, 48), (32, 8)) if schedule.warps_m < 8 else ((64, 48),):
        close(backward(200, 140, d, d_v=d_v, band=CAUSAL), schedule)


@pytest.mark.parametrize("seed", range(4))
def test_interleavings(seed: int):
    """Warps run in another order for every seed."""
    close(backward(128, 96, 32, F16, heads=2, group=2, band=CAUSAL), SMALL, seed=seed)
