"""A request interrupted at whatever point of its first run leaves nothing behind in the next ones."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tinygrad import Tensor

from tinygrad_nv.engine import decoder
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

PROMPT = list(range(3, 30))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.1)


@pytest.mark.parametrize("at", range(5))
def test_an_interrupt_while_a_step_is_captured(hf_model: Callable[[str], Path], at: int, monkeypatch):
    """The `at`-th realize of a request raises, after what it should compute has been written down."""
    expected = LLM(hf_model("llama"), device="CPU").complete(PROMPT, GREEDY).token_ids
    llm, realize, calls = LLM(hf_model("llama"), device="CPU"), Tensor.realize, [0]

    def interrupted(*tensors: Tensor, **options) -> Tensor:
        calls[0] += 1
        if calls[0] == at + 1: raise KeyboardInterrupt
        return realize(*tensors, **options)
    monkeypatch.setattr(decoder.Tensor, "realize", interrupted)
    with pytest.raises(KeyboardInterrupt): llm.complete(PROMPT, GREEDY)
    monkeypatch.undo()
    for _ in range(3): assert llm.complete(PROMPT, GREEDY).token_ids == expected
