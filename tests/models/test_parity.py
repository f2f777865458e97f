"""The same numbers and the same words as transformers, for random models of every family."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tests.support.models.families import CASES, SLOW
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

PROMPT = [int(i) for i in np.random.default_rng(0).integers(3, 320, 150)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def theirs(directory: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The reference. It knows no end token, so that it neither stops at one nor forbids it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def their_logits(directory: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    with torch.no_grad(): return theirs(directory, dtype)(torch.tensor([ids])).logits.float().numpy()


def our_logits(directory: Path, ids: list[int], dtype=dtypes.float32) -> np.ndarray:
    model = Llama(read_config(directory), dtype, "CPU")
    weights.load(model, directory)
    return model(Tensor([ids], dtype=dtypes.int32, device="CPU")).float().numpy()


def require_same_answers(quantised: Path, plain: Path) -> None:
    """Asserts that a quantised directory gives the logits and the 32 greedy tokens of its dequantised
    weights, and reads fewer bytes."""
    wanted = their_logits(plain, PROMPT[:60])
    assert np.abs(our_logits(quantised, PROMPT[:60]) - wanted).max() <= 2e-4 * np.abs(wanted).max()
    made = theirs(plain).generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False)
    llm = LLM(quantised, device="CPU", max_num_seqs=2, max_num_batched_tokens=64)
    assert list(llm.complete(PROMPT, GREEDY).token_ids) == made[0, len(PROMPT):].tolist()
    assert llm.streamed_bytes < LLM(plain, device="CPU", max_num_seqs=2).streamed_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_float32_logits_agree(hf_model: Callable[[str], Path], case: str):
    """max |logit − HF| ≤ 2e-4 · max |logit|; measured 3e-7 to 2e-6."""
    expected = their_logits(hf_model(case), PROMPT[:60])
    assert np.abs(our_logits(hf_model(case), PROMPT[:60]) - expected).max() <= 2e-4 * np.abs(expected).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else [])
                                  for case in CASES])
def test_32_greedy_tokens_are_identical(hf_model: Callable[[str], Path], case: str):
    """Through prefill in chunks, the last of which fills no group, and decode steps."""
    assert len(PROMPT) % 64 % GROUP, "the last group is padded"
    made = theirs(hf_model(case)).generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False)
    llm = LLM(hf_model(case), device="CPU", max_num_seqs=2, max_num_batched_tokens=64)
    assert list(llm.complete(PROMPT, GREEDY).token_ids) == made[0, len(PROMPT):].tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [
    case if case in ("llama", "qwen3", "gemma", "gemma2", "olmo2", "granite", "qwen2-moe")
    else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(hf_model: Callable[[str], Path], case: str):
    """Bound: 1.5 × the root mean square error of transformers' own bfloat16 run, both against its float32
    run."""
    exact = their_logits(hf_model(case), PROMPT[:60])
    def error(logits: np.ndarray) -> float: return float(np.sqrt(np.square(logits - exact).mean()))
    own = error(their_logits(hf_model(case), PROMPT[:60], torch.bfloat16))
    assert error(our_logits(hf_model(case), PROMPT[:60], dtypes.bfloat16)) <= 1.5 * own


def test_float16_is_as_close_to_float32_as_transformers_float16(hf_model: Callable[[str], Path]):
    """Bound as for bfloat16."""
    exact = their_logits(hf_model("llama"), PROMPT[:60])
    def error(logits: np.ndarray) -> float: return float(np.sqrt(np.square(logits - exact).mean()))
    own = error(their_logits(hf_model("llama"), PROMPT[:60], torch.float16))
    assert error(our_logits(hf_model("llama"), PROMPT[:60], dtypes.float16)) <= 1.5 * own


def test_a_context_filled_to_the_brim_ends_with_length(hf_model: Callable[[str], Path]):
    llm = LLM(hf_model("mistral"), device="CPU", max_model_len=100)
    done = llm.complete(PROMPT[:90], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert (len(done.token_ids), done.finish_reason) == (10, "length")
    made = theirs(hf_model("mistral")).generate(torch.tensor([PROMPT[:90]]), max_new_tokens=10,
                                                do_sample=False)
    assert list(done.token_ids) == made[0, 90:].tolist()
