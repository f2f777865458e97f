"""Multi-head latent attention: what its cache holds, and that steps with a cache compute what whole sequences
do."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.models.test_parity import PROMPT, our_logits, their_logits
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.memory_planning import token_bytes
from tinygrad_nv.errors import RequestError, SpecError
from tinygrad_nv.functional import latent_attention
from tinygrad_nv.kvcache.store import PageStore
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import parse_config, read_config
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import PagedBatch, SequenceGroup

V3 = {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
      "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
      "max_position_embeddings": 163840}


def ints(x: object) -> Tensor: return Tensor(np.array(x, np.int32), device="CPU").realize()


def loaded(directory: Path, dtype: DType = dtypes.float32) -> Llama:
    model = Llama(read_config(directory), dtype, "CPU")
    weights.load(model, directory)
    return model


def paged_logits(model: Llama, ids: list[int]) -> np.ndarray:
    """Of all tokens: chunks of 8, then one token at a time, in pages out of order."""
    store, table, made = PageStore(model.config, "CPU", model.dtype, 8, 16), [5, 0, 7, 2], []
    for view in store.views: view[:] = 0xFF     # NaN
    start = 0
    while start < len(ids):
        count = 8 if start + 8 <= len(ids) - 4 else 1
        group = SequenceGroup(count, ints([table]), ints([start + count]))
        batch = PagedBatch((group,), model.rope_tables)
        made.append(model.step_paged(ints(ids[start:start + count]), batch, store.cache).numpy())
        start += count
    return np.concatenate(made)


def test_a_page_holds_latents_alone(hf_model: Callable[[str], Path]):
    """Bytes of a token: (kv_lora_rank + qk_rope_head_dim) · dtype · layers. Keys and values of DeepSeek-V3's
    128 heads would take 71 times as many."""
    assert token_bytes(parse_config(V3), dtypes.bfloat16) == (512 + 64) * 2 * 61 == 70_272
    assert 61 * 128 * (192 + 128) * 2 / 70_272 > 71
    config = read_config(hf_model("deepseek-v3"))
    store = PageStore(config, "CPU", dtypes.float32, 3, 16, host_pages=2)
    held = sum(int(each.nbytes()) for each in store.tensors)
    assert held / (3 * 16) == (40 + 8) * 4 * 3 == token_bytes(config, dtypes.float32)
    assert store.host_array.nbytes == 2 * 16 * (40 + 8) * 4 * 3


def test_parameters_are_counted(hf_model: Callable[[str], Path]):
    for case in ("deepseek-v2-lite", "deepseek-v3"):
        model = Llama(read_config(hf_model(case)), dtypes.float32, "CPU")
        found = {id(slot.tensor): int(slot.tensor.numel()) for slot in weights.slots(model).values()}
        assert sum(found.values()) == model.config.parameters


def near(logits: np.ndarray, model: Llama, ids: list[int]) -> None:
    """Asserts that the logits of the last tokens are those of a whole sequence."""
    expected = model(ints([ids]))[0].numpy()
    assert np.abs(logits - expected[-len(logits):]).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v3-halves"])
def test_pages(hf_model: Callable[[str], Path], case: str):
    """Absorbed attention of steps gives the logits of whole sequences."""
    model = loaded(hf_model(case))
    near(paged_logits(model, PROMPT[:30]), model, PROMPT[:30])


@pytest.mark.slow
@pytest.mark.parametrize("ours", ["0", "1"])
def test_a_contiguous_cache(hf_model: Callable[[str], Path], ours: str, monkeypatch: pytest.MonkeyPatch):
    """Also by tinygrad's own kernels."""
    ids, model = PROMPT[:30], loaded(hf_model("deepseek-v3"))
    monkeypatch.setenv("NV_CPU", ours)
    cache = DenseKVCache.create(model.config, 40, dtypes.float32, device="CPU")
    assert cache.nbytes == 40 * token_bytes(model.config, dtypes.float32)
    model.step(ints([ids[:29]]), 0, cache, 28).realize()
    near(model.step(ints([ids[29:]]), 29, cache).numpy(), model, ids)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["deepseek-v2", "deepseek-v3"])
