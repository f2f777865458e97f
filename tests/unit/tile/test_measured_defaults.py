"""Schedules that are chosen without a database, beside what an H100 measured of the same spec."""
from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

import pytest

from bench.lib.specs import BF16
from bench.timing.gate_cases import HOPPER
from bench.timing.hardware_rows import HardwareRow, cost_us, load_rows, spec_of
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EXPERTS = [row for row in load_rows() if row.part == "moe"]
ONE_TOKEN = sorted({row.spec for row in EXPERTS if row.spec.endswith(" 1 tokens")})
FEW_ROWS = [row for row in EXPERTS if row.plan.startswith("grouped_wgmma") and row.spec in ONE_TOKEN
            and "x48x" not in row.plan]     # 48 gathered rows of a tile of one row: 10 % too fast


def choose_default(spec: Any, gpu: GPU = HOPPER) -> str:
    family = TABLE.family("gpu", type(spec))
    assert family is not None
    return str(family.default(spec, gpu))


def find_regrets(rows: list[HardwareRow]) -> Mapping[str, float]:
    """Time of the default over the best one's, of sweeps that have the default, the worst of a spec."""
    sweeps: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows: sweeps.setdefault(row.sweep_of_spec, {})[row.plan] = row.time_us
    specs = {row.spec: row for row in rows}
    found: dict[str, float] = {}
    for (_, name, _), times in sweeps.items():
        if len(times) < 2 or (own := times.get(choose_default(spec_of(specs[name])))) is None: continue
        found[name] = max(found.get(name, 1.0), own / min(times.values()))
    return found


def test_defaults_of_experts_are_the_best_or_near() -> None:
    regrets = find_regrets(EXPERTS)
    assert len(regrets) >= 18
    assert mean(regrets.values()) <= 1.01
    assert max(regrets.values()) <= 1.06
    assert {name: regret for name, regret in regrets.items() if name in ONE_TOKEN and regret > 1.015} == {}
    assert set(ONE_TOKEN) <= set(regrets)


@pytest.mark.parametrize("row", FEW_ROWS, ids=str)
def test_the_cost_of_experts_of_one_token(row: HardwareRow) -> None:
    """SMs without a tile leave what HBM brings to the others, and tiles are counted before one begins."""
    cost = cost_us(spec_of(row), TABLE.read("gpu", row.schedule))
    assert cost == pytest.approx(row.time_us, rel=0.05)


def test_long_launches_take_the_first_of_what_is_alike() -> None:
    """Small tiles are for the end of short launches."""
    short, long = (GroupedGemmSpec(32, rows, 2880, 2880, dtype=BF16, scatter=True, weighted=True)
                   for rows in (4, 128))
    assert choose_default(short, GPU("sm_80")) == "grouped_mma 16x16x64, 1 warp, 6 stages"
    assert choose_default(long, GPU("sm_80")) == "grouped_mma 16x128x64, 1x4 warps, 6 stages"
