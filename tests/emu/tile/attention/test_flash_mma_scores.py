"""Scores of every kind, and extents known at a launch, through the mma.sync template of attention."""
from __future__ import annotations

import math

import pytest
import torch
from attention_case import arguments, attention, near, reference, run
from flash_mma_case import BF16, CAUSAL, F16, F32, SMALL, close, scheduled
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

NOTHING = Constant(-math.inf)
SCALED = Sum() * 0.1
SCORES: dict[str, Expression] = {
    "the sum": Sum(), "negative": SCALED * -1.0, "nothing": Sum() * 0.0,
    "twice scaled": 0.5 * SCALED, "hardly": Sum() * 1e-36,
    "bias": SCALED + Load(0, F32, 199, 1, (0, 2 * 40 * 199, 40 * 199)),
    "bias of columns": SCALED + Load(0, BF16, 0, 1, (0, 199, 0), 3).cast(F32),
    "aligned pairs": SCALED + Load(0, F16, 256, 1).cast(F32),
    "mask": where(Load(0, dtypes.bool, 199, 1), SCALED, NOTHING),
    "soft-cap": tanh(SCALED * 0.2) * 5.0,
    "ALiBi": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (Position("n").cast(F32) - Position("m").cast(F32)),
    "by head": SCALED * (1.0 + Position(1).cast(F32)) + Position(2).cast(F32) * Position("n").cast(F32) * .01,
    "prefix": where(Position("n") < Constant(50, dtypes.int32), SCALED, NOTHING),
    "two parameters": where(Load(1, dtypes.bool, 0, 1), SCALED + Load(0, F32, 199, 1), NOTHING)}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str):
    for band, s_kv, seed in ((FULL, 199, 0), (CAUSAL, 198, 1)):
        close(attention(40, s_kv, 64, score=SCORES[name], heads=2, group=2, band=band, start=100,
                        lse=True), scheduled(32, 32, 1), seed=seed)


def test_a_multiple_of_the_sum_is_not_evaluated():
    """A scale belongs to the exponent: as many instructions as without one."""
    def lines(score: Expression) -> int:
        return TABLE.build(attention(64, 128, 64, score=score), SMALL, GPU("sm_80")).ptx.count("\n")
    assert lines(Sum()) == lines(Sum() * 0.1) == lines(2.0 * (Sum() * 0.1)) < lines(Sum() * -0.1)


def test_rows_masked_in_memory_are_zeros():
    spec = attention(40, 200, 64, score=where(Load(0, dtypes.bool, 200, 1), SCALED, NOTHING), lse=True)
    given = arguments(spec)
    mask = given["x0"].view(40, 200)
    mask[3] = False
    mask[20, :] = False
    mask[21, :199] = False
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    near(spec, given, got)
    assert (got[0][..., [3, 20], :] == 0).all()
    assert got[1] is not None
    assert (got[1][..., [3, 20]] == -torch.inf).all()


@pytest.mark.parametrize("scale", [30.0, 1e4, 1e-6])
def test_very_large_and_very_small_scores(scale: float):
    """Up to 10⁹: a row is then its largest score's value, as far as float32 tells scores apart."""
    spec = attention(40, 200, 64, BF16, band=CAUSAL, start=100)
    given = arguments(spec)
    given["q"].mul_(scale)
    if scale > 100: given["k"].mul_(scale)
    out, _ = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    exact, _ = reference(spec, given)
    if scale < 1e4: near(spec, given, (out, None))
    else: assert (out - exact).abs().max() <= 2.0**-7 * exact.abs().max()


# **** extents of a launch ****

@pytest.mark.parametrize("extents", [(1, 1, 0), (5, 70, 65), (100, 300, 200), (64, 64, 0), (33, 256, 7),
                                     (65, 31, 3)], ids=str)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 0)], ids=str)
def test_symbolic_extents(band: Band, extents: tuple[int, int, int]):
    """What lies beyond is memory that was never written."""
    spec = attention(100, 300, 64, band=band, symbolic=("s_q", "s_kv", "start"), start=200, heads=2,
                     lse=True)
    close(spec, scheduled(64, 32, 4, 3), **dict(zip(spec.symbolic, extents, strict=True)))


def test_no_keys_at_all():
    spec = attention(40, 100, 64, symbolic=("s_kv",), lse=True)
    out, log = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, arguments(spec), s_kv=0)
    assert (out == 0).all()
    assert log is not None
    assert (log == -torch.inf).all()


@pytest.mark.parametrize("symbolic", [("s_q",), ("s_kv",), ("start",), ("s_q", "start")], ids=str)
def test_some_extents_symbolic(symbolic: tuple[str, ...]):
    extents = {name: n for name, n in (("s_q", 33), ("s_kv", 140), ("start", 17)) if name in symbolic}
    close(attention(64, 192, 64, band=CAUSAL, start=100, symbolic=symbolic,
                    score=SCALED + Load(0, F32, 192, 1)), **extents)
