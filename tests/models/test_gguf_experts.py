"""GGUF files of mixtures of experts: metadata, names, matrices bit for bit, and tokens of transformers."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file
from tinygrad import dtypes

from tests.models.test_parity import GREEDY, PROMPT, our_logits, their_logits, theirs
from tests.support.models.experts_case import FAMILIES, experts, saved
from tests.support.quant.gguf_case import gguf_name, quantised, write_model
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

WHOLE = {"mlp_only_layers": []}     # a GGUF file has experts in every layer
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256}
Q4_K_M = {"down": Kind.Q6_K, "_inp": Kind.F32, "token_embd": Kind.F32, "": Kind.Q4_K}
PLAIN = {"_inp": Kind.F32, "token_embd": Kind.F32}      # what stays floats


def changes(family: str, wide: bool = False) -> dict[str, object]:
    """Of a family's fields, those that it has."""
    moe = {key: value for key, value in WIDE.items() if ("moe" not in key and "shared" not in key) or
           key in FAMILIES[family][1]} if wide else {}
    return moe | (WHOLE if family.startswith("qwen") else {})


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_floats(tmp_path: Path, family: str):
    """Hyper-parameters are those of the directory, logits those of transformers."""
    directory, path = saved(family, tmp_path / "source", **changes(family)), tmp_path / "model.gguf"
    write_model(path, directory)
    found, wanted = read_config(path), read_config(directory)
    assert found.moe == wanted.moe
    same = {"norm_eps": wanted.norm_eps, "dtype": wanted.dtype, "eos_token_ids": wanted.eos_token_ids}
    assert replace(found, **same) == wanted
    logits = their_logits(directory, PROMPT[:40])
    assert np.abs(our_logits(path, PROMPT[:40]) - logits).max() <= 2e-4 * np.abs(logits).max()


@pytest.mark.parametrize(("family", "kinds"), [
    ("mixtral", {**PLAIN, "": Kind.Q4_0}),
    pytest.param("qwen2-moe", {**PLAIN, "": Kind.Q8_0}, marks=pytest.mark.slow),
    pytest.param("qwen3-moe", Q4_K_M, marks=pytest.mark.slow),
    pytest.param("olmoe", {**PLAIN, "up_exps": Kind.Q5_1, "gate_exps": Kind.Q5_1, "": Kind.MXFP4},
                 marks=pytest.mark.slow)], ids=str)
def test_quantised(tmp_path: Path, family: str, kinds: dict[str, Kind]):
    wide = Kind.Q4_K in kinds.values()
    directory, path = saved(family, tmp_path / "source", **changes(family, wide)), tmp_path / "model.gguf"
    write_model(path, directory, kinds)
    plain = dequantised(directory, tmp_path / "plain", path)
    model = Llama(read_config(path), dtypes.float32, "CPU")
    weights.load(model, path)
    matrices = load_file(plain / "model.safetensors")
    found = experts(model)
    assert found.keys() == {name.removesuffix(".weight") for name in matrices if ".experts." in name}
    for name, matrix in found.items(): assert np.array_equal(matrix, matrices[f"{name}.weight"]), name
    made = theirs(plain).generate(torch.tensor([PROMPT]), max_new_tokens=32, do_sample=False)
    llm = LLM(path, "float32", device="CPU", max_num_seqs=2, max_num_batched_tokens=64)
    assert list(llm.complete(PROMPT, GREEDY).token_ids) == made[0, len(PROMPT):].tolist()


def dequantised(source: Path, to: Path, path: Path) -> Path:
    """A directory of what gguf's own dequantiser makes of a file's matrices."""
    to.mkdir()
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(path).tensors}
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        kind = types[gguf_name(name)]
        if kind not in (Kind.F32, Kind.F16): tensors[name] = gguf.dequantize(quantised(weight, kind, 0), kind)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"): (to / name).write_text((source / name).read_text())
    return to


def test_bytes_of_inputs(tmp_path: Path):
    """In bfloat16 inputs of experts are rounded to int8, as those of dense layers."""
    directory, path = saved("mixtral", tmp_path / "source"), tmp_path / "model.gguf"
    write_model(path, directory, {**PLAIN, "": Kind.Q4_0})
    model = Llama(read_config(path), dtypes.bfloat16, "CPU")
    weights.load(model, path)
    block = model.blocks[0].feed_forward
    assert block.gate_up_stack.int8
    assert block.gate_up_stack.matrix.shape == (10, 192, 128)
    assert block.down_stack.matrix.type.layout == "tiles"


@pytest.mark.slow
def test_experts_of_a_name_each(tmp_path: Path):
    """Older files of Mixtral have a tensor for each expert."""
    directory, path, older = saved("mixtral", tmp_path / "source"), tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_model(path, directory)
    write_model(older, directory, apart=True)
    ids = PROMPT[:20]
    assert np.array_equal(our_logits(path, ids), our_logits(older, ids))


def test_what_is_refused(tmp_path: Path):
    directory, path = saved("olmoe", tmp_path / "source"), tmp_path / "model.gguf"
    write_model(path, directory, metadata={"olmoe.expert_weights_scale": 2.5})
    with pytest.raises(ModelError, match=r"olmoe.expert_weights_scale is 2.5, which is not implemented"):
        read_config(path)
    write_model(path, directory, metadata={"olmoe.expert_count": 5})
    with pytest.raises(WeightError, match=r"of its metadata\n.*gate.weight: \[3, 128\], expected \[5, 128\]"):
        weights.load(Llama(read_config(path), device="CPU"), path)
    write_model(path, directory, metadata={"general.architecture": "dbrx"})
    with pytest.raises(ModelError, match=r"general.architecture is 'dbrx'"): read_config(path)
