"""Dropout inside attention kernels: the elements that the reference drops, whatever the tiles."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tile.attention_case import arguments, attention, keep, matrix, run
from tests.support.tile.flash_case import BF16, CAUSAL, F16, F32, MMA, W, close, mma
from tests.support.tile.ragged_case import arguments as ragged_arguments
from tests.support.tile.ragged_case import near as ragged_near
from tests.support.tile.ragged_case import ragged
from tests.support.tile.ragged_case import run as ragged_run
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.attention.dropout import TransposedDropout, keeps
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def dropped(*args: Any, kept: int = 154, **more: Any) -> AttentionSpec:
    return replace(attention(*args, **more), kept=kept)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_blocks_of_columns(n: int):
    """Calls of the generator cover 64 columns: blocks begin within them, or have several. l is that without
    dropout."""
    close(dropped(40, 330, 64, heads=2, group=2, batch=2, lse=True), mma(32, n, 2), seed=n % 4)
    close(dropped(70, 300, 32, F16, band=Band(-150, 3), start=230), mma(64, n, 2, 3), seed=n % 4)


def masks(make: Any, arch: str, kept: int, s_kv: int = 256) -> None:
    """Asserts what is kept, element for element: of equal scores, with a one in the row of each value."""
    spec = dropped(70, s_kv, 64, d_v=s_kv, heads=2, group=2, out=F32, kept=kept)
    given = arguments(spec)
    given["q"].zero_()
    matrix(spec, given, "v")[:, :, 0].copy_(torch.eye(s_kv, dtype=torch.bfloat16))
    out, _ = run(make(spec), spec, given, arch)
    expected = keep(spec, given, 70, s_kv) / s_kv
    assert ((out != 0) == (expected != 0)).all()
    assert ((out - expected).abs() <= 2.0**-22 * expected).all()
    assert 0 < (out != 0).double().mean() < 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kept", [1, 100, 128, 255])
@pytest.mark.parametrize("n", [32, 64])
def test_what_is_kept(n: int, kept: int):
    def make(spec: AttentionSpec) -> AttentionKernel:
        return TABLE.build(spec, mma(32, n, 2), GPU("sm_80"))
    masks(make, "sm_80", kept)


def test_everything_else_goes_with_it():
    close(dropped(60, 200, 64, BF16, band=CAUSAL, start=140, symbolic=("s_q", "s_kv", "start"),
                  score=Sum() * 0.1 + Load(0, F32, 200, 1)), MMA, s_q=33, s_kv=170, start=120)
    case = ragged([(33, 100), (0, 9), (40, 64), (2, 1)], 64, heads=2, group=2, band=CAUSAL, kept=77)
    given = ragged_arguments(case)
    made = TABLE.build(case.spec, mma(32, 32, 2), GPU("sm_90a"))
    ragged_near(case, given, ragged_run(made, case, given, "sm_90a"))


def test_another_seed_drops_others():
    spec = dropped(64, 128, 64, kept=128)
    found = []
    for seed in (0, 1, 1 << 32):
        given = arguments(spec)
        given["seed"] = torch.tensor([seed & 0xFFFF, seed >> 32], dtype=torch.int32)
        found.append(run(TABLE.build(spec, mma(32, 32, 2), GPU("sm_80")), spec, given)[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize("kept", [0, 257])
def test_what_cannot_be(kept: int):
    with pytest.raises(SpecError, match=f"kept={kept}"): dropped(64, 64, kept=kept)


@pytest.mark.parametrize(("tiles", "first"), [(1, 0), (1, 16), (1, 96), (1, 48), (2, 64), (2, 32), (4, 128)])
def test_transposed_fragments(tiles: int, first: int):
    """Of 16 · tiles keys by 16 rows from 24 on."""
    k = Kernel("marks", arch="sm_80", threads=32)
    out, seed = k.pointer("out"), k.pointer("seed")
    cells = [[k.regs("f32", 4, 1.0) for _ in range(2)] for _ in range(tiles)]
    turned = TransposedDropout(k, 100, k.reg("u32", first))
    turned.read(seed)
    turned.mark(cells, k.reg("s32", 24), k.reg("u32", 7))
    lane = k.special("laneid")
    for i, part in enumerate(cells):
        for j, cell in enumerate(part):
            for r, value in enumerate(cell):
                key, row = (lane >> 2) + (16 * i + r // 2 * 8), ((lane & 3) << 1) + (8 * j + r % 2)
                k.emit("st.global.f32", (out + (key * 16 + row).to("u64") * 4).at(), value)
    emu = Emulator("sm_80")
    words = np.array([5, 6], np.uint32)
    result = emu.alloc(np.zeros((16 * tiles, 16), np.float32))
    assert emu.launch(k.ptx(), (1, 1, 1), 32, [result, emu.alloc(words)]).findings == []
    row, key = np.arange(24, 40, dtype=np.uint64), np.arange(first, first + 16 * tiles, dtype=np.uint64)
    expected = keeps(row[None], key[:, None], np.uint64(7), words.astype(np.uint64), 100)
    assert np.array_equal(result.numpy().view(np.float32).reshape(-1, 16), np.where(expected, 1.0, -1.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [16, 32, 48, 64, 80, 112, 128])
def test_wgmma(n: int):
    """Blocks that begin anywhere in the 64 columns of a call, and have two or three of them."""
    schedule = W.block(128, n).stages(2 + n % 3)
    close(dropped(150, 330, 64, heads=2, group=2, lse=True), schedule.pingpong(), seed=n % 4)
    close(dropped(70, 300, 32, F16, band=Band(-150, 3), start=230, kept=60, symbolic=("s_q", "s_kv")),
          schedule, seed=n % 4, s_q=66, s_kv=277)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("n", [48, 64])
def test_what_wgmma_keeps(n: int):
    def make(spec: AttentionSpec) -> AttentionKernel:
        return TABLE.build(spec, W.block(64, n).warps(8), GPU("sm_90a"))
    masks(make, "sm_90a", 100, 192)
