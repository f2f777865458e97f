"""Adapters that cannot be served: what was found, what is accepted, what to do."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tinygrad import dtypes

from tinygrad_nv import LLM, LoRARequest
from tinygrad_nv.engine.lora.request import LoRAConfig
from tinygrad_nv.errors import ConfigError, ModelError, NVError, RequestError, WeightError
from tinygrad_nv.models.peft import Adapter, read_adapter, targets_of

SHAPES = {f"model.layers.{i}.{name}": (out, inputs) for i in range(2) for name, out, inputs in (
    ("self_attn.q_proj", 8, 6), ("self_attn.v_proj", 4, 6), ("mlp.down_proj", 6, 10))}
TARGETS = ["q_proj", "v_proj"]
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Spoilt = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def saved(folder: Path, spoil: Spoilt = lambda config, state: None) -> Path:
    """An adapter of rank 3, spoilt."""
    config: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": TARGETS,
                              "bias": "none", "use_dora": False, "modules_to_save": None}
    state = {f"base_model.model.{name}.lora_{half}.weight":
             np.ones((3, inputs) if half == "A" else (out, 3), np.float32)
             for name, (out, inputs) in SHAPES.items() if name.endswith(tuple(TARGETS)) for half in "AB"}
    spoil(config, state)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read(directory: Path, rank: int = 8) -> Adapter:
    return read_adapter("a", directory, SHAPES, rank, dtypes.float32)


def test_one_that_is_right(tmp_path: Path):
    made = read(saved(tmp_path / "a"))
    assert (made.rank, sorted(made.matrices)) == (3, sorted(
        name for name in SHAPES if name.endswith(tuple(TARGETS))))
    q = made.matrices["model.layers.1.self_attn.q_proj"]
    assert (q.a.shape, q.b.shape, float(q.b[0, 0])) == ((3, 6), (3, 8), 2.0)
    again, other = read(saved(tmp_path / "b")), read(saved(
        tmp_path / "c", lambda config, state: config.update(lora_alpha=12)))
    assert made.digest == again.digest != other.digest


def test_the_adapters_name_in_names_of_tensors(tmp_path: Path):
    """As in a state_dict of PEFT's model; of several adapters in a file none is taken."""
    def renamed(name: str) -> Spoilt:
        def rename(config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
            for key in [*state]: state[key.replace(".weight", f".{name}.weight")] = state.pop(key)
        return rename
    plain, made = read(saved(tmp_path / "a")), read(saved(tmp_path / "b", renamed("default")))
    assert made.digest == plain.digest
    def two(config: dict[str, Any], state: dict[str, np.ndarray]) -> None:
        renamed("other")(config, state)
        state[A.replace(".weight", ".default.weight")] = state[A.replace(".weight", ".other.weight")]
    with pytest.raises(WeightError, match="has the adapters default, other in one file"):
        read(saved(tmp_path / "c", two))


@pytest.mark.parametrize(("key", "value", "words"), [
    ("peft_type", "IA3", "peft_type is 'IA3'"), ("use_dora", True, "DoRA normalises whole weights"),
    ("init_lora_weights", "pissa_niter_4", "first values off the base model's weights"),
    ("init_lora_weights", "OLoRA", "init_lora_weights is 'OLoRA'"),
    ("bias", "all", "bias is 'all'"), ("lora_bias", True, "biases of adapters"),
    ("modules_to_save", ["lm_head"], "modules that were trained whole"),
    ("target_parameters", ["experts.w"], "parameters of experts"),
    ("trainable_token_indices", [1], "embeddings are the base model's"), ("r", 0, "r is 0"),
    ("lora_alpha", "x", "lora_alpha is 'x'"), ("rank_pattern", {"(": 3},
                                               "rank_pattern: '(' is no regular expression"),
    ("alpha_pattern", [1], "alpha_pattern is [1]"), ("layer_replication", [[0, 1]], "layer_replication is")],
    ids=str)
def test_configurations(tmp_path: Path, key: str, value: Any, words: str):
    directory = saved(tmp_path / "a", lambda config, state: config.update({key: value}))
    with pytest.raises(ModelError) as error: read(directory)
    assert words in error.value.found
    assert error.value.expected and error.value.fix  # noqa: PT018



TENSORS: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "no A": (lambda state: state.pop(A), "q_proj.lora_A.weight"),
    "rank": (lambda state: state.update({A: np.ones((2, 6), np.float32)}), "lora_A.weight is [2, 6]"),
    "width": (lambda state: state.update({A: np.ones((3, 7), np.float32)}), "lora_A.weight is [3, 7]"),
    "integers": (lambda state: state.update({A: np.ones((3, 6), np.int32)}), "has dtype I32"),
    "head": (lambda state: state.update({"base_model.model.lm_head.lora_A.weight": state[A]}),
             "head and embedding are the base model's"),
    "experts": (lambda state: state.update({A.replace("self_attn.q_proj", "mlp.experts.3.up_proj"):
                                            state[A]}), "experts and routers are the base model's"),
    "unknown": (lambda state: state.update({A.replace("q_proj", "w_proj"): state[A]}),
                "which the base model has not, or takes no adapter for"),
    "embedding": (lambda state: state.update({"base_model.model.model.embed_tokens.lora_embedding_A":
                                              state[A]}), "embeddings are the base model's"),
    "dora": (lambda state: state.update({A.replace("lora_A.weight", "lora_magnitude_vector"): state[A]}),
             "DoRA"),
    "all": (lambda state: [state.pop(name) for name in list(state) if "layers.1" in name],
            "lacks matrices of model.layers.1.self_attn.q_proj, model.layers.1.self_attn.v_proj")}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(tmp_path: Path, case: str):
    spoil, words = TENSORS[case]
    directory = saved(tmp_path / "a", lambda config, state: spoil(state))
    with pytest.raises(ModelError) as error: read(directory)
    assert words in str(error.value)
    assert str(directory) in str(error.value)


