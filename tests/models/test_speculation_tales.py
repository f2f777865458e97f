"""Speculation with the model in the box: exactly the tokens there are without it."""
from __future__ import annotations

import pytest

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured

AGE = {"type": "object", "additionalProperties": False, "required": ["age"],
       "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
ASKED = [("Once upon a time", SamplingParams(max_tokens=40, temperature=0.0)),
         ("A dog", SamplingParams(max_tokens=40, temperature=0.9, seed=3, top_p=0.9, n=2)),
         ("The dog ran. The dog ran. The dog", SamplingParams(max_tokens=40, temperature=0.0)),
         ("A cat", SamplingParams(max_tokens=30, seed=1, repetition_penalty=1.2)),
         ("Once", SamplingParams(max_tokens=40, seed=3, structured_outputs=Structured(json=AGE)))]


def answers(speculative: str | None) -> tuple[list[list[tuple[int, ...]]], EngineStats]:
    """Tokens of all answers, and figures."""
    llm = LLM(DEFAULT_MODEL, max_num_seqs=8, num_pages=128, speculative=speculative)
    try:
        prompts, params = zip(*ASKED, strict=True)
        done = llm.generate(list(prompts), list(params))
        return [[each.token_ids for each in one.outputs] for one in done], llm.core.stats()
    finally: llm.close()


@pytest.fixture(scope="module")
def without() -> tuple[list[list[tuple[int, ...]]], EngineStats]: return answers(None)


def test_copies_change_no_token(without) -> None:
    tokens, stats = answers("ngram:4")
    assert tokens == without[0]
    assert stats.drafted >= stats.accepted > 0


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_is_always_right(without) -> None:
    tokens, stats = answers(f"draft:{DEFAULT_MODEL}:4")
    assert tokens == without[0]
    assert stats.accepted > 100
    # behind an end token, and where the form of an answer forbids what the draft had
    assert stats.drafted - stats.accepted < 20
    assert stats.steps < without[1].steps
