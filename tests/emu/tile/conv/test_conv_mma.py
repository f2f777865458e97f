"""Convolutions by mma.sync on the emulator: taps, edges and strides against the reference, in two orders of
warps, and through the graph; what the template refuses, in words."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context

from tests.support.tile.reference_case import right, run, same, storages
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.conv.templates import ConvMma
from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
GPUS = GPU("sm_80", 108), GPU("sm_90a", 132)
TF32 = 2.0**-8      # of the largest result: what tensor cores cut of operands
ENDS = (silu(Sum() + Load(0, F16, 0, 1).cast(F32) + Load(1, F16, 40, 1).cast(F32))).cast(F16)
SPECS = {
    "3x3": ConvSpec(2, 7, 6, 32, 24, (3, 3), (1, 1), (1, 1, 1, 1), BF16),
    "stride 2, padding below, bias, residual, silu":
        ConvSpec(1, 9, 8, 64, 40, (3, 3), (2, 2), (0, 1, 0, 1), F16, ENDS),
    "1x1": ConvSpec(2, 5, 5, 16, 16, (1, 1), (1, 1), (0, 0, 0, 0), F16),
    "one row": ConvSpec(1, 1, 30, 32, 16, (1, 5), (1, 2), (0, 0, 2, 2), BF16),
    "wide padding": ConvSpec(1, 2, 3, 16, 16, (3, 4), (1, 1), (2, 2, 3, 3), BF16)}


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """References are compiled sooner."""
    with Context(NOOPT=1): yield


def schedules(spec: ConvSpec) -> list[ConvMma]:
    """A tile of one warp, whose stages are a part of a tap; and a larger one of four, a tap at a time."""
    made = [ConvMma().block(16, 16).k(16).warps(1, 1).stages(3),
            ConvMma().block(64, 32).k(min(spec.channels, 64)).warps(2, 2).stages(2)]
    return [s for s in made if not TABLE.problems(spec, s, GPUS[0])]


@pytest.mark.parametrize("name", SPECS)
def test_numbers(name):
    spec = SPECS[name]
    given, whole = storages(spec, seed=len(name)), storages(spec, integers=True)
    for i, s in enumerate(schedules(spec)):
        right(spec, given, run(spec, s, GPUS[i % 2], given, seed=i), cut=2.0**-16)
        if spec.gemm.plain: same(spec, whole, run(spec, s, GPUS[1 - i % 2], whole, seed=1))


def test_tf32():
    spec = ConvSpec(1, 6, 6, 16, 16, (3, 3), (1, 1), (1, 1, 1, 1), F32, tf32=True)
    given = storages(spec)
    for gpu in GPUS: right(spec, given, run(spec, TABLE.choose(spec, gpu), gpu, given), cut=TF32)


@pytest.mark.parametrize(("changes", "words"), [
    ({"channels": 12}, "12 channels are no multiple of block_k=16"),
    ({"dtype": F32}, "without tf32")])
def test_refusals(changes: dict[str, Any], words: str):
    spec = replace(SPECS["3x3"], epilogue=Sum(), **changes)
    for gpu in GPUS:
        assert TABLE.choose(spec, gpu) is None
        assert words in TABLE.why_not(spec, gpu)
