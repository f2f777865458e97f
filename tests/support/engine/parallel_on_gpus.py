"""A rank 0 of test_runner_emu.py: a model directory, and the number of tensor parallel ranks."""
from __future__ import annotations

import json
import sys

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

# greedy; what needs no whole row, with log probabilities; and beside one that does
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
BATCHES = ((GREEDY, GREEDY),
           (SamplingParams(seed=3, min_p=0.01, max_tokens=3, ignore_eos=True, logprobs=1),
            SamplingParams(seed=4, presence_penalty=1.0, logit_bias={7: 1.0, 290: 2.0}, max_tokens=3,
                           ignore_eos=True, allowed_token_ids=tuple(range(3, 299, 2)))),
           (SamplingParams(seed=5, top_p=0.9, max_tokens=2, ignore_eos=True), GREEDY))


def main() -> None:
    with LLM(sys.argv[1], device="EMU", tensor_parallel_size=int(sys.argv[2]), max_num_seqs=2,
             max_num_batched_tokens=16, max_model_len=64, num_pages=16) as llm:
        made = list[list[int]]()
        for params in BATCHES:
            out = llm.generate([[5, 6, 7, 8], [9, 3]], list(params), use_tqdm=False)
            made += [list(each.outputs[0].token_ids) for each in out]
            for each in out:
                for token, at in zip(each.outputs[0].token_ids, each.outputs[0].logprobs or (), strict=False):
                    assert at[token].logprob <= 0, at
        print(json.dumps(made))


if __name__ == "__main__": main()
