"""The softmax of the wgmma templates of attention lies under the products, in the SASS of default schedules:
those that the tests of resources do not assemble. Two loops: with the edge's mask, and without."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tile.attention_case import attention
from tests.support.tile.backward_case import backward
from tests.support.tile.flash_case import CAUSAL, F16, F32
from tests.support.tile.flash_fp8_case import attention8
from tests.support.tile.ragged_case import ragged
from tests.support.tile.resources_case import assert_overlapped, code_of
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardWgmma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Position, Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LONG = 7392
ALIBI = Sum() * 0.125 + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625
SPECS: dict[str, tuple[AttentionSpec | BackwardSpec, int]] = {
    **{f"{d}, causal": (attention(LONG, LONG, d, band=CAUSAL), 2) for d in (64, 96, 128, 192, 256)},
    "f16, persistent": (attention(LONG, 42 * 176, 128, F16, heads=16), 1),
    "e4m3, causal": (attention8(LONG, LONG, 256, band=CAUSAL), 2),
    "ALiBi, causal": (attention(LONG, LONG, 128, band=CAUSAL, score=ALIBI), 2),
    "dropout": (replace(attention(LONG, 64 * 128, 128), kept=200), 1),
    "sequences of any lengths": (ragged([(LONG, LONG)], 128, band=CAUSAL).spec, 2),
    "backward, causal": (backward(LONG, LONG, 128, band=CAUSAL), 1),
    "backward, dropout": (backward(LONG, LONG, 64, kept=200), 1)}

@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_softmax_lies_under_the_products(name: str):
    spec, loops = SPECS[name]
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert isinstance(schedule, FlashWgmma | BackwardWgmma)
    assert_overlapped(code_of(TABLE.build(spec, schedule, GPU("sm_90a")), "sm_90a"), loops)
