"""The softmax of the wgmma templates of attention lies under the products, in the SASS of default schedules:
those that the tests of resources do not assemble. Two loops: with the edge's mask, and without."""
from __future__ import annotations

from dataclasses import replace

import pytest
from attention_case import attention
from backward_case import backward
from flash_case import CAUSAL, F16, F32
from flash_fp8_case import attention8
from overlap_case import assert_overlapped
from ragged_case import ragged

from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassembled, functions
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Position, Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LONG = 7392
ALIBI = Sum() * 0.125 + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625
FORWARD = {
    **{f"{d}, causal": (attention(LONG, LONG, d, band=CAUSAL), 2) for d in (64, 96, 128, 192, 256)},
    "f16, persistent": (attention(LONG, 42 * 176, 128, F16, heads=16), 1),
    "e4m3, causal": (attention8(LONG, LONG, 256, band=CAUSAL), 2),
    "ALiBi, causal": (attention(LONG, LONG, 128, band=CAUSAL, score=ALIBI), 2),
    "dropout": (replace(attention(LONG, 64 * 128, 128), kept=200), 1),
    "sequences of any lengths": (ragged([(LONG, LONG)], 128, band=CAUSAL).spec, 2)}
BACKWARD = {"causal": (backward(LONG, LONG, 128, band=CAUSAL), 1),
            "dropout": (backward(LONG, LONG, 64, kept=200), 1)}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str):
    spec, loops = FORWARD[name]
    assert isinstance(spec, AttentionSpec)
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    assembly = assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a")
    assert assembly.kernels["flash_wgmma"].spill_store_bytes == 0
    assert_overlapped(functions(disassembled(assembly.cubin))["flash_wgmma"], loops)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str):
    spec, loops = BACKWARD[name]
    assert isinstance(spec, BackwardSpec)
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    assembly = assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a")
    assert_overlapped(functions(disassembled(assembly.cubin))["flash_backward_wgmma"], loops)
