"""A model that several ranks have, beside one rank's: what test_parallel.py runs as a program of its own,
since ranks share the cores of their process."""
from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

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
PAGES, LENGTH = 7, 96


@dataclass(frozen=True)
class Answers:
    """Tokens by prompt and settings; of those with log probabilities prompt, tokens and these; and how often
    sequences were preempted, and tokens found in the prefix cache."""
    tokens: list[list[int]]
    scored: list[tuple[list[int], list[int], list[float]]]
    preempted: int
    hits: int


def answers(directory: str, **more: object) -> Answers:
    """Of all prompts, in batches of two, with few pages."""
    made, scored = list[list[int]](), list[tuple[list[int], list[int], list[float]]]()
    with LLM(directory, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=LENGTH, num_pages=PAGES,
             **more) as llm:   # type: ignore[arg-type]
        for how, prompts in (*((how, PROMPTS) for how in HOW), (HOW[0], LONG)):
            for each in llm.generate(prompts, how, use_tqdm=False):
                out, prompt = each.outputs[0], each.prompt_token_ids
                made.append(list(out.token_ids))
                if out.logprobs is None or prompt is None: continue
                scored.append((list(prompt), made[-1], [at[token].logprob for token, at in
                                                        zip(out.token_ids, out.logprobs, strict=True)]))
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
