"""Families with experts, alternating windows, sinks, chunks or layers without rope, served together: few
pages, so that requests are preempted, chunks of prompts, shared prefixes. Each gets the tokens that it gets
alone."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RANDOM = np.random.default_rng(5)
PREFIX = [int(i) for i in RANDOM.integers(3, 320, 40)]
PROMPTS = [[*PREFIX[:shared], *(int(i) for i in RANDOM.integers(3, 320, own))]
           for shared, own in ((0, 5), (40, 3), (40, 30), (0, 61), (32, 1), (0, 17))]


SLOW = [pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma3", "mixtral", "smollm3", "phi4", "deepseek-v2", "deepseek-v2-lite",
                     "deepseek-v3-halves", "gpt-oss", "llama4")]


@pytest.mark.parametrize("case", ["qwen2-moe", "deepseek-v3", *SLOW])
def test_together_as_alone(hf_model: Callable[[str], Path], case: str):
    """Twice, so that the second time prefixes are found."""
    def opened(**more: Any) -> LLM: return LLM(hf_model(case), device="CPU", max_model_len=96, **more)
    one = opened(max_num_seqs=1, enable_prefix_caching=False)
    alone = [list(one.complete(prompt, GREEDY).token_ids) for prompt in PROMPTS]
    one.close()
    many = opened(max_num_seqs=4, num_pages=14, max_num_batched_tokens=32)
    for _ in range(2): assert [list(each.token_ids) for each in many.generate(PROMPTS, GREEDY)] == alone
    assert many.core.stats().preempted > 0
    many.close()
