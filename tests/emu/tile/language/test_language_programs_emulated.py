"""Programs of users' kinds as PTX on the emulated GPUs: the answers of the CPU, and no finding; kernels in a
graph pool; and the transformer block that the language was drawn with, captured and replayed."""
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support import with_root
from tests.support.language.programs import PROGRAMS, UNORDERED
from tests.support.language.programs.case import Case, direct, tensor
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.language import KTile, OTile, f32, int32, kernel, tile
from tinygrad_nv.language.inspection import check
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.tile.language.batching import batch_program

# times the error of float32. Tensor cores keep 13 bits below the largest product of a step of float8
# (docs/numerics.md): 2^-13 of the largest sum, where float32 has half of 2^-23
WIDER = {"fp8_gemm-20x30x50": 2.0**11}
FROM_SM_89 = {"fp8_gemm-20x30x50"}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_the_emulator(arch: str, case: Case) -> None:
    if arch == "sm_80" and case.name in FROM_SM_89: arch = "sm_89"

    def launch(kernel: Kernel, *args: Any, **constants: Any) -> Any:
        checked = kernel.check(*args, arch=arch, emulator_seed=1, **constants)
        assert not checked.findings, str(checked)
        outputs = [each for each in kernel.program(*args, **constants).tensors if each.output]
        device = next(each.device for each in (*args, *constants.values()) if isinstance(each, Tensor))
        made = tuple(tensor(checked.outputs[each.name], each.dtype, device) for each in outputs)
        return made if len(made) > 1 else made[0]
    replace(case, c=WIDER.get(case.name, case.c)).check("CPU", launch)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [each for each in PROGRAMS if not each.name.startswith(UNORDERED)],
                         ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_two_examples(arch: str, case: Case) -> None:
    """A program over two examples has the bits of each alone."""
    if arch == "sm_80" and case.name in FROM_SM_89: arch = "sm_89"

    def launch(kernel: Kernel, *args: Any, **constants: Any) -> Any:
        made = kernel.program(*args, **constants)
        given = kernel.bind(args, constants, kernel.chosen).tensors
        inputs = [each.name for each in made.tensors if not each.output]
        twice = {name: Tensor.stack(x, x * 2 if dtypes.is_float(x.dtype) else x) for name, x in given.items()}
        checked = check(batch_program(made, 2, inputs), kernel.chosen, twice, arch, 1)
        assert not checked.findings, str(checked)
        for i in range(2):
            one = check(made, kernel.chosen, {name: x[i].contiguous() for name, x in twice.items()}, arch, 1)
            for name, want in one.outputs.items(): assert checked.outputs[name][i].tobytes() == want.tobytes()
        return direct(kernel, *args, **constants)
    given = zip(case.arrays(), case.inputs, strict=True)
    case.run(launch, *(tensor(x, each.dtype, "CPU") for x, each in given))


WIDTH = 48
RNG = np.random.default_rng(0)


@kernel(grid=lambda B: (B,))
def scaled_rows(x: KTile["B", "W", f32], scale: KTile["B", int32], out: OTile["B", "W", f32]):
    row = tile.program_id(0)
    out[row, :] = x[row, :] * tile.cast(scale[row], f32)


@kernel
def product(a: KTile["M", "K", f32], b: KTile["K", "N", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


def test_each_size_and_a_padded_batch():
    weight = RNG.integers(-4, 5, (WIDTH, WIDTH)).astype(np.float32)
    held = Tensor(weight, device="EMU").realize()
    def step(x: Tensor, scale: Tensor) -> Tensor: return product(scaled_rows(x, scale), held)
    pool = GraphPool(step, {"x": Input((WIDTH,), dtypes.float32), "scale": Input((), dtypes.int32, 0)},
                     sizes=(1, 2, 4), device="EMU")
    for batch in (1, 3, 2, 4, 3, 1):
        x = RNG.integers(-4, 5, (batch, WIDTH)).astype(np.float32)
        scale = RNG.integers(1, 9, batch).astype(np.int32)
        np.testing.assert_array_equal(pool(x=x, scale=scale).numpy(), x * scale[:, None] @ weight)
    assert [(each.captures, each.eager) for each in pool.stats().buckets] == [(1, 0)] * 3
    pool.close()


PROGRAM = """
import numpy as np
from tests.unit.language import test_seed_programs as seeds
from tinygrad import Tensor, dtypes
from tinygrad_nv.language import CacheState, autotune
autotune.LEAST, seeds.flash_attention.budget_ms = 1, 1
seeds.Wqkv, seeds.Wo = (Tensor(x).cast(dtypes.bfloat16).realize() for x in seeds.WEIGHTS)
for seed in range(3):
    x = seeds.numbers(1, 40, seeds.WIDTH, seed=seed)
    empty = CacheState(*(Tensor.zeros(seeds.HEADS, 0, 32).cast(dtypes.bfloat16) for _ in range(2)))
    y, cache = seeds.transformer_block(x, empty, heads=seeds.HEADS, p=0.0)
    exact = seeds.block_exact(x.float().numpy().astype(np.float64))
    wrong = np.abs(y.float().numpy() - exact).max() / np.abs(exact).max()
    print(y.device, cache.K.shape, wrong <= 2.0**-6)
entry, = seeds.flash_attention.winners.values()
print(entry.arch, entry.how)
"""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def test_transformer_block(arch: str, tmp_path: Path) -> None:
    env = with_root(DEV="EMU", EMU_ARCH=arch)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["EMU (2, 40, 32) True"] * 3 + [f"{arch} modelled"]
