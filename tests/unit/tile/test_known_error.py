"""The error that is told beside a prediction is the one that bench/timing_hardware.py has recorded."""
from __future__ import annotations

import json

import pytest

from tests.support import ROOT
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.dense import dense as attention
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.known_error import (
    MODELS,
    TIMING,
    KnownError,
    describe_error,
    family_of,
    find_least_ratio,
)

RECORDED = json.loads((ROOT / "bench" / "results" / "timing_hardware.json").read_text())["families"]


@pytest.mark.parametrize("model", MODELS)
def test_errors_are_those_that_were_recorded(model: str):
    recorded = {family: figures[model] for family, figures in RECORDED.items()
                if figures[model] and family != "all"}
    assert MODELS[model].keys() == recorded.keys()
    for family, found in MODELS[model].items():
        figures = recorded[family]
        rank = figures.get("rank")
        assert (found.percent, found.kernels, found.rank) == (
            round(figures["mape"], 1), figures["rows"], None if rank is None else round(rank, 2)), family


def test_families_of_specs():
    assert family_of(dense(64, 64, 64)) == "gemm"
    assert describe_error(dense(64, 64, 64), "cost") == (
        "5.0% off in mean on an H100 (119 kernels), whose schedules it orders with a rank correlation of "
        "0.34")
    assert family_of(attention(1, 2, 64, 64)) == "attention forward"
    assert family_of(object()) is None
    assert describe_error(object(), "timing") == "error not known: no hardware has judged such kernels"
    with pytest.raises(SpecError, match="a model 'luck'"): describe_error(object(), "luck")


def test_modelled_times_tell_schedules_apart_where_the_model_orders_them(monkeypatch: pytest.MonkeyPatch):
    """Else by more than its mean error."""
    spec = dense(64, 64, 64)
    for rank, ratio in ((0.5, 1.05), (0.9, 1.01), (None, 1.01)):
        monkeypatch.setitem(TIMING, "gemm", KnownError(5.0, 10, rank))
        assert find_least_ratio(spec) == pytest.approx(ratio)
    assert find_least_ratio(object()) == pytest.approx(1.01)
