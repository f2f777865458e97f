"""A model that several ranks have, beside one rank's: what test_parallel.py runs as a program of its own,
since ranks share the cores of their process."""
from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import DistError, RequestError

PROMPTS = ["Once upon a time", "The little dog", "Lily and Tom went to"]
HOW = (SamplingParams(temperature=0, max_tokens=24, logprobs=2),
       SamplingParams(temperature=0.8, seed=3, max_tokens=24, top_p=0.9, top_k=20),
       SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3))

# of one batch: what samplers do of a part of the vocabulary, beside one that needs the order of all of it
MIXED = (SamplingParams(temperature=0, max_tokens=8, logprobs=1),
         SamplingParams(temperature=0.9, min_p=0.05, seed=4, max_tokens=8, prompt_logprobs=0),
         SamplingParams(temperature=0, presence_penalty=1.5, logit_bias={262: 4.0, 15: -100.0}, max_tokens=8),
         SamplingParams(frequency_penalty=1.2, n=2, seed=5, max_tokens=8, logprobs=0),
         SamplingParams(temperature=1.1, seed=6, max_tokens=12,
                        structured_outputs=StructuredOutputsParams(choice=(" a cat", " the dog", " an owl"))),
         SamplingParams(top_k=7, seed=8, max_tokens=6), SamplingParams(seed=9, max_tokens=8))


def answers(directory: str, **more: object) -> list[object]:
    """Tokens of all prompts, in batches and with prefix hits; then log probabilities of all tokens."""
    made, found = list[object](), list[float]()
    with LLM(directory, max_num_seqs=2, max_num_batched_tokens=32, **more) as llm:   # type: ignore[arg-type]
        for how in HOW:
            out = llm.generate(PROMPTS, how, use_tqdm=False)
            made += [list(each.outputs[0].token_ids) for each in out]
            found += [at[token].logprob for each in out
                      for token, at in zip(each.outputs[0].token_ids, each.outputs[0].logprobs or (),
                                           strict=False)]
        prompts = [PROMPTS[i % 3] for i in range(len(MIXED))]
        for each in llm.generate(prompts, list(MIXED), use_tqdm=False):
            made += [list(one.token_ids) for one in each.outputs]
            scored = [(each.prompt_token_ids, each.prompt_logprobs),
                      *((one.token_ids, one.logprobs) for one in each.outputs)]
            found += [at[token].logprob for ids, places in scored
                      for token, at in zip(ids, places or (), strict=False) if at is not None]
        # again: the prefix cache has them
        out = llm.generate([each * 8 for each in PROMPTS], HOW[0], use_tqdm=False)
        made += [list(each.outputs[0].token_ids) for each in out]
    return [*made, found]


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
    print(json.dumps(answers(sys.argv[1], **json.loads(sys.argv[2]))))


if __name__ == "__main__": main()
