"""GGUF files of every family: hyper-parameters of the directory that was converted, logits of transformers.

llama.cpp's converter is not run here: `gguf_families.py` writes what it writes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

from tests.models.test_parity import GREEDY, PROMPT, our_logits, their_logits
from tests.support.models.families import CASES, YARN, Case, saved
from tests.support.quant.gguf_case import add, write_model
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.gguf import elements, list_tensors
from tinygrad_nv.models.rope import attention_factor, inverse_frequencies
from tinygrad_nv.quant.gguf.file import open_gguf


def changed(name: str, **more: Any) -> Case:
    """A case with other fields; None leaves one out."""
    made = {**CASES[name].fields, **more}
    return replace(CASES[name], fields={key: value for key, value in made.items() if value is not None})


# what a file cannot say is as in published models
FAMILIES = {
    "gemma2": changed("gemma2", query_pre_attn_scalar=24),
    "gemma3": changed("gemma3", query_pre_attn_scalar=16, num_hidden_layers=7, layer_types=None),
    "gpt-oss": CASES["gpt-oss"],
    "phi3": CASES["phi3"],
    "phi4": changed("phi4", original_max_position_embeddings=48),
    "deepseek-v2": CASES["deepseek-v2"],
    "deepseek-v2-lite": changed("deepseek-v2-lite", mlp_bias=None, rope_parameters={
        **YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "deepseek-v3": CASES["deepseek-v3"],
    "olmo2": CASES["olmo2"],
    "olmo3": CASES["olmo3"],
    "smollm3": CASES["smollm3"],
    "granite": CASES["granite"],
    "llama4": changed("llama4", num_hidden_layers=4, moe_layers=None, interleave_moe_layer_step=2,
                      attention_chunk_size=None, no_rope_layer_interval=None, floor_scale=None)}

QUICK = ("gemma3",)
# whole blocks of 32 in every row
WIDE = {"gpt-oss": changed("gpt-oss", intermediate_size=64, head_dim=32),
        "gemma2": changed("gemma2", head_dim=32, query_pre_attn_scalar=32),
        "deepseek-v2": changed("deepseek-v2", kv_lora_rank=64, v_head_dim=32, moe_intermediate_size=32,
                               qk_nope_head_dim=24),
        "deepseek-v3": changed("deepseek-v3", kv_lora_rank=64, q_lora_rank=64, v_head_dim=32,
                               moe_intermediate_size=32, qk_nope_head_dim=32),
        "llama4": replace(FAMILIES["llama4"], fields={**FAMILIES["llama4"].fields, "head_dim": 32,
                                                      "intermediate_size": 64})}

ROUTER = {"_inp": Kind.F32}     # stays in floats
BLOCKS: dict[str, dict[str, Kind] | Kind] = {
    "gemma2": Kind.Q8_0, "gemma3": Kind.Q4_0, "phi4": Kind.Q4_0, "smollm3": Kind.Q8_0, "granite": Kind.Q4_0,
    "gpt-oss": {**ROUTER, "exps": Kind.MXFP4, "": Kind.Q8_0},
    "deepseek-v2": {**ROUTER, "attn_k_b": Kind.F16, "": Kind.Q8_0},
    "deepseek-v3": {**ROUTER, "": Kind.Q8_0}, "llama4": {**ROUTER, "": Kind.Q8_0}}


def require_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 2e-4 * np.abs(expected).max()


def require_alike(found: Any, expected: Any, name: str = "config") -> None:
    """Equal, numbers to the seven digits that a file has of them."""
    if is_dataclass(expected):
        assert type(found) is type(expected), name
        for each in fields(expected):
            if each.compare: require_alike(getattr(found, each.name), getattr(expected, each.name), each.name)
    elif isinstance(expected, tuple) and not isinstance(expected, str):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True): require_alike(one, other, name)
    elif isinstance(expected, float): assert found == pytest.approx(expected, rel=1e-6), name
    else: assert found == expected, name


def comparable(found: ModelConfig, expected: ModelConfig) -> ModelConfig:
    """Without what no file says; with the rope of `expected` where a file has it in other words."""
    rope, other = found.distinct_ropes[0], expected.distinct_ropes[0]
    if other.kind in ("llama3", "longrope"):
        assert np.allclose(*(inverse_frequencies(each, 256) for each in (rope, other)), rtol=1e-6, atol=0)
        assert attention_factor(rope) == pytest.approx(attention_factor(other), rel=1e-6)
        found = replace(found, ropes=tuple(each and other for each in found.ropes))
    return replace(found, dtype=expected.dtype, eos_token_ids=expected.eos_token_ids,
                   draft_layers=expected.draft_layers)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: saved(case, tmp_path_factory.mktemp(name), len(name)) for name, case in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_hyper_parameters(directories: dict[str, Path], tmp_path: Path, family: str):
    write_model(path := tmp_path / "model.gguf", directories[family])
    expected = read_config(directories[family])
    require_alike(comparable(read_config(path), expected), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_elements(directories: dict[str, Path], tmp_path: Path, family: str):
    """Those of the directory, but of norms of Gemma, to which 1 is added, and of experts in one tensor."""
    write_model(path := tmp_path / "model.gguf", directories[family])
    expected, file = load_file(directories[family] / "model.safetensors"), open_gguf(path)
    found = {each.name: each for each in list_tensors(file)}
    assert all(".experts." in name for name in found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        values = elements(file, found[name], 0, expected[name].size).reshape(expected[name].shape)
        near = 1e-6 if family.startswith("gemma") and "norm" in name else 0.
        assert np.abs(values - expected[name]).max() <= near, name


def test_what_is_known_without_metadata(directories: dict[str, Path], tmp_path: Path):
    """Divisors of scores: of the largest Gemma 2, and of Granite where the file has none."""
    path = tmp_path / "model.gguf"
    write_model(path, directories["gemma2"], metadata={"gemma2.block_count": 46})
    assert read_config(path).attention_scale == (64 // 4) ** -.5
    write_model(path, directories["granite"], metadata={"granite.attention.scale": None})
    assert read_config(path).attention_scale == (64 // 4) ** -.5
    write_model(path, directories["gemma3"], metadata={"gemma3.attention.sliding_window": None})
    assert read_config(path).windows == (None,) * 7
    write_model(path, directories["llama4"], metadata={"llama4.expert_count": 128})
    assert not read_config(path).qk_norm
    groups = {f"deepseek2.expert_group_{key}": None for key in ("count", "used_count")}
    for experts, expected in ((256, (8, 4)), (384, (1, 1))):    # of DeepSeek-V3, of others
        write_model(path, directories["deepseek-v3"], metadata={**groups, "deepseek2.expert_count": experts})
        moe = read_config(path).moe
        assert moe is not None
        assert (moe.policy.groups, moe.policy.top_groups) == expected


def test_either_key_of_the_factor_of_attention(directories: dict[str, Path], tmp_path: Path):
    """Of YaRN: converters wrote one and later the other, and meant all of it."""
    found = []
    for key, other in (("yarn_attn_factor", "attn_factor"), ("attn_factor", "yarn_attn_factor")):
        write_model(path := tmp_path / f"{key}.gguf", directories["gpt-oss"], metadata={
            f"gpt-oss.rope.scaling.{key}": 1.25, f"gpt-oss.rope.scaling.{other}": None})
        found.append(read_config(path))
    assert 1.25 in [rope.attention_factor for rope in found[0].distinct_ropes]
    require_alike(*found)


@pytest.mark.parametrize("family", [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES])
def test_floats(directories: dict[str, Path], tmp_path: Path, family: str):
    """max |logit − HF| ≤ 2e-4 · max |logit|, as of directories; measured 2e-7 to 8e-7, of Gemma 3, where 1 is
    added to norms and subtracted, 7e-6."""
    write_model(path := tmp_path / "model.gguf", directories[family])
    require_same(our_logits(path, PROMPT[:60]), their_logits(directories[family], PROMPT[:60]))


def both(family: str, kinds: dict[str, Kind] | Kind, directory: Path) -> tuple[Path, Path]:
    """A file of blocks, and one of the numbers that they stand for."""
    source = saved(WIDE.get(family, FAMILIES[family]), directory / "source", len(family))
    write_model(path := directory / "model.gguf", source, kinds)
    write_model(plain := directory / "plain.gguf", source, kinds, plain=True)
    return path, plain


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kinds"), [
    pytest.param(*each, marks=[] if each[0] == "gpt-oss" else pytest.mark.slow) for each in BLOCKS.items()])
def test_blocks(tmp_path: Path, family: str, kinds: dict[str, Kind] | Kind):
    """Logits are those of the numbers that blocks stand for."""
    path, plain = both(family, kinds, tmp_path)
    assert read_config(path).quantization is not None
    require_same(our_logits(path, PROMPT[:60]), our_logits(plain, PROMPT[:60]))


@pytest.mark.slow
@pytest.mark.parametrize("family", BLOCKS)
def test_32_greedy_tokens_of_blocks(tmp_path: Path, family: str):
    """Those of the numbers that blocks stand for, and fewer bytes are read."""
    one, other = (LLM(each, "float32", device="CPU", max_num_seqs=2, max_num_batched_tokens=64)
                  for each in both(family, BLOCKS[family], tmp_path))
    assert one.complete(PROMPT, GREEDY).token_ids == other.complete(PROMPT, GREEDY).token_ids
    assert one.streamed_bytes < .6 * other.streamed_bytes


def written(path: Path, directory: Path, change: Callable[[str, np.ndarray], dict[str, np.ndarray]]) -> Path:
    """A file of a directory, with other tensors in place of some."""
    write_model(path.with_suffix(".whole"), directory)
    reader = gguf.GGUFReader(path.with_suffix(".whole"))
    kind = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, kind)
    for key, entry in reader.fields.items():
        if key.startswith(f"{kind}."): add(writer, key, entry.contents())
    for tensor in reader.tensors:
        for name, array in change(tensor.name, np.array(tensor.data)).items(): writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["gpt-oss", "llama4", "smollm3"])
def test_tensors_that_some_files_have_in_one(directories: dict[str, Path], tmp_path: Path, family: str):
    """q | k | v, and gate | up of experts, with biases: the same elements under the same names."""
    waiting: dict[str, list[np.ndarray]] = {}

    def joined(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        for parts, whole in ((("attn_q.", "attn_k.", "attn_v."), "attn_qkv."),
                             (("ffn_gate_exps.", "ffn_up_exps."), "ffn_gate_up_exps.")):
            part = next((part for part in parts if part in name), None)
            if part is None: continue
            stored_name = name.replace(part, whole)
            waiting.setdefault(stored_name, [np.empty(0)] * len(parts))[parts.index(part)] = array
            if not all(map(len, waiting[stored_name])): return {}
            axis = array.ndim - 1 if "bias" in name else array.ndim - 2
            return {stored_name: np.concatenate(waiting.pop(stored_name), axis)}
        return {name: array}
    path = written(tmp_path / "joined.gguf", directories[family], joined)
    require_alike(read_config(path), read_config(path.with_suffix(".whole")))
    files = [open_gguf(each) for each in (path.with_suffix(".whole"), path)]
    assert any(".attn_qkv." in name for name in files[1].tensors)
    assert not waiting
    whole, apart = ({each.name: (each, file) for each in list_tensors(file)} for file in files)
    assert apart.keys() == whole.keys()
    for name, (tensor, file) in apart.items():
        other, source = whole[name]
        assert tensor.shape == other.shape, name
        count = int(np.prod(tensor.shape))
        assert np.array_equal(elements(file, tensor, 0, count), elements(source, other, 0, count)), name


def test_keys_and_values_of_older_files(directories: dict[str, Path], tmp_path: Path):
    """DeepSeek's kv_b in one tensor, as files had it at first, and what lengths of heads meant then."""
    source, nope, dim = directories["deepseek-v2"], 24, 20
    lengths = {"key_length": nope + 8, "value_length": dim, "key_length_mla": None, "value_length_mla": None,
               "head_count_kv": 4}
    write_model(tmp_path / "old.gguf", source, metadata={f"deepseek2.attention.{key}": value
                                                         for key, value in lengths.items()})
    expected_config = read_config(source)
    require_alike(comparable(read_config(tmp_path / "old.gguf"), expected_config), expected_config)
    waiting: dict[str, np.ndarray] = {}

    def joined(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        block = name.rpartition(".attn_")[0]
        if "attn_k_b" in name: waiting[block] = array.swapaxes(1, 2)
        if "attn_v_b" not in name: return {} if "attn_k_b" in name else {name: array}
        both = np.concatenate([waiting.pop(block), array], 1)
        return {f"{block}.attn_kv_b.weight": both.reshape(-1, both.shape[-1])}
    path = written(tmp_path / "joined.gguf", source, joined)
    files = [open_gguf(each) for each in (path.with_suffix(".whole"), path)]
    new, old = ({each.name: (each, file) for each in list_tensors(file)} for file in files)
    assert new.keys() == old.keys()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    (tensor, file), (other, older) = new[name], old[name]
    count = int(np.prod(tensor.shape))
    assert tensor.shape == other.shape == (4 * (nope + dim), 40)
    expected = elements(older, other, 0, count)
    for begin, end in ((0, count), (0, 1), (1000, 1001), (1759, 3521), (count - 7, count)):
        assert np.array_equal(elements(file, tensor, begin, end), expected[begin:end])
    thrice = written(tmp_path / "thrice.gguf", source,
                     lambda name, array: {name: array} | joined(name, array))
    names = [each.name for each in list_tensors(open_gguf(thrice))]
    assert sorted(names) == sorted(new)
