"""A model that several ranks have, beside one rank's: what test_parallel.py runs as a program of its own,
since ranks share the cores of their process."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import DistError, RequestError

PROMPTS = ["Once upon a time", "The little dog", "Lily and Tom went to"]
HOW = (SamplingParams(temperature=0, max_tokens=24, logprobs=2),
       SamplingParams(temperature=0.8, seed=3, max_tokens=24, top_p=0.9, top_k=20),
       SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3),
       SamplingParams(temperature=0, max_tokens=8,
                      structured_outputs=StructuredOutputsParams(regex=" (Tom|Lily) (ran|sat)[.]")))
# all but the first find their beginning in the prefix cache; two of them need more pages than there are
LONG = [PROMPTS[0] * 8 + each * 6 for each in PROMPTS]
FULL = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
PAGES, LENGTH = 7, 96


class Answer(StrEnum):
    """A type that other ranks do not have."""
    CAT, DOG, OWL = " a cat", " the dog", " an owl"


# of one batch: what samplers do of a part of the vocabulary, beside one that needs the order of all of it
MIXED = (SamplingParams(temperature=0, max_tokens=8, logprobs=1),
         SamplingParams(temperature=0.9, min_p=0.05, seed=4, max_tokens=8, prompt_logprobs=0),
         SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={262: 4.0, 15: -100.0}, max_tokens=8),
         SamplingParams(frequency_penalty=1.2, n=2, seed=5, max_tokens=8, logprobs=0),
         SamplingParams(temperature=1.1, seed=6, max_tokens=12,
                        structured_outputs=StructuredOutputsParams(choice=tuple(Answer))),
         SamplingParams(top_k=7, seed=8, max_tokens=6), SamplingParams(seed=9, max_tokens=8))


Scored = tuple[list[int], list[int], list[float]]


@dataclass(frozen=True)
class Answers:
    """Tokens by prompt and settings; of those with log probabilities prompt, tokens and these; and how often
    sequences were preempted, and tokens found in the prefix cache."""
    tokens: list[list[int]]
    scored: list[Scored]
    preempted: int
    hits: int


def answers(directory: str, **more: object) -> Answers:
    """Of all prompts, in batches of two, with few pages."""
    made, scored, mixed = list[list[int]](), list[Scored](), [PROMPTS[i % 3] for i in range(len(MIXED))]

    def score(before: Sequence[int], ids: Sequence[int], places: Any) -> None:
        scored.append((list(before), list(ids), [at[token].logprob for token, at in
                                                 zip(ids, places, strict=True)]))
    with LLM(directory, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=LENGTH, num_pages=PAGES,
             **more) as llm:   # type: ignore[arg-type]
        for how, prompts in (*((how, PROMPTS) for how in HOW), (list(MIXED), mixed), (FULL, LONG)):
            for each in llm.generate(prompts, how, use_tqdm=False):
                prompt = each.prompt_token_ids or ()
                if each.prompt_logprobs: score(prompt[:1], prompt[1:], each.prompt_logprobs[1:])
                for one in each.outputs:
                    made.append(list(one.token_ids))
                    if one.logprobs: score(prompt, one.token_ids, one.logprobs)
        stats = llm.core.stats()
    return Answers(made, scored, stats.preempted, stats.prefix_hits)


def refused(directory: str, **more: object) -> None:
    """A model without room for its pages: its ranks end, and what this process had is there again."""
    before = os.sched_getaffinity(0), dict(os.environ)
    with suppress(RequestError):
        LLM(directory, num_pages=1, **more)     # type: ignore[arg-type]
        raise AssertionError("1 page suffices")
    assert (os.sched_getaffinity(0), dict(os.environ)) == before


def failing(directory: str, rank: int) -> None:
    """A second model beside the first, and a step that fails on one rank alone."""
    with LLM(directory, max_num_seqs=4, max_num_batched_tokens=64, tensor_parallel_size=2) as llm:
        try: LLM(directory, tensor_parallel_size=2)
        except DistError as error: print("second:", error.found, flush=True)
        fails = partial(int, "boom")
        assert isinstance(llm.runner, ModelRunner)
        assert llm.runner.followers is not None
        if rank: llm.runner.followers.tell("defer", fails)
        else: llm.runner.defer(fails)   # type: ignore[arg-type]
        try: llm.generate(PROMPTS, HOW[0], use_tqdm=False)
        except DistError as error: print("error:", error.found, flush=True)


def main() -> None:
    if sys.argv[2].isdigit(): return failing(sys.argv[1], int(sys.argv[2]))
    refused(sys.argv[1], **json.loads(sys.argv[2]))
    print(json.dumps(asdict(answers(sys.argv[1], **json.loads(sys.argv[2])))))


if __name__ == "__main__": main()
