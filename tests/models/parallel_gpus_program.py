"""The model in the box on two emulated GPUs, a rank for each, beside one: what test_parallel_gpus.py runs."""
from __future__ import annotations

import sys
from pathlib import Path

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

PROMPTS = ["Once upon a time", "The little dog"]


def tokens(ranks: int) -> list[list[int]]:
    """Greedy ones."""
    with LLM(sys.argv[1], device="EMU", dtype="bfloat16", max_num_seqs=2, max_model_len=64,
             tensor_parallel_size=ranks) as llm:
        made = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made]


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    alone, both = tokens(1), tokens(2)
    assert both == alone, (both, alone)
    print("all right")
