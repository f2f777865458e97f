"""The part "memory" of bench/gpu/run.py on the emulator, and that it notices what is wrong."""
from __future__ import annotations

import re
from argparse import Namespace

import pytest

from bench.gpu import elementwise as gpu_elementwise
from bench.gpu.elementwise import OPERANDS, ElementwiseWorkload


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("form", OPERANDS)
def test_each_form(form: str, arch: str):
    row = gpu_elementwise.run_emulated(ElementwiseWorkload(form, 1024, 4096), Namespace(arch=arch, seed=1))
    assert row["status"] == "emulated", row["why"]


def test_what_is_wrong_is_said():
    workload = ElementwiseWorkload("rms", 4, 64)
    one = workload.make_inputs("cpu")[0]
    one["out"].zero_()
    assert re.match(r"0 in row \d, column \d+, exactly \S+; \d+ elements are off", workload.unlike(one))
    one["out"] = gpu_elementwise.theirs("rms", one)
    assert workload.unlike(one) == ""


def test_names_differ_and_bytes_are_counted():
    every = list(gpu_elementwise.shapes())
    assert len({each.name for each in every}) == len(every)
    assert ElementwiseWorkload("residual", 10, 64).nbytes == 2 * 64 * (10 * 3 + 1)
    assert ElementwiseWorkload("silu·mul", 10, 64).nbytes == 2 * 64 * 10 * 3
    assert ElementwiseWorkload("embedding", 10, 64).nbytes == 2 * 2 * 64 * 10 + 4 * 10
