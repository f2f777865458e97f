"""Adapters as PEFT directories: PEFT and the engine load what was saved, and PEFT's own are loaded."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoModelForCausalLM

from tests.support.models.lora_case import adapter, answers, greedy, prompts
from tinygrad_nv import LLM, LoRARequest
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import adaptable
from tinygrad_nv.models.peft import read_adapter
from tinygrad_nv.train.export import load_adapter, save_adapter

THEIRS: list[dict[str, Any]] = [
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 5, "target_modules": r".*\.(k_proj|down_proj|up_proj)", "lora_alpha": 3,
     "rank_pattern": {"down_proj": 2, r"layers\.1\..*k_proj": 11}, "alpha_pattern": {"k_proj": 20}},
    {"r": 3, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1], "lora_dropout": 0.25}]
IDS = torch.tensor([[5, 9, 200, 31, 4, 77]])


def shapes(model: Path) -> dict[str, tuple[int, int]]:
    return {each.name: each.shape for each in adaptable(Llama(read_config(model), device="CPU"))}


def with_adapter(model: Path, found: Path, dtype: torch.dtype = torch.float32) -> Any:
    """PEFT's model, which has found all tensors and no others."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    made = peft.PeftModel.from_pretrained(made, found)
    stored = {name for name in made.state_dict() if ".lora_" in name}
    from safetensors import safe_open
    with safe_open(found / "adapter_model.safetensors", "pt") as file:
        assert stored == {name.replace(".weight", ".default.weight") for name in file.keys()}    # noqa: SIM118
    return made.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(): return model(IDS).logits


def random_matrices(model: Path, ranks: dict[str, int], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Of modules that end in a name, with their rank."""
    random = np.random.default_rng(seed)
    def tensor(*shape: int) -> Tensor:
        return Tensor(random.normal(size=shape).astype(np.float32), device="CPU") * 0.3
    return {name: (tensor(rank, inputs), tensor(out, rank)) for name, (out, inputs) in shapes(model).items()
            for last, rank in ranks.items() if name.endswith(last)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", THEIRS, ids=lambda config: f"r{config['r']}")
def test_adapters_of_peft_are_loaded_and_saved_again(tiny: Path, tmp_path: Path, config: dict[str, Any]):
    """The same tensors and the same scales: PEFT's logits, and the engine's matrices, are equal in every
    bit."""
    theirs, ours = adapter(tiny, tmp_path / "theirs", 1, **config), tmp_path / "ours"
    found = load_adapter(theirs, shapes(tiny))
    matrices = {name: (Tensor(a, device="CPU"), Tensor(b, device="CPU"))
                for name, (a, b) in found.matrices.items()}
    assert (found.rank, found.alpha) == (config["r"], config.get("lora_alpha", 8))
    assert found.rslora == config.get("use_rslora", False)
    assert found.dropout == config.get("lora_dropout", 0)
    assert found.base_model == str(tiny)
    for targets in (None, found.target_modules) if "layers_to_transform" not in config else (None,):
        save_adapter(ours, matrices, found.rank, found.alpha, rslora=found.rslora, alphas=found.alphas,
                     target_modules=targets, dropout=found.dropout, base_model=found.base_model)
        assert torch.equal(logits(with_adapter(tiny, ours)), logits(with_adapter(tiny, theirs)))
        read = [read_adapter("a", each, shapes(tiny), 16, dtypes.float32).digest for each in (ours, theirs)]
        assert read[0] == read[1]
        again = load_adapter(ours, shapes(tiny))
        assert again.scales == found.scales
        assert all(np.array_equal(a, b) for name in found.matrices
                   for a, b in zip(found.matrices[name], again.matrices[name], strict=True))


@pytest.mark.parametrize("rslora", [False, True])
def test_what_an_adapter_adds_is_its_scaled_matrices(tiny: Path, tmp_path: Path, rslora: bool):
    """Of several ranks; PEFT's logits and those of a model with W + s · B A: within 1e-5 of the largest."""
    matrices = random_matrices(tiny, {"q_proj": 4, "down_proj": 2}, 3)
    save_adapter(tmp_path, matrices, 4, 6.0, rslora=rslora)
    merged = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    scales = load_adapter(tmp_path, shapes(tiny)).scales
    for name, (a, b) in matrices.items():
        assert scales[name] == (6 / a.shape[0] ** 0.5 if rslora else 6 / a.shape[0])
        merged.get_submodule(name).weight.data += torch.from_numpy(scales[name] * (b.numpy() @ a.numpy()))
    wanted, made = logits(merged), logits(with_adapter(tiny, tmp_path))
    assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    assert (made - logits(base)).abs().max() > 0.1


def test_the_engine_serves_what_was_saved(tiny: Path, tmp_path: Path):
    """All linear layers, stored as bfloat16; over one that was there."""
    matrices = random_matrices(tiny, dict.fromkeys(("_proj",), 3), 4)
    (tmp_path / "adapter_model.bin").write_text("older")
    save_adapter(tmp_path, random_matrices(tiny, {"q_proj": 2}, 5), 2, 4)
    save_adapter(tmp_path, matrices, 3, 4, target_modules="all-linear", dtype=dtypes.bfloat16,
                 base_model=str(tiny))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter_config.json",
                                                                "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    assert next(with_adapter(tiny, tmp_path, torch.bfloat16).parameters()).dtype == torch.bfloat16
    given = prompts(2, 6)
    with LLM(tiny, device="CPU", enable_lora=True, max_num_seqs=2, max_model_len=64) as llm:
        made = answers(llm, given, [LoRARequest("a", 1, str(tmp_path)), None], 10)
    assert made == [*greedy(tiny, given[:1], tmp_path, 10), *greedy(tiny, given[1:], None, 10)]
