"""Trained models as Hugging Face directories: what was saved is loaded bit for bit, also by transformers."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.models.test_parity import our_logits, their_logits
from tests.support.models.families import CASES
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory import read_part
from tinygrad_nv.train.export import save_pretrained

IDS = [int(i) for i in np.random.default_rng(0).integers(3, 320, 24)]


def loaded(directory: Path, dtype: Any = dtypes.float32) -> Llama:
    model = Llama(read_config(directory), dtype, "CPU")
    weights.load(model, directory)
    return model


def bits(model: Llama) -> dict[str, bytes]:
    """Of all tensors, as the network has them."""
    every = {name: slot.tensor for name, slot in weights.slots(model).items()}
    return {name: bytes(read_part(each, 0, int(each.nbytes()))) for name, each in every.items()}


def state(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What transformers loads, without a warning of names that it does not know or find."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return {**model.state_dict()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_both_load_the_bits_that_were_saved(hf_model: Callable[[str], Path], tmp_path: Path, case: str):
    """Equal tensors, so equal logits."""
    source = hf_model(case)
    model = loaded(source)
    save_pretrained(model, tmp_path, source)
    assert bits(loaded(tmp_path)) == bits(model)
    found, wanted = state(tmp_path), state(source)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items(): assert torch.equal(found[name], tensor), name
    theirs, ours = (AutoConfig.from_pretrained(each).to_dict() for each in (source, tmp_path))
    assert {**ours, "_name_or_path": ""} == {**theirs, "_name_or_path": ""}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["llama", "gpt-oss", "llama4", "mixtral", "deepseek-v3", "phi3"])
def test_what_was_trained_is_what_transformers_computes(hf_model: Callable[[str], Path], tmp_path: Path,
                                                        case: str):
    """Weights that are not those of the source. max |logit − HF| ≤ 2e-4 · max |logit|, as of any model."""
    model = loaded(hf_model(case))
    for tensor in weights.list_loaded(model): tensor.assign((tensor * 1.0625
                                                             + 0.001).cast(tensor.dtype)).realize()
    save_pretrained(model, tmp_path, hf_model(case))
    made = model(Tensor([IDS], dtype=dtypes.int32, device="CPU")).numpy()
    assert np.array_equal(our_logits(tmp_path, IDS), made)
    expected = their_logits(tmp_path, IDS)
    assert np.abs(made - expected).max() <= 2e-4 * np.abs(expected).max()
    assert np.abs(made - their_logits(hf_model(case), IDS)).max() > 1e-2 * np.abs(expected).max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["llama", "gpt-oss", "deepseek-v3", "llama4"])
def test_as_bfloat16(hf_model: Callable[[str], Path], tmp_path: Path, case: str):
    """Rounded to nearest even, as torch does; what a model keeps in float32 is stored so."""
    source = hf_model(case)
    save_pretrained(loaded(source), tmp_path / "a", source, dtypes.bfloat16)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"
    found, wanted = state(tmp_path / "a", torch.bfloat16), state(source, torch.bfloat16)
    # some routers stay float32 in transformers, and are read as they are stored
    for name, tensor in wanted.items():
        rounded = tensor if "e_score" in name else tensor.bfloat16()
        assert torch.equal(found[name], rounded.to(found[name].dtype)), name
    model = loaded(tmp_path / "a", dtypes.bfloat16)
    assert bits(model) == bits(loaded(source, dtypes.bfloat16))
    save_pretrained(model, tmp_path / "b", source)
    assert bits(loaded(tmp_path / "b", dtypes.bfloat16)) == bits(model)


def test_shards_and_files_beside_them(hf_model: Callable[[str], Path], tmp_path: Path):
    """A model is saved over another: no weights of that are left, and other files stay."""
    source = tmp_path / "source"
    shutil.copytree(hf_model("llama"), source)
    for name in ("tokenizer.json", "chat_template.jinja"): (source / name).write_text(f"of {name}")
    (source / "training.json").write_text("not the tokenizer's")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text()) | {"eos_token_id": [1, 2], "bos_token_id": 0}
    (source / "config.json").write_text(json.dumps(config))
    model, out = loaded(source), tmp_path / "out" / "deep"
    save_pretrained(model, out, source, shard_bytes=100_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 2
    assert all(file.stat().st_size < 110_000 for file in files)
    assert index["metadata"]["total_size"] == sum(int(each.nbytes()) for each in weights.list_loaded(model))
    assert bits(loaded(out)) == bits(model)
    assert torch.equal(state(out)["model.norm.weight"], state(source)["model.norm.weight"])
    (out / "log.txt").write_text("kept")
    save_pretrained(model, out, out)
    assert sorted(each.name for each in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "log.txt", "model.safetensors",
        "tokenizer.json"]
    assert (out / "tokenizer.json").read_text() == "of tokenizer.json"
    assert bits(loaded(out)) == bits(model)
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 2]


def test_the_language_model_of_one_that_reads_images(hf_model: Callable[[str], Path], tmp_path: Path):
    """Is saved as a causal language model."""
    source, text = hf_model("gemma3"), json.loads((hf_model("gemma3") / "config.json").read_text())
    model = loaded(source)
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
             "dtype": "float32"}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    save_pretrained(model, tmp_path / "out", tmp_path / "whole")
    found, wanted = state(tmp_path / "out"), state(source)
    for name, tensor in wanted.items(): assert torch.equal(found[name], tensor), name
