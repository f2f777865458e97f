"""`verify.numerics` on functions of tiles: their ranges are looked at while a kernel is debugged."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor as Plain

from tinygrad_nv import TinyJit
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.language import *


@verify.numerics(stable=True, bounded=[-100, 100])
def attention_score(q: Tile, k: Tile) -> Tile:
    return tile.dot(q, tile.transpose(k)) * tile.rsqrt(float(q.shape[-1]))


@kernel
def scores(q: KTile["M", "D", f32], k: KTile["N", "D", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    return attention_score(q[T.m, :], k[T.n, :])


@verify.numerics()
def halves(x: Tile) -> Any: return {"low": x * 0.5, "high": tile.log(x)}


@kernel
def logs(x: KTile["N", f32]) -> OTile["N", f32]:
    T = tile.context()
    total = tile.zeros((T.m,), f32)
    for _ in tile.range(2): total = total + halves(tile.load(x, T.m, other=1.0))["high"]
    return total


@pytest.fixture
def debugged(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("NV_DEBUG", "1")


def ones(rows: int, scale: float = 1.0) -> Plain: return (Plain.ones(rows, 64) * scale).contiguous().realize()


def test_what_is_within_its_range(debugged: None):
    np.testing.assert_array_equal(scores(ones(70), ones(90)).numpy(), np.full((70, 90), 8.0))


def test_what_is_not(debugged: None):
    with pytest.raises(NumericsError, match=r"elements of 128 … 128\n.*numbers of -100 … 100") as found:
        scores(ones(70, 4.0), ones(90, 4.0))
    assert "test_language_promises.py:15: " in str(found.value)
    assert "attention_score in program (0, 0, 0) of kernel scores" in str(found.value)


def test_it_names_the_place_in_a_result_and_loops(debugged: None):
    x = np.ones(70, np.float32)
    x[66] = 0
    with pytest.raises(NumericsError, match=r"halves\['high'\] in program \(1, 0, 0\).*1 of 64 elements"):
        logs(Plain(x))


def test_nothing_is_looked_at_without_debugging():
    assert (scores(ones(70, 4.0), ones(90, 4.0)) == 128).all().item()
    assert "promise" not in str(scores.program(ones(70), ones(90)))


def test_what_is_built_is_the_same(monkeypatch: pytest.MonkeyPatch):
    plain = scores.program(ones(70), ones(90)).key
    monkeypatch.setenv("NV_DEBUG", "1")
    assert scores.program(ones(70), ones(90)).key == plain


def test_a_captured_call_has_no_values_to_look_at(debugged: None):
    step = TinyJit(lambda q, k: scores(q, k).realize())
    for _ in range(2): step(ones(70), ones(90))
    assert (step(ones(70, 4.0), ones(90, 4.0)) == 128).all().item()
