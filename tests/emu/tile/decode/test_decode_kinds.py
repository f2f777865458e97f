"""Decode attention: keys and values of 8 bits with scales, and scores that are no multiple of the sum."""
from __future__ import annotations

import math

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.decode_case import SMALL, checked, decode, every_number, near, requests, run
from tinygrad_nv.tile.expression import Constant, Expression, Position, Sum, tanh, where

BYTES = [dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2]
WIDE = [dtypes.bfloat16, dtypes.float16]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", BYTES)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_with_scales(kv: DType, dtype: DType, seed: int):
    """Up to ten tiles from a ring of two or three stages."""
    spec = decode(batch=4, heads=2, group=4, d=128, pages=40, page_size=16, dtype=dtype, kv=kv)
    checked(spec, [[0, 1, 15, 16], [17, 127, 128, 129], [255, 256, 257, 383], [511, 512, 639, 640]][seed],
            SMALL.stages(2 + seed % 2), ["sm_80", "sm_90a"][seed // 2], seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", [*BYTES[:2], pytest.param(BYTES[2], marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [8, 32, 256])
@pytest.mark.parametrize(("d", "d_v", "order", "warps"), [(32, 64, "hts", 1), (64, 32, "ths", 2),
                                                          (96, 256, "ths", 4), (256, 128, "hts", 1)])
def test_layouts_of_bytes(kv: DType, page_size: int, d: int, d_v: int, order: str, warps: int):
    spec = decode(batch=2, heads=2, group=5, s_q=warps, d=d, d_v=d_v, page_size=page_size,
                  pages=-(-300 // page_size), kv=kv, order=order)
    checked(spec, [page_size - 1, 300], SMALL.warps(warps, 4 // warps))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kv", BYTES)
@pytest.mark.parametrize("dtype", WIDE)
def test_every_byte_is_its_number(kv: DType, dtype: DType):
    """One visible key: its value times its scale, a power of two, bit for bit."""
    spec, given, wanted = every_number(kv, dtype)
    assert torch.equal(run(spec, given).reshape(256).float(), wanted)


def test_scales_of_any_size():
    """Weights of float16 stay in range: they are scaled relative to the largest scale."""
    spec = decode(batch=2, heads=2, group=2, pages=20, kv=dtypes.int8, dtype=dtypes.float16)
    for scale in (1e-6, 1.0):
        given = requests(spec, [300, 40])
        given.storages["v_scale"] *= scale
        near(spec, given, run(spec, given))


def test_scales_of_zero():
    spec = decode(pages=20, kv=dtypes.int8)
    given = requests(spec, [300])
    given.storages["v_scale"].mul_(0)
    assert not run(spec, given).any()


def soft_cap(cap: float) -> Expression: return tanh(Sum() * (1 / (8 * cap))) * cap


def alibi() -> Expression:
    """A slope of 2^−(1 + head), of the distance."""
    head = (Position(1) * 6 + Position(2) + 1).cast(dtypes.float32)
    distance = (Position("n") - Position("m")).cast(dtypes.float32)
    return Sum() * 0.125 + distance * (head * -1.0).exp2()


def prefix() -> Expression:
    """All keys of the first request, the first ten of others."""
    first = where(Position(0) < Constant(1, dtypes.int32), Sum(), -math.inf)
    return where(Position("n") < Constant(10, dtypes.int32), Sum() * 0.25, first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("score", [Sum(), Sum() * -0.1, 0.5 * (Sum() * 0.3), soft_cap(5.0), soft_cap(50.0),
                                   alibi(), prefix()])
@pytest.mark.parametrize("kv", [None, dtypes.int8])
@pytest.mark.parametrize("window", [None, 90])
def test_scores(score: Expression, kv: DType | None, window: int | None):
    spec = decode(batch=3, heads=2, group=6, s_q=2, pages=20, kv=kv, score=score, window=window)
    checked(spec, [5, 290, 64], scale=0.3)
