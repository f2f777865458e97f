"""Adapters for tests: PEFT writes them for a random model, and its greedy tokens are what is right.

Protocol: `adapter(model, directory, seed, …)` saves an adapter with random A and B of a LoraConfig, and
`greedy(model, prompts, adapter)` are the tokens that transformers and PEFT choose, in float32.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from tinygrad_nv import LLM, LoRARequest, SamplingParams

Prompts = Sequence[Sequence[int]]


def adapter(model: Path, directory: Path, seed: int, dtype: torch.dtype = torch.float32,
            **config: Any) -> Path:
    """An adapter that changes tokens: A and B are random."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 8, **config}))
    random = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
    made.save_pretrained(directory)
    return directory


def greedy(model: Path, prompts: Prompts, found: Path | None, count: int) -> list[tuple[int, ...]]:
    """The tokens that follow each prompt, by transformers, with an adapter or without."""
    made: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if found is not None: made = peft.PeftModel.from_pretrained(made, found)
    made.eval()
    out = []
    for prompt in prompts:
        with torch.no_grad():
            ids = made.generate(input_ids=torch.tensor([list(prompt)]), max_new_tokens=count,
                                do_sample=False, eos_token_id=None, pad_token_id=0)
        out.append(tuple(ids[0, len(prompt):].tolist()))
    return out


def prompts(count: int, seed: int, least: int = 1, most: int = 40, vocab: int = 300) -> list[list[int]]:
    """Random ones."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(least, most, (count,), generator=random).tolist()
    return [torch.randint(5, vocab, (length,), generator=random).tolist() for length in lengths]


def answers(llm: LLM, given: Prompts, loras: Sequence[LoRARequest | None], count: int,
            **params: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of prompts together."""
    how = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params)
    made = llm.generate([{"prompt_token_ids": [*each]} for each in given], how, use_tqdm=False,
                        lora_request=list(loras))
    for each in made: assert each.outputs[0].error is None, each.outputs[0].error
    return [tuple(each.token_ids) for each in made]
