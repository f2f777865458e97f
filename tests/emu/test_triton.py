"""Kernels that Triton compiled, on the emulated GPU: the right numbers, and nothing to find fault with.

The machine is made for the case's architecture, with all checks on. Seeds change the order in which
asynchronous work completes and warps take turns, and must not change a bit of the result.
"""
from __future__ import annotations

import pytest
import torch
from triton_kernels import CASES, Case, Outcome, run

from tinygrad_nv.ptx.emulator import Emulator

ARCHS = {80: "sm_80", 90: "sm_90a"}
BY_NAME = {case.name: case for case in CASES}
SEEDED = ("softmax-f32-sm80", "gemm-bf16-3stages-sm80", "gemm-bf16-real-sm90", "tma-host-bf16-nt-sm90",
          "tma-device-real-sm90", "attention-tma-sm90", "specialised-outer-sm90",
          "partitioned-sm90", "lookback-sm90")


def outcome(case: Case, seed: int) -> Outcome:
    """The case on a machine of its own. Findings and wrong outputs fail."""
    done = run(Emulator(arch=ARCHS[case.arch], check=True, seed=seed), case)
    assert not done.report.findings, "\n".join(map(str, done.report.findings))
    assert not done.wrong(), "\n".join(done.wrong())
    return done


def test_names_are_unique() -> None:
    """The table has no two cases of one name."""
    assert len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case: Case) -> None:
    """Right numbers and no finding."""
    outcome(case, seed=0)


@pytest.mark.parametrize("name", SEEDED)
def test_seeds(name: str) -> None:
    """Results that no order of completion changes."""
    first, *others = (outcome(BY_NAME[name], seed).outputs for seed in range(4))
    for other in others:
        for output, tensor in first.items():
            assert torch.equal(tensor.view(torch.uint8), other[output].view(torch.uint8)), output


def test_wrong_outputs_are_reported() -> None:
    """The comparison of this module can fail: one bit of an exact output, and a bound passed by little."""
    done = outcome(BY_NAME["add-f32-sm80"], seed=0)
    done.outputs["out"][3] += 1
    assert "out: 1 of 1024 wrong, first at (3,)" in done.wrong()[0]
    real = outcome(BY_NAME["layer-norm-f32-sm80"], seed=0)
    real.outputs["mean"][2] += 3e-6
    assert [line.split(":")[0] for line in real.wrong()] == ["mean"]