def test_a_rank_that_is_too_large(tmp_path: Path):
    with pytest.raises(ModelError, match=r"(?s)rank 3.*max_lora_rank.*--max-lora-rank"):
        read(saved(tmp_path / "a"), rank=2)


def test_what_a_path_is(tmp_path: Path):
    """Each names the path, says what it is, and what to do."""
    model, file, empty = tmp_path / "model", tmp_path / "file", tmp_path / "empty"
    model.mkdir()
    empty.mkdir()
    (model / "config.json").write_text("{}")
    file.write_text("")
    adapter = saved(tmp_path / "a")
    for path, words in ((tmp_path / "none", "does not exist"), (file, "is a file"),
                        (model, "is a model, not an adapter"), (empty, "has no adapter_config.json"),
                        (adapter / "adapter_model.safetensors", "is a file")):
        with pytest.raises(ModelError) as error: read(path)
        assert error.value.found == f"{path} {words}" + (": it has a config.json" if path == model else "")
        assert "as PEFT saves them" in error.value.expected
    assert error.value.fix == "pass its directory"


def test_no_weights_and_damaged_ones(tmp_path: Path):
    path = saved(tmp_path / "a") / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightError, match="is damaged"): read(tmp_path / "a")
    path.unlink()
    with pytest.raises(WeightError, match="and no weights"): read(tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text("[1]")
    with pytest.raises(NVError): read(tmp_path / "a")


def test_targets():
    assert [name.rpartition(".")[2] for name in targets_of(r".*layers\.1.*_proj", SHAPES)] == \
        ["q_proj", "v_proj", "down_proj"]
    assert list(targets_of("all-linear", SHAPES)) == list(SHAPES)
    assert len(list(targets_of(["self_attn.q_proj", "down_proj"], SHAPES))) == 4
    with pytest.raises(ModelError,
                       match=r"target_modules: '\(' is no regular expression"): list(targets_of("(", SHAPES))


@pytest.mark.parametrize(("given", "words"), [
    ({"max_loras": 0}, "max_loras is 0"), ({"max_loras": 256}, "max_loras is 256"),
    ({"max_lora_rank": 1024}, "max_lora_rank is 1024"),
    ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras is 2"),
    ({"lora_dtype": "int8"}, "lora_dtype is 'int8'"),
    ({"data_parallel_size": 2}, "enable_lora is True, and 2 ranks have the model")], ids=str)
def test_limits(tiny: Path, given: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words): LLM(tiny, device="CPU", enable_lora=True, **given)


def test_requests(tiny: Path, tmp_path: Path):
    lora = LoRARequest("x", 1, str(tmp_path))
    for given, words in (({"lora_name": ""}, "lora_name is ''"),
                         ({"lora_int_id": 0}, "lora_int_id of 'x' is 0")):
        with pytest.raises(RequestError, match=words): LoRARequest(**{**vars(lora), **given})
    with LLM(tiny, device="CPU") as plain:
        with pytest.raises(RequestError, match=r"(?s)with adapter 'x'.*enable_lora"):
            plain.generate("x", lora_request=lora)
        with pytest.raises(RequestError, match="2 lora_requests for 1 prompts"):
            plain.generate("x", lora_request=[lora, lora])
    with LLM(tiny, device="CPU", enable_lora=True) as adapted:
        with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
            adapted.generate("x", lora_request=lora)
        with pytest.raises(ModelError, match="by its configuration, of a layer 64 x 64"):
            adapted.generate("x", lora_request=LoRARequest("y", 2, str(saved(tmp_path / "a"))))


def test_fewer_adapters_run_where_fewer_are_kept():
    """vLLM's default is one that runs, so that its users give max_cpu_loras alone."""
    config: Any = SimpleNamespace(latent=None, moe=None)
    def slots(**given: Any) -> int:
        usual = dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype"))
        return LoRAConfig.of(config, dtypes.float32, "CPU", **(usual | given)).slots
    assert [slots(), slots(max_cpu_loras=2), slots(max_cpu_loras=9), slots(max_loras=7)] == [4, 2, 4, 7]
