"""The transformer block that the language was drawn with, captured and replayed on the emulated GPU: its
flash attention is searched for by the timing model."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import with_root

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
