"""Updates of many tensors on the emulated GPU: numbers, nothing beside them written, registers, time."""
from __future__ import annotations

import pytest
import torch

from tests.support.cpu.optimizer_spec_case import SPECS, given_of
from tests.support.tile.reference_case import right, run
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.optimizer.spec import CHUNK, AdamWSpec, SquaresSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

H100, A100 = GPU("sm_90a", 132), GPU("sm_80", 108)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("gpu", [H100, A100], ids=lambda gpu: gpu.arch)
def test_numbers(name: str, gpu: GPU):
    spec = SPECS[name]
    given = given_of(spec)
    right(spec, given, run(spec, TABLE.choose(spec, gpu), gpu, given))


def test_a_step_that_is_not_taken_writes_nothing():
    spec = SPECS["bf16 with masters"]
    given = given_of(spec)
    given["control"][0] = 0
    got = run(spec, TABLE.choose(spec, H100), H100, given)
    for key, x in got.items(): assert torch.equal(x, given[key].double()), key


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gpu", [H100, A100], ids=lambda gpu: gpu.arch)
def test_registers(gpu: GPU):
    """As many as eight CTAs of an SM may have: 32 each of 2048 threads."""
    many = tuple(range(1, 292))
    for spec in (AdamWSpec(many, (0,) * 291, 0.9, 0.95, 1e-8), SquaresSpec(many)):
        made = TABLE.build(spec, TABLE.choose(spec, gpu), gpu)
        found = assemble(made.ptx, gpu.arch).kernels[made.name]
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
        assert found.registers <= 64
        assert made.pdl == (gpu is H100)


def test_too_many_tensors():
    many = SquaresSpec((1,) * 5000)
    assert TABLE.problems(many, TABLE.choose(SquaresSpec((1,)), H100), H100) == \
        ["5001 pointers, at most 4000"]
    assert TABLE.build(SquaresSpec((CHUNK + 1, 2)), TABLE.choose(SquaresSpec((1,)), H100), H100).grid[0] == 3
