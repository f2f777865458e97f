"""Routers on the emulated GPU: policies, numbers of experts and tokens, ties, NaN, one launch and two; bit
for bit beside a sort in float64, and ptxas's report."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.cpu.router_case import Found, chosen, sorted_right, weights
from tests.support.tile.gemm_case import TORCH
from tests.support.tile.reference_case import run
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.tile.router.spec import SCORES, Policy, RouterSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
# few SMs: several CTAs have several tokens a warp
GPUS = GPU("sm_80", 3), GPU("sm_89", 3), GPU("sm_90a", 3)
HOPPER = GPUS[2]


def routed(spec: RouterSpec, logits: torch.Tensor, bias: torch.Tensor | None = None, gpu: GPU = HOPPER,
           seed: int = 0) -> Found:
    """Nothing may be found, and nothing beside the results written."""
    given = {"experts": torch.full((spec.slots,), 99, dtype=torch.int32),
             "weights": torch.full((spec.slots,), 99.0),
             "order": torch.full((spec.slots,), 99, dtype=torch.int32),
             "offsets": torch.full((spec.experts + 1,), 99, dtype=torch.int32),
             "logits": logits.flatten(), **({} if bias is None else {"bias": bias})}
    found = run(spec, TABLE.choose(spec, gpu), gpu, given, seed)
    return (found["experts"].numpy().astype(np.int32), found["weights"].numpy(),
            found["order"].numpy().astype(np.int32), found["offsets"].numpy().astype(np.int32))


def right(spec: RouterSpec, gpu: GPU = HOPPER, seed: int = 0) -> None:
    """Logits are whole eighths: far from each other, but for many that are equal."""
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randint(-24, 24, (spec.tokens, spec.experts), generator=random) / 8).to(TORCH[spec.dtype])
    bias = torch.randint(-8, 8, (spec.experts,), generator=random) / 4. if spec.biased else None
    found = routed(spec, logits, bias, gpu, seed)
    np.testing.assert_array_equal(found[0], chosen(spec, logits, bias))
    sorted_right(spec, found)
    wanted = weights(spec.policy, logits.double(), torch.from_numpy(found[0]).long())
    # an exponential and a quotient, each within 2 ulp, and a sum of so many
    np.testing.assert_allclose(found[1], wanted, rtol=(8 + spec.experts) * 2.0**-24)


DEEPSEEK = Policy(8, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4)
CASES = {
    "mixtral": RouterSpec(3, 8, Policy(2, renormalize=True), BF16),
    "60 experts": RouterSpec(1, 60, Policy(4)),
    "olmoe": RouterSpec(17, 64, Policy(8), F16),
    "qwen3": RouterSpec(1, 128, Policy(8, renormalize=True), BF16),
    "gpt-oss": RouterSpec(3, 128, Policy(4, "chosen"), BF16),
    "llama 4": RouterSpec(3, 16, Policy(1, "chosen_sigmoid"), BF16),
    "deepseek 2": RouterSpec(3, 160, Policy(6, groups=8, top_groups=3, group_score="max", scale=16.)),
    "deepseek 3": RouterSpec(5, 256, DEEPSEEK, F32, biased=True),
    "two launches": RouterSpec(111, 60, Policy(4, "sigmoid"), BF16)}
MORE = {
    "hundreds": RouterSpec(300, 128, Policy(8), BF16), "hundreds of groups": RouterSpec(
        129, 256, DEEPSEEK, F32, biased=True),
    "odd groups": RouterSpec(70, 35, Policy(6, "sigmoid", groups=7, top_groups=3), F32, biased=True),
    "512 experts": RouterSpec(66, 512, Policy(10, renormalize=True), BF16),
    "384 experts": RouterSpec(9, 384, replace(DEEPSEEK, groups=1, top_groups=1), F32, biased=True),
    "all experts": RouterSpec(65, 8, Policy(8)), "1 expert": RouterSpec(66, 1, Policy(1))}


@pytest.mark.parametrize("name", CASES)
def test_experts_weights_and_order(name: str): right(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_on_every_target_and_in_any_order_of_warps(name: str, gpu: GPU):
    for seed in range(2): right({**CASES, **MORE}[name], gpu, seed)


@pytest.mark.parametrize("tokens", [5, 70])
def test_all_tokens_to_one_expert(tokens: int):
    spec = RouterSpec(tokens, 40, Policy(1))
    logits = torch.zeros(tokens, 40)
    logits[:, 37] = 1
    found = routed(spec, logits)
    assert (found[0] == 37).all()
    sorted_right(spec, found)


def test_of_equal_experts_and_groups_the_first_come_first():
    spec = RouterSpec(2, 40, Policy(6, groups=5, top_groups=2))
    assert routed(spec, torch.zeros(2, 40))[0].tolist() == [[*range(6)]] * 2
    minus = torch.zeros(2, 40)
    minus[:, ::2] = -0.0
    assert routed(spec, minus)[0].tolist() == [[*range(6)]] * 2


@pytest.mark.parametrize("tokens", [3, 69])
def test_minus_infinity_and_nan(tokens: int):
    """What is not a number is never chosen before what is; the last expert takes its place, and every slot
    has its place in the order."""
    spec = RouterSpec(tokens, 20, Policy(20, "chosen_sigmoid"))
    logits = torch.zeros(tokens, 20)
    logits[0, ::2], logits[1], logits[2, 3:] = -torch.inf, -torch.inf, torch.nan
    found = routed(spec, logits)
    np.testing.assert_array_equal(found[0][0], [*range(1, 20, 2), *range(0, 20, 2)])
    np.testing.assert_array_equal(found[0][1], range(20))
    assert found[0][2].tolist() == [0, 1, 2, *[19] * 17]
    sorted_right(spec, found)
    np.testing.assert_array_equal(found[1][0], [0.5] * 10 + [0] * 10)


@pytest.mark.parametrize("policy", [Policy(8), DEEPSEEK, Policy(8, "chosen")], ids=lambda p: p.score)
def test_a_token_of_nan_alone_ends(policy: Policy):
    """Experts of groups that are left out have −inf, which is a number."""
    spec = RouterSpec(2, 256, policy)
    logits = torch.zeros(2, 256)
    logits[0] = torch.nan
    found = routed(spec, logits)
    nan = [*range(128, 136)] if policy.groups > 1 else [255] * 8
    assert found[0].tolist() == [nan, [*range(8)]]
    assert np.isnan(found[1][0]).all()
    assert np.isfinite(found[1][1]).all()
    sorted_right(spec, found)


@pytest.mark.sampled(1)
@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_registers(arch: str):
    """No word spills, with as many warps as there may be."""
    for spec in (RouterSpec(32, 256, DEEPSEEK, F32, biased=True), RouterSpec(32, 128, Policy(8), BF16),
                 RouterSpec(32, 512, Policy(10), BF16), RouterSpec(4096, 512, Policy(10), BF16),
                 RouterSpec(4096, 256, DEEPSEEK, F32, biased=True)):
        for each in TABLE.build(spec, TABLE.choose(spec, GPU(arch)), GPU(arch)).kernels:
            found = assemble(each.ptx, arch).kernels[each.name]
            assert found.spill_store_bytes == found.spill_load_bytes == 0, (str(spec), each.name)


def test_what_has_no_kernel_says_why():
    def said(*given: object) -> str: return TABLE.why_not(RouterSpec(*given), GPU("sm_90a", 132))  # type: ignore[arg-type]
    assert said(1, 513, Policy(1)) == "513 experts, at most 512"
    assert said(1, 64, Policy(33)) == "33 experts of a token, at most 32"
    assert said(1, 66, Policy(1, groups=33)) == "33 groups, at most 32"


def test_every_score_is_tried():
    assert {spec.policy.score for spec in CASES.values()} == set(SCORES)
