"""Exported decoders give the logits of transformers in onnxruntime and here, step by step, with what they
gave of keys and values as the next step's past. Transformers that torch exported give what torch gives,
and their attention is a kernel of this package."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers as hf
from tinygrad.helpers import Context

from tests.support.onnx import exported_models
from tinygrad_nv import explain
from tinygrad_nv.onnx import OnnxRunner
from tinygrad_nv.onnx.exporting import export_model

SIZES: dict[str, Any] = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
                         "max_position_embeddings": 64, "head_dim": 16, "initializer_range": 0.2}
FAMILIES = {"llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": True}),
            "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}),
            "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}),
            "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {"sliding_window": 4,
                                                               "query_pre_attn_scalar": 16})}


def saved(name: str, where: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model, config, more = FAMILIES[name]
    made = model(config(**{**SIZES, **more})).eval()
    made.save_pretrained(where)
    return made


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == "gemma2" else pytest.mark.slow)
                                  for each in FAMILIES])
def test_steps_are_those_of_transformers(name: str, tmp_path: Path):
    reference = saved(name, tmp_path / "model")
    path = export_model(tmp_path / "model", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 100, (2, 44))
    past = {each.name: np.zeros((2, 2, 0, 16), dtype=np.float32) for each in session.get_inputs()[1:]}
    names, rows = [each.name.replace("present", "past_key_values") for each in session.get_outputs()], []
    for first, last in ((0, 7), (7, 8), (8, 44)):
        given = {"input_ids": ids[:, first:last], **past}
        logits, *present = session.run(None, given)
        rows.append(logits)
        past = dict(zip(names[1:], present, strict=True))
    with torch.no_grad(): wanted = reference(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.concatenate(rows, axis=1), wanted, atol=1e-4)
    with Context(DEV="CPU"):
        made = OnnxRunner(path)(given)
        templates = [each.template for each in explain(made["logits"]).kernels]
        np.testing.assert_allclose(made["logits"].numpy(), rows[-1], atol=1e-4)
    # soft-capped scores are written out, and not found again
    if name != "gemma2": assert sum(each in ("flash", "decode") for each in templates) == 2, templates


@pytest.mark.slow
def test_float16_and_a_file_of_weights(tmp_path: Path):
    reference = saved("llama", tmp_path / "model")
    path = export_model(tmp_path / "model", tmp_path / "model.onnx", opset=23, dtype="float16",
                        external_data=True)
    assert {each.version for each in onnx.load(path, load_external_data=False).opset_import} == {23}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.arange(9).reshape(1, 9)
    past = {each.name: np.zeros((1, 2, 0, 16), dtype=np.float16) for each in session.get_inputs()[1:]}
    found = session.run(["logits"], {"input_ids": ids, **past})[0]
    with torch.no_grad(): wanted = reference(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(found, wanted, atol=0.02 * np.abs(wanted).max())


LAYERS = 2


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == "llama" else pytest.mark.slow)
                                  for each in exported_models.MODELS])
def test_a_transformer_is_that_of_torch(name: str):
    case = exported_models.exported(name)
    with Context(DEV="CPU"):
        made = OnnxRunner(case.model)(case.inputs)["output"]
        templates = [each.template for each in explain(made).kernels]
        found = made.numpy()
    # a row of padding sees nothing in torch's mask, and is no result
    shown = case.inputs.get("attention_mask", np.ones(case.wanted.shape[:2])).astype(bool)
    np.testing.assert_allclose(found[shown], case.wanted[shown], atol=2e-5)
    attention = [each for each in templates if each in ("flash", "decode", "attention")]
    assert len(attention) == LAYERS, templates
    assert templates.count("norm") == 2 * LAYERS + 1, templates
    assert templates.count("gemm") + templates.count("gemv") >= 4 * LAYERS
