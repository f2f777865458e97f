"""onnx's node tests: a case that fails is in the list, and the list has no other. (onnx takes seconds to make
the cases, so no test is named after one.)"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tinygrad.helpers import Context

from bench.interop import onnx_nodes

PARTS = 40


def differences(cases: Sequence[Any]) -> list[str]:
    """What the list of failures says wrongly of cases."""
    found = []
    for case in cases:
        with Context(DEV="CPU"): why = onnx_nodes.failure(case)
        listed = onnx_nodes.load_known("CPU").get(case.name)
        if why and listed is None: found.append(f"{case.name}: {why}")
        if listed is not None and not why:
            found.append(f"{case.name} passes, but {onnx_nodes.KNOWN.name} has it: {listed}")
    return found


def test_a_sample_of_cases():
    cases = onnx_nodes.cases()
    assert len(cases) == 1884
    assert not (found := differences(cases[::120])), "\n".join(found)
    for device in ("CPU", "EMU"):
        assert onnx_nodes.load_known(device).keys() <= {each.name for each in cases}
        assert all(len(reason) > 20 for reason in onnx_nodes.load_known(device).values())
    # what the package claims
    assert len(onnx_nodes.load_known("CPU")) <= 0.03 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case(part: int):
    assert not (found := differences(onnx_nodes.cases()[part::PARTS])), "\n".join(found)
