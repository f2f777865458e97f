"""Convolutions on the emulator by mma.sync, and by wgmma and im2col tensor maps: taps, edges, strides and
tiles that cross rows and images against the reference, in two orders of warps, with copies that land
early and late; what the templates refuse, in words."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.reference_case import right, run, same, storages
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.conv.templates import ConvMma, ConvWgmma
from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.usefixtures("in_order")
BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
GPUS = GPU("sm_80", 108), GPU("sm_90a", 132)
TF32 = 2.0**-8      # of the largest result: what tensor cores cut of operands
ENDS = (silu(Sum() + Load(0, F16, 0, 1).cast(F32) + Load(1, F16, 40, 1).cast(F32))).cast(F16)
SMALL = {
    "3x3": ConvSpec(2, 7, 6, 32, 24, (3, 3), (1, 1), (1, 1, 1, 1), BF16),
    "stride 2, padding below, bias, residual, silu":
        ConvSpec(1, 9, 8, 64, 40, (3, 3), (2, 2), (0, 1, 0, 1), F16, ENDS),
    "1x1": ConvSpec(2, 5, 5, 16, 16, (1, 1), (1, 1), (0, 0, 0, 0), F16),
    "one row": ConvSpec(1, 1, 30, 32, 16, (1, 5), (1, 2), (0, 0, 2, 2), BF16),
    "wide padding": ConvSpec(1, 2, 3, 16, 16, (3, 4), (1, 1), (2, 2, 3, 3), BF16)}


def schedules(spec: ConvSpec) -> list[ConvMma]:
    """A tile of one warp, whose stages are a part of a tap; and a larger one of four, a tap at a time."""
    made = [ConvMma().block(16, 16).k(16).warps(1, 1).stages(3),
            ConvMma().block(64, 32).k(min(spec.channels, 64)).warps(2, 2).stages(2)]
    return [s for s in made if not TABLE.problems(spec, s, GPUS[0])]


@pytest.mark.parametrize("name", SMALL)
def test_numbers_by_mma(name):
    spec = SMALL[name]
    given, whole = storages(spec, seed=len(name)), storages(spec, integers=True)
    for i, s in enumerate(schedules(spec)):
        right(spec, given, run(spec, s, GPUS[i % 2], given, seed=i), cut=2.0**-16)
        if spec.gemm.plain: same(spec, whole, run(spec, s, GPUS[1 - i % 2], whole, seed=1))


def test_tf32_by_mma():
    spec = ConvSpec(1, 6, 6, 16, 16, (3, 3), (1, 1), (1, 1, 1, 1), F32, tf32=True)
    given = storages(spec)
    for gpu in GPUS: right(spec, given, run(spec, TABLE.choose(spec, gpu), gpu, given), cut=TF32)


@pytest.mark.parametrize(("changes", "words"), [
    ({"channels": 12}, "12 channels are no multiple of block_k=16"),
    ({"dtype": F32}, "without tf32")])
def test_refusals_of_mma(changes: dict[str, Any], words: str):
    spec = replace(SMALL["3x3"], epilogue=Sum(), **changes)
    for gpu in GPUS:
        assert TABLE.choose(spec, gpu) is None
        assert words in TABLE.why_not(spec, gpu)


# **** wgmma ****

H100 = GPU("sm_90a", 132)
FEW = GPU("sm_90a", 2)      # CTAs that make several tiles each
SPECS = {
    **SMALL,
    "channels of three stages": ConvSpec(1, 6, 5, 96, 32, (3, 3), (1, 1), (1, 1, 1, 1), BF16),
    "tiles across images": ConvSpec(5, 3, 7, 64, 24, (2, 3), (1, 1), (1, 0, 1, 1), F16),
    "more padding than pixels": ConvSpec(1, 2, 2, 32, 16, (3, 3), (3, 2), (4, 5, 3, 6), F16),
    "no padding, steps of three": ConvSpec(2, 11, 10, 32, 16, (5, 3), (3, 3), (0, 0, 0, 0), BF16)}
BASE = ConvWgmma().stages(3)
KINDS = {
    "one consumer": BASE.block(64, 32).warps(8),
    "two consumers": BASE.block(128, 24).warps(12),
    "in turns": BASE.block(64, 40).warps(12).pingpong(),
    "clusters along rows": BASE.block(64, 16).warps(8).cluster(2),
    "clusters along columns": BASE.block(64, 8).warps(8).cluster(1, 2),
    "splits": BASE.block(64, 16).warps(8).split(2),
    "stream-K": BASE.block(64, 16).warps(8).stream_k()}
SMALLEST = KINDS["one consumer"].k(16)


def with_k(spec: ConvSpec, s: ConvWgmma) -> ConvWgmma:
    """With the widest stage whose channels divide those of the spec."""
    return s.k(next(k for k in (64, 32, 16) if not spec.channels % k))


@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str):
    spec = SPECS[name]
    s = with_k(spec, KINDS[[*KINDS][len(name) % 3]])
    right(spec, given := storages(spec, seed=len(name)), run(spec, s, H100, given), cut=2.0**-16)
    if not spec.gemm.plain: return
    whole = storages(spec, integers=True)
    for seed, gpu in enumerate((H100, FEW)): same(spec, whole, run(spec, s, gpu, whole, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_schedule(kind: str):
    """Nine taps of two stages each go round a ring of three six times."""
    spec = ConvSpec(2, 9, 8, 32, 48, (3, 3), (1, 1), (1, 1, 1, 1), F16)
    whole, s = storages(spec, integers=True), KINDS[kind].k(16)
    assert TABLE.problems(spec, s, H100) == []
    for seed, gpu in enumerate((H100, FEW)): same(spec, whole, run(spec, s, gpu, whole, seed=seed))


def test_tf32():
    spec = ConvSpec(1, 6, 6, 32, 16, (3, 3), (1, 1), (1, 1, 1, 1), F32, tf32=True)
    s = TABLE.choose(spec, H100)
    assert isinstance(s, ConvWgmma)
    right(spec, given := storages(spec), run(spec, s, H100, given), cut=TF32)


def test_what_is_chosen():
    unet = ConvSpec(2, 32, 32, 320, 320, (3, 3), (1, 1), (1, 1, 1, 1), BF16)
    assert isinstance(TABLE.choose(unet, H100), ConvWgmma)
    assert isinstance(TABLE.choose(unet, GPU("sm_80", 108)), ConvMma)
    narrow = replace(unet, channels=48)     # 96 bytes: stages of 32
    assert (s := TABLE.choose(narrow, H100)).template == "conv_wgmma"
    assert s.block_k == 16
    assert TABLE.choose(replace(unet, channels=4), H100) is None


@pytest.mark.parametrize(("changes", "schedule", "words"), [
    ({"channels": 40}, SMALLEST, "40 channels are no multiple of block_k=16"),
    ({}, SMALLEST.swap_operands(), "the transposed matmul"),
    ({"padding": (1, 1, 129, 1)}, SMALLEST, "corners of an im2col map are -128 to 127"),
    ({"stride": (1, 9), "padding": (1, 1, 9, 9)}, SMALLEST, "has up to 8"),
    ({"dtype": F32}, SMALLEST, "which tf32 allows")])
def test_refusals(changes: dict[str, Any], schedule: ConvWgmma, words: str):
    spec = replace(SPECS["3x3"], epilogue=Sum(), **changes)
    assert words in "; ".join(TABLE.problems(spec, schedule, H100))
