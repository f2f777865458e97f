"""Plans: how they answer to more GPUs, other layouts and other settings, and what they are held to."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tinygrad_nv.dist.plan.cluster import cluster, device, figures, gpu_names
from tinygrad_nv.dist.plan.collectives import GroupSize, beside
from tinygrad_nv.dist.plan.inference import InferenceStep, decode
from tinygrad_nv.dist.plan.layout import Inference, Layout, Training, require
from tinygrad_nv.dist.plan.planning import Plan, plan
from tinygrad_nv.dist.plan.presets import preset
from tinygrad_nv.dist.plan.report import data, text
from tinygrad_nv.dist.plan.search import Choice, search
from tinygrad_nv.ptx.timing.gpu import list_gpus as timing_known

ROOT = Path(__file__).resolve().parents[3]
LLAMA, LARGE, EXPERTS = preset("llama-3.1-8b"), preset("llama-3.1-70b"), preset("qwen3-30b-a3b")
IDEAL = 1.0


def timed_steps() -> dict[tuple[int, int], float]:
    """Decode steps of 8B as the timing model of single instructions has them (docs/timing.md)."""
    rows = json.loads((ROOT / "bench" / "results" / "timing_table.json").read_text())["rows"]
    return {(batch, context): row["us"] * 1e-6 for batch in (1, 16) for context in (1024, 8192)
            for row in rows if row["row"] == f"decode step: Llama-3.1-8B, batch {batch}, {context} tokens"}


def test_a_decode_step_of_one_gpu_agrees_with_the_timing_model():
    """Within 7 %: two models of the same kernels, of which the other runs their instructions. An H100 took
    5.58 ms for the first step (docs/hardware.md), the plan has 5.41, the other 5.75."""
    steps = timed_steps()
    assert len(steps) == 4
    for (batch, context), seconds in steps.items():
        made = decode(LLAMA, Layout(), Inference(batch, achieved=IDEAL), cluster("H100"), context)
        assert made.seconds == pytest.approx(seconds, rel=0.07)
    first = decode(LLAMA, Layout(), Inference(1, achieved=IDEAL), cluster("H100"), 1024)
    assert first.seconds == pytest.approx(5.58e-3, rel=0.05)


def stepped(gpus: str, layout: Layout, config=LARGE, **settings) -> InferenceStep:
    """A decode step after 1088 tokens."""
    work = Inference(**{"batch": 8, "quantization": "fp8", **settings})
    require(layout, config, cluster(gpus), work)
    return decode(config, layout, work, cluster(gpus), 1088)


def answered(gpus: str, layout: Layout, config=LARGE, **settings) -> Plan:
    return plan(config, layout, cluster(gpus), Inference(**{"batch": 8, "quantization": "fp8", **settings}))


def test_tensor_parallel_ranks_answer_sooner_but_not_as_often_sooner():
    steps = [stepped(f"{tp}xH100", Layout(tp=tp)).seconds for tp in (1, 2, 4, 8)]
    assert all(b < a < 2 * b for a, b in pairwise(steps))


def test_a_step_is_its_kernels_and_its_collectives():
    for layout in (Layout(tp=4), Layout(tp=2, dp=2), Layout(tp=2, pp=2)):
        made = stepped("4xH100", layout)
        whole = made.kernels.total + sum(use.exposed_s for use in made.uses)
        assert made.seconds == pytest.approx(whole, rel=1e-9)
        assert made.period_s >= made.seconds
    assert made.period_s < 1.1 * made.seconds   # the stage with the head is what the other waits for


def test_all_reduces_of_a_step():
    (hidden, logits) = stepped("8xH100", Layout(tp=8)).uses
    assert (hidden.count, hidden.collective.nbytes) == (2 * 80 + 1, 8 * 8192 * 2)
    assert hidden.collective.group == GroupSize(8, 8)
    assert (logits.count, logits.collective.kind) == (1, "all_gather")
    (_, sent, _) = stepped("4xH100", Layout(tp=2, pp=2)).uses
    assert (sent.count, sent.collective.nbytes) == (1, 4 * 8192 * 2 / 2)


def test_data_parallel_ranks_multiply_what_is_answered():
    one = answered("1xH100", Layout(), LLAMA)
    eight = answered("8xH100", Layout(dp=8), LLAMA, batch=64)
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    assert eight.step_s == one.step_s
    assert not eight.uses


def test_whole_experts_swap_reductions_for_all_to_alls():
    sliced = stepped("8xH100", Layout(tp=8), EXPERTS)
    dealt = stepped("8xH100", Layout(tp=8, ep=8), EXPERTS)
    assert sliced.uses[0].count == 2 * 48 + 1
    assert dealt.uses[0].count == 48 + 1
    assert [use.collective.kind for use in dealt.uses] == \
        ["all_reduce", "all_gather", "all_gather", "all_to_all"]
    # a token's rows, of 8 experts, of the eighth of the tokens that a rank sends
    assert (dealt.uses[-1].count, dealt.uses[-1].collective.nbytes) == (2 * 48, 8 * 2048 * 2 * 8 / 8)


def test_long_answers_and_long_prompts():
    short, long = (answered("1xH100", Layout(), LLAMA, output_len=tokens) for tokens in (64, 4096))
    assert long.step_s > short.step_s           # a longer cache
    assert long.tokens_per_s > short.tokens_per_s   # prompts are answered more
    prompt = answered("1xH100", Layout(), LLAMA, input_len=8192)
    assert prompt.first_token_s > 7.9 * short.first_token_s


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_plans(name: str):
    made = plan(LLAMA, Layout(), cluster(name), Inference(4, 512, 64, achieved=IDEAL))
    read = 2 * (LLAMA.parameters - LLAMA.vocab_size * LLAMA.hidden_size)
    assert made.step_s > read / device(name).model.hbm_bytes_per_s
    assert 0.4 < made.bandwidth < 1
    assert device(name).timing in ("", *timing_known())


def test_every_figure_has_a_source():
    """In its own line: what is named at the top of the file, a measurement, a model, a fit, an assumption."""
    text = (ROOT / "tinygrad_nv" / "dist" / "plan" / "figures.toml").read_text()
    named = re.findall(r"^# (\[\w+\]) ", text, re.MULTILINE)
    assert len(named) == 6
    said = re.findall(r"^\w+ = [\d\[][^#\n]*(.*)", text, re.MULTILINE)
    numbers = [each for table in tables(figures()) for each in table.values()
               if isinstance(each, int | float | list) and not isinstance(each, bool)]
    assert len(said) == len(numbers) > 45
    for comment in said:
        assert any(word in comment for word in (*named, "measured", "modelled", "fitted", "assumed")), comment


def tables(found: dict[str, object]) -> Iterator[dict[str, object]]:
    """Those of a file that have figures, wherever they are."""
    yield found
    for each in found.values():
        if isinstance(each, dict): yield from tables(each)


# **** training ****

def trained(gpus: str, layout: Layout, config=LLAMA, **settings) -> Plan:
    return plan(config, layout, cluster(gpus), Training(**{"batch": 16, "microbatch": 1, **settings}))


def test_mfu_by_hand():
    made = trained("8xH100", Layout(dp=8))
    used = LLAMA.parameters - LLAMA.vocab_size * LLAMA.hidden_size
    operations = 16 * 8192 * (6 * used + 12 * 32 * 32 * 128 * 8192)
    assert made.mfu == pytest.approx(operations / made.step_s / 8 / device("h100").peak_flops_per_s)
    assert 0.3 < made.mfu < 0.6


def test_kernels_and_what_is_exposed_are_the_step():
    for layout, settings in ((Layout(dp=8), {}), (Layout(dp=8), {"zero": 1}), (Layout(tp=8, sp=True), {}),
                             (Layout(tp=2, dp=4, sp=True), {"zero": 2})):
        made = trained("8xH100", layout, **settings)
        whole = made.microbatches * made.kernels.total + made.exposed_s + made.optimizer_s
        assert made.step_s == pytest.approx(whole, rel=1e-9)


def test_gradients_and_weights_of_a_step():
    gather, reduce = trained("8xH100", Layout(dp=8), microbatch=2).uses
    assert (gather.count, reduce.count) == (2 * 32, 32)
    assert gather.collective.nbytes == pytest.approx(2 * LLAMA.parameters / 32)
    assert reduce.collective.nbytes == pytest.approx(4 * LLAMA.parameters / 32)
    (all_reduce,) = trained("8xH100", Layout(dp=8), zero=0).uses
    assert (all_reduce.collective.kind, all_reduce.count) == ("all_reduce", 32)


def test_what_hides_a_collective_loses_sms_to_it():
    gpu = device("h100")
    assert beside(gpu, 10.0, 2.0) == pytest.approx(10 + 2 * 16 / 132)
    assert beside(gpu, 1.0, 2.0) == pytest.approx(max(2.0, 1 + 2 * 16 / 132))


def test_a_slow_network_is_exposed():
    fast, slow = (plan(LLAMA, Layout(dp=64), cluster("8xH100", 8, net), Training(64, microbatch=1))
                  for net in ("400G", "25G"))
    assert slow.step_s > 2 * fast.step_s
    assert slow.exposed_s > 0.5 * slow.step_s


def test_recomputation_costs_a_forward_pass():
    none, full = (trained("8xH100", Layout(dp=8), recompute=what) for what in ("none", "full"))
    assert full.kernels.matmul == pytest.approx(4 / 3 * none.kernels.matmul, rel=0.06)


def test_pipelines_wait_and_chunks_wait_less():
    one = trained("8xH100", Layout(tp=2, pp=4, sp=True), batch=8)
    more = trained("8xH100", Layout(tp=2, pp=4, sp=True), batch=8, schedule="interleaved", virtual=4)
    many = trained("8xH100", Layout(tp=2, pp=4, sp=True), batch=64)
    assert one.bubble == 3 / 11
    assert more.tokens_per_s > one.tokens_per_s
    assert many.tokens_per_s > one.tokens_per_s


def test_less_power_is_a_lower_clock():
    where = cluster("8xH100")
    slow = replace(where, device=where.device.with_power(500))
    fast, less = (plan(LLAMA, Layout(dp=8), each, Training(16)) for each in (where, slow))
    assert 1.1 < less.step_s / fast.step_s < 1.25


# **** search ****

def test_the_best_layout_is_the_fastest_that_fits():
    found = search(LARGE, cluster("8xH100"), Inference(8), Choice(pp=1))
    assert found.plans[0].layout == Layout(tp=8)
    rates = [made.tokens_per_s for made in found.plans]
    assert rates == sorted(rates, reverse=True)
    assert all(made.memory.fits for made in found.plans)
    assert {each.layout for each in found.refused} == {Layout(dp=8)}
    assert all("too much" in each.why and each.over > 0 for each in found.refused)


def test_what_is_decided_stays():
    found = search(LLAMA, cluster("8xH100"), Training(16), Choice(tp=2, recompute="full", microbatch=1))
    assert {(made.layout.tp, made.work.recompute, made.work.microbatch) for made in found.plans} == \
        {(2, "full", 1)}
    assert {(made.layout.pp, made.work.zero) for made in found.plans} >= {(1, 1), (1, 3), (4, 0)}
    assert all(made.layout.sp for made in found.plans)


def test_reasons_of_what_cannot_be():
    found = search(EXPERTS, cluster("8xH100"), Inference(4), Choice(tp=1, pp=1))
    why = {str(each.layout): each.why for each in found.refused}
    assert why["dp 8"] == "batch 4 over dp 8"


def test_text_and_plain_data():
    found = search(LARGE, cluster("8xH100"), Inference(8), Choice(pp=1))
    said = text("llama-3.1-70b", found, top=2)
    for words in ("llama-3.1-70b on 8 x H100 SXM (NVLink 4, NVSwitch)",
                  "all times are modelled, not measured", "memory of a GPU", "collectives, exposed",
                  "layouts, the best first", "not possible"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 110
    plain = json.loads(json.dumps(data("llama-3.1-70b", found, 2)))
    assert plain["plan"]["layout"] == {"tp": 8, "pp": 1, "dp": 1, "ep": 1, "sp": False}
    assert len(plain["layouts"]) == 2
    (use, _) = plain["plan"]["collectives"]
    each = use["alpha_s"] + use["wire_bytes"] / use["bytes_per_s"]
    assert use["seconds"] == pytest.approx(use["calls"] * each)
