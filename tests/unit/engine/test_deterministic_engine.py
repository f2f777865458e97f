"""NV_DETERMINISTIC=1: a request has the same tokens and log probabilities alone and among others, to the last
bit: greedy and sampled, with prompts that are cut into chunks and prefixes that are shared."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.numerics.policy import deterministic

PROMPTS = [[3, 7, 9, 11, 40, 5, 6, 7, 8], [3, 7, 9], list(range(2, 60)), [3, 7, 9, 11, 40, 5, 6, 7, 9]]
PARAMS = (SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True),
          SamplingParams(max_tokens=6, temperature=1.0, seed=5, top_p=0.9, logprobs=3, ignore_eos=True))


@pytest.fixture
def llm(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    with LLM(tiny, device="CPU", max_model_len=96, max_num_seqs=4, num_pages=64,
             max_num_batched_tokens=32) as made:
        yield made


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[object]:
    """Tokens, and log probabilities as they are."""
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs)
            for each in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]


def test_alone_and_among_others(llm: LLM):
    for params in PARAMS:
        together = answers(llm, PROMPTS, params)
        assert [answers(llm, [prompt], params)[0] for prompt in PROMPTS] == together
        assert answers(llm, PROMPTS[1:3], params) == together[1:3]


def test_a_block_of_this_thread_would_not_reach_the_engine(tiny: Path):
    with deterministic(), pytest.raises(ConfigError, match=r"set os\.environ") as caught:
        LLM(tiny, device="CPU")
    assert "steps run in a thread of their own" in str(caught.value)
