"""Log probabilities of prompts: those of transformers, whatever else runs."""
from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.request_output import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2)
TALE = "Once upon a time a little fox ran to the river. The bird sang. "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Chunks of 32 tokens, 11 pages: long prompts are cut, and sequences preempted; drafts in between."""
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=160, max_num_seqs=8, num_pages=11,
             max_num_batched_tokens=32, speculative="ngram:3") as made: yield made


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module: return AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL).eval()


def check(output: RequestOutput, theirs: torch.nn.Module, count: int = 2) -> None:
    """Against a float64 log-softmax of transformers' float32 logits."""
    ids = list(output.prompt_token_ids)
    with torch.no_grad(): expected = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for found, row, token in zip(output.prompt_logprobs[1:], expected, ids[1:], strict=False):
        assert next(iter(found)) == token
        assert found[token].logprob == pytest.approx(row[token], abs=2e-4)
        near = (row > row[token] + 2e-4).sum(), (row > row[token] - 2e-4).sum()     # by float32's noise
        assert near[0] < found[token].rank <= max(near[1], 1)
        likeliest = np.argsort(-row)[:count].tolist()
        assert set(found) == {token, *likeliest}
        assert [found[each].rank for each in likeliest] == list(range(1, count + 1))
        for each, one in found.items(): assert one.logprob == pytest.approx(row[each], abs=2e-4)


def test_they_are_transformers(llm: LLM, theirs: torch.nn.Module):
    """A prompt of several chunks, and again with its pages in the prefix cache; a prompt of one token."""
    for _ in range(2):
        [made] = llm.generate(TALE * 4, GREEDY)
        assert len(made.prompt_token_ids) > 64
        assert made.num_cached_tokens == 0      # logits of cached tokens are not there
        check(made, theirs)
        assert "".join(each[token].decoded_token for each, token in zip(
            made.prompt_logprobs[1:], made.prompt_token_ids[1:], strict=True)).strip() == (TALE * 4).strip()
    [made] = llm.generate([[5]], replace(GREEDY, prompt_logprobs=0))
    assert made.prompt_logprobs == [None]
    [made] = llm.generate(TALE, replace(GREEDY, prompt_logprobs=0, n=3, logprobs=1))
    check(made, theirs, 0)
    assert [len(each.logprobs) for each in made.outputs] == [6, 6, 6]


def test_no_token_changes_beside_them(llm: LLM, theirs: torch.nn.Module):
    """More prompts than pages hold, half of them with log probabilities; some prompts are prefixes of
    others."""
    prompts = [(TALE * 3)[:20 * i + 15] for i in range(8)]
    alone = [llm.generate(each, replace(GREEDY, prompt_logprobs=None, max_tokens=40))[0] for each in prompts]
    before = llm.core.stats()
    params = [replace(GREEDY, max_tokens=40, prompt_logprobs=2 if i % 2 else None) for i in range(8)]
    for i, (one, made) in enumerate(zip(alone, llm.generate(prompts, params), strict=True)):
        assert made.token_ids == one.token_ids
        if i % 2: check(made, theirs)
        else: assert made.prompt_logprobs is None
    assert llm.core.stats().preempted > before.preempted
    assert llm.core.stats().drafted > before.drafted


def test_they_come_with_the_first_delta(llm: LLM, theirs: torch.nn.Module):
    """Of a stream, and in a loop."""
    [whole] = llm.generate(TALE, GREEDY)
    first, *others = llm.stream(TALE, GREEDY)
    assert [each.logprob for each in first.prompt_logprobs] == pytest.approx(
        [each[token].logprob for each, token in zip(whole.prompt_logprobs[1:], whole.prompt_token_ids[1:],
                                                    strict=True)], abs=1e-5)
    assert not any(each.prompt_logprobs for each in others)

    async def run() -> list[int]:
        engine = AsyncEngine(llm)
        await engine.start()
        return [len(delta.prompt_logprobs) async for delta in engine.generate(TALE, GREEDY)]
    found = asyncio.run(run())
    assert sum(found) == found[0] == len(whole.prompt_token_ids) - 1
