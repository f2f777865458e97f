"""The gradients of attention in one kernel, whose programs add dq to memory: on the emulated GPU, against
float64."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from bench.lib.kernels_language import attention_gradient
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language.schedule import TileSchedule

SCALE = 0.125


def bf16(array: np.ndarray) -> Tensor: return Tensor(array.astype(np.float32)).cast(dtypes.bfloat16).realize()


@pytest.mark.parametrize("seed", [0, 1, 2, LATE])
@pytest.mark.parametrize(("arch", "block", "warps"), [
    ("sm_90a", (128, 64), 8), ("sm_90a", (128, 32), 8), ("sm_80", (64, 64), 4)])
def test_programs_add_to_one_tensor(arch: str, block: tuple[int, int], warps: int, seed: int | str) -> None:
    """Two heads of queries for one of keys; rows that end inside of a block."""
    random = np.random.default_rng(0)
    shapes = ((1, 1, 152, 64), (1, 1, 152, 64), (1, 2, 104, 64), (1, 2, 104, 64))
    given = [bf16(random.standard_normal(shape)) for shape in shapes]
    k, v, q, do = (each.float().numpy().astype(np.float64) for each in given)
    scores = q @ k.swapaxes(2, 3) * SCALE
    lse = np.log(np.exp(scores).sum(-1))
    p = np.exp(scores - lse[..., None])
    delta = (p @ v * do).sum(-1)
    ds = p * (do @ v.swapaxes(2, 3) - delta[..., None])
    wanted = {"dq": ds @ k * SCALE, "dv": (p.swapaxes(2, 3) @ do).sum(1, keepdims=True)}
    rows = [Tensor(each.astype(np.float32)) for each in (lse, delta)]
    kernel = attention_gradient.with_schedule(TileSchedule(block=block, warps=warps, stages=3))
    found = kernel.check(*given, *rows, scale=SCALE, arch=arch, emulator_seed=seed)
    assert not found.findings
    for name, each in wanted.items(): np.testing.assert_allclose(found.outputs[name], each, atol=0.05)
    dk = next(each for name, each in found.outputs.items() if name not in wanted)
    np.testing.assert_allclose(dk, (ds.swapaxes(2, 3) @ q).sum(1, keepdims=True) * SCALE, atol=0.05)
