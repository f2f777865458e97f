"""Kernels that Triton compiled, on the emulated GPU: the right numbers, and nothing to find fault with.

The machine is made for the case's architecture, with all checks on. Seeds change the order in which
asynchronous work completes and warps take turns, and must not change a bit of the result.
"""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.ptx import triton_matmul
from tests.support.ptx.triton_case import compile_for, solve
from tests.support.ptx.triton_kernels import CASES, Case, Outcome, run
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


@pytest.mark.sampled(14)
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


@pytest.mark.parametrize(("name", "instruction", "which", "kinds"), [
    ("softmax-f32-sm80", r"bar\.sync", 0, {"race", "uninitialized"}),
    ("transpose-f32-sm80", r"bar\.sync", -1, {"race", "uninitialized"}),
    ("gemm-bf16-2stages-sm80", r"cp\.async\.wait_group", 0, {"async-hazard", "uninitialized"}),
    ("tma-host-bf16-nt-sm90", r"@!complete bra\.uni", 0, {"async-hazard", "uninitialized"}),
    ("tma-host-bf16-nt-sm90", r"wgmma\.wait_group", -1, {"wgmma-hazard"}),
    ("tma-host-bf16-nt-sm90", r"fence\.proxy\.async", -1, {"proxy-fence"}),
    ("specialised-outer-sm90", r"mbarrier\.arrive\.expect_tx", 0, {"deadlock"})])
def test_a_kernel_without_one_instruction_is_found(name: str, instruction: str, which: int,
                                                   kinds: set[str]) -> None:
    """The same kernels, one line taken out of what Triton wrote."""
    case = BY_NAME[name]
    problem = case.make(np.random.default_rng(0))
    compiled = compile_for(case, problem)
    lines = compiled.ptx.split("\n")
    at = [i for i, line in enumerate(lines) if re.search(instruction, line)][which]
    broken = replace(compiled, ptx="\n".join([*lines[:at], "", *lines[at + 1:]]))
    emulator = Emulator(arch=ARCHS[case.arch], step_limit=2_000_000)
    found = {finding.kind for finding in solve(emulator, case, problem, broken).report.findings}
    assert found & kinds, found


def test_accumulators_read_too_early() -> None:
    """With float16 accumulators Triton 3.9 unpacks them before wgmma.wait_group: ptxas reports C7517 and
    waits by itself, the emulator reports the read."""
    make = triton_matmul.gemm(64, 64, 160, (64, 64, 32), torch.float16, acc=triton_matmul.tl.float16)
    done = run(Emulator(arch="sm_90a"), Case("early", triton_matmul.gemm_kernel, make, 90))
    assert {finding.kind for finding in done.report.findings} == {"wgmma-hazard"}


def test_wrong_outputs_are_reported() -> None:
    """The comparison of this module can fail: one bit of an exact output, and a bound passed by little."""
    done = outcome(BY_NAME["add-f32-sm80"], seed=0)
    done.outputs["out"][3] += 1
    assert "out: 1 of 1024 wrong, first at (3,)" in done.wrong()[0]
    real = outcome(BY_NAME["layer-norm-f32-sm80"], seed=0)
    real.outputs["mean"][2] += 3e-6
    assert [line.split(":")[0] for line in real.wrong()] == ["mean"]
