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

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RANDOM = np.random.default_rng(5)
PREFIX = [int(i) for i in RANDOM.integers(3, 320, 40)]
PROMPTS = [[*PREFIX[:shared], *(int(i) for i in RANDOM.integers(3, 320, own))]
           for shared, own in ((0, 5), (40, 3), (40, 30), (0, 61), (32, 1), (0, 17))]


# pages so few that sequences are preempted, tokens of a page, and the windows of the groups of layers
PLAIN, ALTERNATING = (14, 16, (None,)), (33, 8, (16, None, 16))
CASES = {"qwen2-moe": PLAIN, "deepseek-v3": PLAIN, "mixtral": PLAIN, "qwen3-moe": PLAIN, "olmoe": PLAIN,
         "smollm3": PLAIN, "phi4": PLAIN, "deepseek-v2": PLAIN, "deepseek-v2-lite": PLAIN,
         "deepseek-v3-halves": PLAIN, "gemma2": ALTERNATING, "gemma3": ALTERNATING,
         "gpt-oss": ALTERNATING, "llama4": (33, 8, (16, 16, None)),
         "olmo3": (25, 16, (20, 20, 20, None)),
         "gpt-oss-narrow": (22, 8, (1, None))}
QUICK = ("deepseek-v3",)      # a mixture of experts with latents
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_together_as_alone(hf_model: Callable[[str], Path], case: str, monkeypatch: pytest.MonkeyPatch):
    """Twice, so that the second time prefixes are found. After each step every page is accounted for."""
    monkeypatch.setenv("NV_DEBUG", "1")
    def opened(**more: Any) -> LLM: return LLM(hf_model(case), device="CPU", max_model_len=96, **more)
    one = opened(max_num_seqs=1, enable_prefix_caching=False)
    alone = [list(one.complete(prompt, GREEDY).token_ids) for prompt in PROMPTS]
    one.close()
    pages, size, windows = CASES[case]
    many = opened(max_num_seqs=4, num_pages=pages, page_size=size, max_num_batched_tokens=32)
    assert many.core.pool.windows == windows
    for _ in range(2): assert [list(each.token_ids) for each in many.generate(PROMPTS, GREEDY)] == alone
    stats = many.core.stats()
    assert stats.preempted > 0
    assert stats.prefix_hits > 0
    many.close()
