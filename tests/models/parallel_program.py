"""A model that several ranks have, beside one rank's: what test_parallel.py runs as a program of its own,
since ranks share the cores of their process."""
from __future__ import annotations

import json
import sys

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

PROMPTS = ["Once upon a time", "The little dog", "Lily and Tom went to", "In the garden"]
HOW = (SamplingParams(temperature=0, max_tokens=24, logprobs=2),
       SamplingParams(temperature=0.8, seed=3, max_tokens=24, top_p=0.9, top_k=20),
       SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3))


def answers(directory: str, **more: object) -> list[object]:
    """Tokens of all prompts, in batches and with prefix hits; log probabilities of the first."""
    made: list[object] = []
    with LLM(directory, max_num_seqs=4, max_num_batched_tokens=64, **more) as llm:   # type: ignore[arg-type]
        for how in HOW:
            out = llm.generate(PROMPTS, how, use_tqdm=False)
            made += [list(each.outputs[0].token_ids) for each in out]
        # again: the prefix cache has them
        out = llm.generate([each * 8 for each in PROMPTS], HOW[0], use_tqdm=False)
        made += [list(each.outputs[0].token_ids) for each in out]
    return made


def main() -> None:
    print(json.dumps(answers(sys.argv[1], **json.loads(sys.argv[2]))))


if __name__ == "__main__": main()
