"""Scales of the KV cache in checkpoints, through the engine, held to attention over dequantised numbers."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.models.test_parity import GREEDY, PROMPT
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.models import weights
from tinygrad_nv.models.attention import Attention
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.activations import to_e4m3
from tinygrad_nv.tile.reference import round_to as to_float

LAYERS = 2
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []}
# scales whose inverse is exact, so that nothing lies between two codes by a division's rounding
K, V = torch.tensor([2.0 ** -8, 2.0 ** -9]), torch.tensor([2.0 ** -8, 2.0 ** -7])
# names of a layer's scales, their shape, and the config
KINDS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "compressed-tensors": ({"k_scale": K[:1], "v_scale": V[:1]}, {**CT, "kv_cache_scheme": SCHEME}),
    "heads": ({"k_scale": K.reshape(2, 1, 1), "v_scale": V.reshape(2, 1, 1).bfloat16()},
              {**CT, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}),
    "int8": ({"k_scale": K, "v_scale": V},
             {**CT, "kv_cache_scheme": {**SCHEME, "type": "int", "strategy": "attn_head"}}),
    "older": ({"k_proj.output_scale": K[0], "v_proj.output_scale": V[0]}, {**CT, "kv_cache_scheme": SCHEME}),
    "modelopt": ({"k_proj.k_scale": K[0], "v_proj.v_scale": V[0]},
                 {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}),
    "autofp8": ({"kv_scale": K[:1]}, {"quant_method": "fp8", "kv_cache_scheme": "static"})}


@pytest.fixture
def make(hf_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A directory of a random model with scales, and with a quantization_config."""
    def made(scales: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
        source = hf_model("llama")
        tensors = load_file(source / "model.safetensors")
        tensors |= {f"model.layers.{i}.self_attn.{name}": each.clone().contiguous()
                    for i in range(LAYERS) for name, each in scales.items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        data = json.loads((source / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(data | {"quantization_config": config}))
        (tmp_path / "generation_config.json").write_text((source / "generation_config.json").read_text())
        return tmp_path
    return made


def rounded(x: Tensor, scales: torch.Tensor, dtype: DType) -> Tensor:
    """x (B, H, T, D) as it is read from a cache."""
    s = Tensor(scales.float().reshape(-1, 1, 1).numpy(), device="CPU")
    if dtype == dtypes.int8: return (x / s).round().clamp(-127, 127) * s
    return (to_e4m3(x / s) if dtype == dtypes.fp8e4m3 else to_float(x / s, dtype)) * s


def log_probabilities(directory: Path, monkeypatch: pytest.MonkeyPatch, scales: list[torch.Tensor],
                      dtype: DType, tokens: list[int]) -> np.ndarray:
    """Of every next token, by one forward pass whose attention takes dequantised keys and values."""
    project = Attention.project

    def dequantised(self: Attention, x: Tensor, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = project(self, x, batch)
        return q, rounded(k, scales[0], dtype).contiguous(), rounded(v, scales[-1], dtype).contiguous()
    monkeypatch.setattr(Attention, "project", dequantised)
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    found: np.ndarray = model(Tensor([tokens], dtype=dtypes.int32, device="CPU")).log_softmax(-1).numpy()[0]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_s_scales_are_the_cache_s(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
                                               kind: str):
    """Log probabilities within 5e-5: measured 1e-5, and 1e-4 at least where nothing is rounded."""
    scales, config = KINDS[kind]
    directory, dtype = make(scales, config), dtypes.int8 if kind == "int8" else dtypes.fp8e4m3
    llm = LLM(directory, device="CPU", max_num_seqs=2, max_num_batched_tokens=64)
    cache = llm.runner.store.cache.layers
    assert cache[0].keys.dtype == dtype
    for layer in cache:
        for found, given in zip((layer.k_scale, layer.v_scale), (*scales.values(),) * 2, strict=False):
            assert found is not None
            assert (found.numpy() == given.float().reshape(1, -1).numpy()).all()
    same(llm, directory, monkeypatch, list(scales.values()), dtype)


def same(llm: LLM, directory: Path, monkeypatch: pytest.MonkeyPatch, scales: list[torch.Tensor],
         dtype: DType, prompt: Any = PROMPT) -> None:
    """Asserts that greedy tokens, and their log probabilities, are those of dequantised keys and values."""
    found = llm.complete(prompt, replace(GREEDY, max_tokens=12, logprobs=1))
    llm.close()
    answer, tokens = found.outputs[0], list(found.outputs[0].token_ids)
    wanted = log_probabilities(directory, monkeypatch, scales, dtype, [*found.prompt_token_ids, *tokens])
    wanted = wanted[len(found.prompt_token_ids) - 1:-1]
    assert tokens == wanted.argmax(-1).tolist()
    for row, token, each in zip(wanted, tokens, answer.logprobs, strict=True):
        assert abs(each[token].logprob - row[token]) < 5e-5


@pytest.mark.slow
def test_e5m2_is_stored_as_it_is(make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    """The checkpoint's scales are of another dtype."""
    directory = make(*KINDS["heads"])
    llm = LLM(directory, device="CPU", max_num_seqs=2, max_num_batched_tokens=64, kv_cache_dtype="fp8_e5m2")
    for layer in llm.runner.store.cache.layers:
        assert layer.keys.dtype == dtypes.fp8e5m2
        assert (layer.k_scale.numpy() == 1).all()
    same(llm, directory, monkeypatch, [torch.ones(1)], dtypes.fp8e5m2)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "dtype"), [("fp8", dtypes.fp8e4m3), ("fp8_e5m2", dtypes.fp8e5m2)])
def test_stories_of_fp8_are_those_of_rounded_keys_and_values(monkeypatch: pytest.MonkeyPatch, given: str,
                                                             dtype: DType):
    llm = LLM(DEFAULT_MODEL, device="CPU", max_num_seqs=2, max_num_batched_tokens=64, kv_cache_dtype=given)
    same(llm, DEFAULT_MODEL, monkeypatch, [torch.ones(1)], dtype, "Once upon a time there was")


def test_scales_without_a_scheme_are_of_e4m3(make: Callable[..., Path]):
    """Directories of AutoFP8 before it named a scheme."""
    directory = make({"k_scale": K, "v_scale": V}, CT)
    for given, holds in (("fp8", True), ("int8", False), ("fp8_e5m2", False)):
        llm = LLM(directory, device="CPU", max_num_seqs=1, kv_cache_dtype=given)
        found = llm.runner.store.cache.layers[0].k_scale
        assert (found.numpy()[0] == K.numpy()).all() == holds
        llm.close()


def test_scales_of_a_float_cache_are_left_alone(make: Callable[..., Path]):
    scales, config = KINDS["heads"]
    llm = LLM(make(scales, config), device="CPU", max_num_seqs=1, kv_cache_dtype="float32")
    assert llm.runner.store.cache.layers[0].k_scale is None
    assert len(llm.model.cache_scales) == LAYERS
    llm.close()


@pytest.mark.parametrize(("given", "dtype"), [("auto", dtypes.fp8e4m3), ("fp8_e4m3", dtypes.fp8e4m3),
                                              ("int8", dtypes.int8)])
def test_dynamic_scales_are_calibrated(make: Callable[..., Path], given: str, dtype):
    directory = make({}, {**CT, "kv_cache_scheme": {**SCHEME, "strategy": "token", "dynamic": True}})
    llm = LLM(directory, device="CPU", max_num_seqs=1, kv_cache_dtype=given)
    keys = [layer.k_scale.numpy() for layer in llm.runner.store.cache.layers]
    assert llm.runner.store.tensors[0].dtype == dtype
    assert (keys[0] < 0.1).all()
    assert (keys[0] != keys[1]).all()
    llm.close()


def test_without_scales_fp8_is_stored_as_it_is(make: Callable[..., Path]):
    llm = LLM(make({}, {**CT, "kv_cache_scheme": SCHEME}), device="CPU", max_num_seqs=1)
    assert (llm.runner.store.cache.layers[0].v_scale.numpy() == 1).all()
    llm.close()


@pytest.mark.parametrize(("scale", "words"), [
    (torch.zeros(1), ("k_scale is [0.0]", "expected: numbers above 0")),
    (torch.full((1,), float("nan")), ("k_scale is [nan]",)),
    (torch.ones(3), ("k_scale is float32 [3]", "one or one for each of 2 key heads"))])
def test_scales_that_are_none_are_refused(make: Callable[..., Path], command, scale: torch.Tensor,
                                          words: tuple[str, ...]):
    directory = make({"k_scale": scale, "v_scale": V}, {**CT, "kv_cache_scheme": SCHEME})
    command("generate", directory, "--prompt-ids", "5,6").refused(*words)
