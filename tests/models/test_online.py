"""Weights that are quantised while they are loaded: codes, logits, memory."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes

from tests.models.test_parity import GREEDY, PROMPT
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.readers.online import SCHEMES, quantise
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import Scale


def amax(w: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Of the blocks of a matrix, each in the place of its elements."""
    rows, columns = scale.rows or w.shape[0], scale.columns or w.shape[1]
    padded = torch.nn.functional.pad(w.abs(), (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
    found = padded.reshape(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))
    return found.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:w.shape[0], :w.shape[1]]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_are_rounded_to_the_nearest(name: str, dtype: torch.dtype):
    """The bits of torch; rows of zeros, subnormals, and more rows than are rounded at a time."""
    type = SCHEMES[name]
    w = torch.randn(700, 520, generator=torch.Generator().manual_seed(0))
    w[5], w[6, 1:] = 0, w[6, 1:] * 1e-4
    w = w.to(dtype)
    raw = w.view(torch.uint16).numpy() if dtype == torch.bfloat16 else w.numpy()
    found = QTensor.of(type, (700, 520), quantise(type, "w", lambda _: raw), "CPU").dequantize().numpy()
    most, wide = {"int8": 127, "e4m3": 448, "nf4": 1}[type.element.name], w.float()
    scales = (amax(wide, type.scale) / most).clamp(min=1e-12)
    codes = wide / scales
    if most == 1:
        book = torch.tensor(type.element.values)
        codes = book[(codes[..., None] - book).abs().argmin(-1)]
    else: codes = codes.round() if most == 127 else codes.to(torch.float8_e4m3fn).float()
    assert np.array_equal(found, (codes * scales).numpy())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fp8", "int8", "bitsandbytes"])
def test_through_the_engine(hf_model: Callable[[str], Path], name: str):
    """Greedy tokens of the dequantised weights; dense matrices are never allocated."""
    directory = hf_model("llama")
    llm = LLM(directory, device="CPU", max_num_seqs=1, quantization=name)
    made = list(llm.complete(PROMPT, replace(GREEDY, max_tokens=8)).token_ids)
    plain = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(plain, directory)
    saved = 0
    for block, other in zip(llm.model.blocks, plain.blocks, strict=True):
        for linear, dense in ((block.attention.qkv, other.attention.qkv),
                              (block.attention.output, other.attention.output),
                              (block.feed_forward.gate_up, other.feed_forward.gate_up),
                              (block.feed_forward.down, other.feed_forward.down)):
            assert not linear.weight.uop.buffer.is_allocated()
            assert len(linear.parts) == 1
            matrix = linear.parts[0].matrix.dequantize()
            most = (0.2 if name == "bitsandbytes" else 0.05) * dense.weight.abs().max().item()
            assert 0 < (matrix - dense.weight).abs().max().item() < most
            dense.weight = matrix.contiguous().realize()
            saved += 4 * dense.weight.numel() - linear.parts[0].matrix.nbytes
    assert llm.streamed_bytes == 4 * plain.config.parameters - saved    # the embedding is the head
    tokens = list(PROMPT)
    for _ in range(8):
        ids = tokens + [0] * (len(PROMPT) + 8 - len(tokens))    # one shape
        tokens.append(int(plain(Tensor([ids], device="CPU")).numpy()[0, len(tokens) - 1].argmax()))
    llm.close()
    assert made == tokens[len(PROMPT):]


def test_weights_that_are_not_finite_are_refused(hf_model: Callable[[str], Path], tmp_path: Path):
    source = hf_model("llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    with pytest.raises(WeightError, match=r"layers.1.mlp.up_proj.weight holds numbers that are not"):
        LLM(tmp_path, device="CPU", max_num_seqs=1, quantization="fp8")