def test_bfloat16_pages_are_as_close_as_transformers(hf_model: Callable[[str], Path], case: str):
    """Bound as in test_parity.py: 1.5 × transformers' own error."""
    ids = PROMPT[:60]
    exact = their_logits(hf_model(case), ids)[0]
    def error(logits: np.ndarray) -> float: return float(np.sqrt(np.square(logits - exact).mean()))
    own = error(their_logits(hf_model(case), ids, torch.bfloat16)[0])
    assert error(paged_logits(loaded(hf_model(case), dtypes.bfloat16), ids)) <= 1.5 * own


@pytest.mark.slow
def test_layers_that_draft_are_not_read(hf_model: Callable[[str], Path], tmp_path: Path):
    """Those after the others, of which num_nextn_predict_layers says how many there are."""
    source = hf_model("deepseek-v3")
    tensors = load_file(source / "model.safetensors")
    tensors |= {"model.layers.3.eh_proj.weight": torch.zeros(3, 5),
                "model.layers.3.self_attn.o_proj.weight": torch.zeros(2, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.array_equal(our_logits(tmp_path, PROMPT[:20]), our_logits(source, PROMPT[:20]))


@pytest.mark.slow
def test_fp8_blocks(hf_model: Callable[[str], Path], tmp_path: Path):
    """A checkpoint as DeepSeek publishes them, of the layers without experts: the logits of its numbers as
    floats, in whole sequences and in pages; the matrix of keys and values is taken apart as floats."""
    source, sides = hf_model("deepseek-v3-halves"), [tmp_path / "fp8", tmp_path / "floats"]
    config = json.loads((source / "config.json").read_text()) | {"first_k_dense_replace": 2}
    random, tensors = torch.Generator().manual_seed(0), load_file(source / "model.safetensors")
    floats = {name: x for name, x in tensors.items() if ".mlp." not in name}
    for layer in range(2):
        for name, shape in (("gate", (160, 64)), ("up", (160, 64)), ("down", (64, 160))):
            floats[f"model.layers.{layer}.mlp.{name}_proj.weight"] = torch.randn(shape, generator=random) / 8
    stored = dict(floats)
    for name in [name for name in floats if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        if not name.endswith(".weight"): continue
        scales = torch.stack([torch.stack([block.abs().max() / 448 for block in rows.split(128, 1)])
                              for rows in floats[name].split(128)])
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[:floats[name].shape[0], :floats[name].shape[1]]
        stored[name] = (floats[name] / wide).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"], floats[name] = scales, stored[name].float() * wide
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for side, given, more in zip(sides, (stored, floats), ({"quantization_config": how}, {}), strict=True):
        side.mkdir()
        save_file(given, side / "model.safetensors")
        (side / "config.json").write_text(json.dumps(config | more))
    model, plain = (loaded(side) for side in sides)
    assert model.blocks[0].attention.output.parts
    assert np.array_equal(*(one.blocks[1].attention.kv_b.weight.numpy() for one in (model, plain)))
    near(paged_logits(model, PROMPT[:20]), plain, PROMPT[:20])
    near(model(ints([PROMPT[:20]]))[0].numpy(), plain, PROMPT[:20])


def test_refusals(hf_model: Callable[[str], Path]):
    with pytest.raises(RequestError, match="a KV cache of 8 bits for multi-head latent attention"):
        LLM(hf_model("deepseek-v3"), device="CPU", kv_cache_dtype="fp8")
    q, pages = Tensor.zeros(1, 1, 4, 12), Tensor.zeros(2, 8, 1, 12)
    with pytest.raises(SpecError, match="value_dim=13"):
        latent_attention(q, pages, ints([[0]]), ints([1]), value_dim=13)
    with pytest.raises(SpecError, match="pages of shape"):
        latent_attention(q, pages.reshape(2, 4, 2, 12), ints([[0]]), ints([1]), value_dim=8)
