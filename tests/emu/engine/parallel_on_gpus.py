"""A rank 0 of test_parallel_on_gpus.py: a model directory, and the number of tensor parallel ranks."""
from __future__ import annotations

import json
import sys

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams


def main() -> None:
    with LLM(sys.argv[1], device="EMU", tensor_parallel_size=int(sys.argv[2]), max_num_seqs=2,
             max_num_batched_tokens=16, max_model_len=64, num_pages=16) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        out = llm.generate([[5, 6, 7, 8], [9, 3]], params, use_tqdm=False)
        print(json.dumps([list(each.outputs[0].token_ids) for each in out]))


if __name__ == "__main__": main()
