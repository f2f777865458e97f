"""The schedules that are chosen, beside those that an H100 timed (bench/results/schedules_*.json)."""
from __future__ import annotations

import json

import pytest

from bench.gpu import all_parts as gpu_all  # noqa: F401 (registers the workloads)
from bench.gpu.parts import all_workloads
from bench.lib.measure import RESULTS
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU

TIMED = json.loads((RESULTS / "schedules_h100-80gb-hbm3.json").read_text())["schedules"]
MOST = 1.15     # times the fastest that was timed
# whose choice since then was not among those that were timed
UNTIMED = "Llama 8B gate_up silu M=16"


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in ("gemm", "moe", "paged")
                                            for name in TIMED[part] if name != UNTIMED])
def test_what_is_chosen_is_near_the_fastest(part: str, name: str):
    workload = all_workloads(part)[name]
    spec = workload.stages[0][0] if part == "moe" else workload.spec
    seconds = {row["schedule"]: row["seconds"] for row in TIMED[part][name] if row["seconds"]}
    assert seconds[str(choose(spec, GPU("sm_90a", 132)))] <= MOST * min(seconds.values())
