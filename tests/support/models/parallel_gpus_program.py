"""The model in the box on two emulated GPUs, a rank for each, and then on one: what test_parallel.py
starts twice, with one cache directory."""
from __future__ import annotations

import sys
import time
from pathlib import Path

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.runtime.programs import Compilations

PROMPTS = ["Once upon a time", "The little dog"]


def tokens(ranks: int) -> list[list[int]]:
    """Greedy ones."""
    counted = Compilations()
    with LLM(sys.argv[1], device="EMU", dtype="bfloat16", max_num_seqs=2, max_model_len=64,
             **{sys.argv[3]: ranks}) as llm:     # type: ignore[arg-type]
        made = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        traced = Compilations().steps - counted.steps
        # steps that receive from another stage are not kept
        if sys.argv[3] == "tensor_parallel_size":
            assert (traced > 0) == (sys.argv[2] == "first"), f"{traced} steps are traced"
        begun = time.monotonic()
    took = time.monotonic() - begun
    assert took < 4, f"the ranks end after {took:.2f} s"
    return [list(each.outputs[0].token_ids) for each in made]


if __name__ == "__main__":
    assert Path(sys.argv[1]).is_dir()
    both, alone = tokens(2), tokens(1)
    assert both == alone, (both, alone)
    print("all right")
