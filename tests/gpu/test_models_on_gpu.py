"""Whole models on a GPU: the tokens of transformers in float32, from the directory, from a bundle that was
compiled for the GPU's architecture, quantised and with a cache in FP8; and steps of training beside those of
a model on the host."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.models import tales
from tinygrad_nv.runtime.cuda.driver import CUDADriver

pytestmark = pytest.mark.gpu
MODEL = Path(tales.__file__).parent
TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = ("Once upon a time", "The dog was sad because", "Lily and her mum went to the park. " * 20)
SIZES = {"max_num_seqs": 8, "max_model_len": 512}
ARCHS = ("sm_80", "sm_89", "sm_90a")    # that bundles are made for


def answers(model: Path, **options: object) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch, and of the last alone."""
    with LLM(model, device="CUDA", **options) as llm:
        made = llm.generate(list(PROMPTS), GREEDY, use_tqdm=False)
        made += llm.generate([PROMPTS[-1]], GREEDY, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in made]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """transformers' greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    found = []
    for prompt in (*PROMPTS, PROMPTS[-1]):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            all_ids = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        found.append(all_ids[0, ids.shape[1]:].tolist())
    return found


def test_the_model_in_the_box_has_the_tokens_of_transformers(wanted: list[list[int]]):
    assert answers(MODEL, dtype="float32", **SIZES) == wanted


def test_a_bundle_for_the_gpu_has_them_too(device: CUDADriver, wanted: list[list[int]], tmp_path: Path):
    [arch] = [each for each in reversed(ARCHS) if each.rstrip("a") <= device.properties.arch.rstrip("a")][:1]
    bundle = tmp_path / "tales.tnv"
    subprocess.run([sys.executable, "-m", "tinygrad_nv", "compile", MODEL, "-o", bundle, "--arch", arch,
                    "--max-num-seqs", "8", "--max-model-len", "512", "--dtype", "float32"], check=True)
    assert answers(bundle) == wanted


@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "int8"},
                                     {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}], ids=str)
def test_models_of_fewer_bits_begin_as_the_model_does(options: dict[str, str], wanted: list[list[int]]):
    """Rounding may turn a choice that is close, not the first ones of the short prompts."""
    for found, each in list(zip(answers(MODEL, **options, **SIZES), wanted, strict=True))[:2]:
        assert found[:4] == each[:4]
