"""Group norm on the emulator: groups that vectors straddle, ragged slices, far means, constants, shifts and
silu against float64, in two orders of warps; through the graph; what the template refuses."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context

from tests.support.tile.reference_case import right, run, storages
from tinygrad_nv import explain
from tinygrad_nv.functional import group_norm
from tinygrad_nv.tile.group_norm.program import PROGRAMS, slice_size
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.usefixtures("in_order")
BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
GPUS = GPU("sm_80", 108), GPU("sm_90a", 132)
SPECS = {
    "vectors across groups": GroupNormSpec(2, 60, 40, 4, 1e-5, True, BF16, BF16),
    "ragged slices": GroupNormSpec(1, 3203, 32, 8, 1e-6, False, F16, F32),
    "float32, shift": GroupNormSpec(2, 50, 24, 2, 1e-5, True, F32, F32, F32),
    "odd channels": GroupNormSpec(1, 37, 15, 5, 1e-5, False, F32, F32),
    "more channels than threads": GroupNormSpec(1, 9, 1184, 32, 1e-5, False, F32, F32),
    "one position, one group": GroupNormSpec(3, 1, 8, 1, 1e-5, False, F32, F32),
    "a channel a group": GroupNormSpec(1, 70, 16, 16, 1e-5, False, BF16, BF16, BF16)}


def choose(spec: GroupNormSpec, gpu: GPU) -> Schedule:
    schedule = TABLE.choose(spec, gpu)
    assert schedule is not None, TABLE.why_not(spec, gpu)
    return schedule


@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str):
    spec, given = SPECS[name], storages(SPECS[name], seed=len(name))
    for seed, gpu in enumerate(GPUS):
        right(spec, given, run(spec, choose(spec, gpu), gpu, given, seed=seed), cut=2.0**-16)


def test_slices():
    """An image of many positions has several, the last of which is shorter."""
    spec = SPECS["ragged slices"]
    blocks, _ = PROGRAMS[0].cut(spec, GPUS[0])[0]
    assert blocks.groups > 2
    assert spec.positions % slice_size(spec, blocks)


@pytest.mark.parametrize("x", [
    1000 + torch.randn(1, 803, 32), torch.full((1, 803, 32), 7.25),
    torch.cat([torch.full((1, 1, 32), 1e4), torch.randn(1, 802, 32)], 1)], ids=["far", "constant", "outlier"])
def test_what_cancels(x: torch.Tensor):
    """Means far from the numbers' spread lose no digits: torch's float64, within float32's of the inputs."""
    spec = GroupNormSpec(1, 803, 32, 8, 1e-5, False, F32, F32)
    given = storages(spec)
    given["x"], given["weight"], given["bias"] = x.flatten(), torch.ones(32), torch.zeros(32)
    found = run(spec, choose(spec, GPUS[1]), GPUS[1], given)["out"].double().reshape(1, 803, 32)
    wanted = torch.nn.functional.group_norm(x.double().permute(0, 2, 1), 8, eps=1e-5).permute(0, 2, 1)
    rounding = 2.0**-24 * x.abs().max().item() / x.double().std(unbiased=False).clamp(min=1.0).item()
    assert (found - wanted).abs().max() <= 4 * rounding + 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_group(bad: float):
    spec = GroupNormSpec(2, 70, 320, 32, 1e-5, False, F32, F32)
    given = storages(spec)
    usual = run(spec, choose(spec, GPUS[0]), GPUS[0], given)["out"]
    given["x"].view(2, 70, 320)[1, 69, 15] = bad
    found = run(spec, choose(spec, GPUS[0]), GPUS[0], given)["out"]
    assert found[1, :, 10:20].isnan().all()
    usual[1, :, 10:20] = found[1, :, 10:20] = 0
    assert torch.equal(found, usual)


def test_through_the_graph():
    numbers = [torch.randn(1, 6, 5, 32).half().float(), torch.rand(32), torch.rand(32)]
    with Context(DEV="EMU"):
        x, weight, bias = (Tensor(each.numpy()).realize() for each in numbers)
        made = group_norm(x.half().realize(), 4, weight, bias, activation="silu")
        assert "group_norm" in str(explain(made))
        found = torch.tensor(made.float().numpy())
    wanted = torch.nn.functional.silu(torch.nn.functional.group_norm(
        numbers[0].permute(0, 3, 1, 2), 4, numbers[1], numbers[2])).permute(0, 2, 3, 1)
    assert (found - wanted).abs().max() <= 2.0**-10 * wanted.abs().max()


@pytest.mark.parametrize(("spec", "words"), [
    (replace(SPECS["odd channels"], channels=8193, groups=1), "8193 channels at once, at most 8192"),
    (replace(SPECS["odd channels"], batch=1 << 16), "65536 programs along z"),
    (replace(SPECS["odd channels"], positions=(1 << 31) - 1), "2147483647 positions")], ids=str)
def test_refusals(spec: GroupNormSpec, words: str):
    assert TABLE.choose(spec, GPUS[1]) is None
    assert words in TABLE.why_not(spec, GPUS[1])
