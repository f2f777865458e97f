"""Trained models and adapters as directories of Hugging Face and PEFT: what was saved is loaded bit for bit,
also by transformers, PEFT and the engine."""
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tinygrad import Tensor, dtypes
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.models.test_parity import our_logits, their_logits
from tests.support.models.families import CASES
from tests.support.models.lora_case import adapter, answers, greedy, prompts
from tinygrad_nv import LLM, LoRARequest
from tinygrad_nv.engine.bundled.capture import find_ranges
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.families.minimax import CONSTANTS
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import adaptable
from tinygrad_nv.models.mixers.channel_delta import ChannelDelta
from tinygrad_nv.models.peft import read_adapter
from tinygrad_nv.quantize.directory import quantize
from tinygrad_nv.quantize.schemes import SCHEMES
from tinygrad_nv.runtime.memory import read_part
from tinygrad_nv.train.export import load_adapter, save_adapter, save_pretrained

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
    """What transformers loads, without a warning of names that it does not know or find, but for what it
    computes of a layer's number."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("unexpected_keys", "mismatched_keys"))
    assert not [name for name in info["missing_keys"] if not name.endswith(CONSTANTS)]
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


@pytest.mark.parametrize("case", ["kimi-linear", "lfm3"])
def test_bundles_refer_to_files_of_other_names(hf_model: Callable[[str], Path], tmp_path: Path, case: str):
    """Memory is found in a directory as it was published, and in one with this package's names."""
    model = loaded(hf_model(case))
    save_pretrained(model, tmp_path, hf_model(case))
    published, own = (find_ranges(model, each) for each in (hf_model(case), tmp_path))
    assert published.keys() == own.keys() != set()


def test_parameters_of_decays_stay_float32(hf_model: Callable[[str], Path]):
    mixer = loaded(hf_model("kimi-linear"), dtypes.bfloat16).blocks[0].attention
    assert isinstance(mixer, ChannelDelta)
    assert (mixer.decay.dtype, mixer.bias.dtype) == (dtypes.float32, dtypes.float32)


@pytest.mark.parametrize("case", ["mixtral", "minimax-m2", "kimi-linear"])
def test_quantize_keeps_routers(hf_model: Callable[[str], Path], tmp_path: Path, case: str):
    """Whatever files call them: what was written is loaded."""
    quantize(hf_model(case), SCHEMES["fp8"], tmp_path / "out")
    of = loaded(tmp_path / "out")(Tensor([IDS])).numpy()
    exact = loaded(hf_model(case))(Tensor([IDS])).numpy()
    assert np.corrcoef(of.flatten(), exact.flatten())[0, 1] > 0.99


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


THEIRS: list[dict[str, Any]] = [
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 5, "target_modules": r".*\.(k_proj|down_proj|up_proj)", "lora_alpha": 3,
     "rank_pattern": {"down_proj": 2, r"layers\.1\..*k_proj": 11}, "alpha_pattern": {"k_proj": 20}},
    {"r": 3, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1], "lora_dropout": 0.25}]
PROMPT_IDS = torch.tensor([[5, 9, 200, 31, 4, 77]])


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
    with torch.no_grad(): return model(PROMPT_IDS).logits


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
