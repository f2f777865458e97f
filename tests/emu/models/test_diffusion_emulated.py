"""On the emulated H100: which kernels the UNet of Stable Diffusion is made of, and its outputs beside
diffusers'; and an encoder in bfloat16, a captured graph of kernels without a finding."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import Context

from tests.support.models import diffusion_case as case
from tinygrad_nv import explain
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.models.diffusion import config, weights
from tinygrad_nv.models.diffusion.unet import UNet

C = 2.0     # x the error of the same network in bfloat16 in torch
CUT = 2.0**-8


def opened(dtype: DType) -> tuple[Any, UNet]:
    torch.manual_seed(2)
    theirs = case.unet(False)
    folder = case.saved(theirs)
    mine = UNet(config.read_unet(folder), dtype, "EMU")
    weights.load(mine, folder)
    return theirs, mine


def given(context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 4, 8, 8), torch.tensor([7]), torch.randn(1, 5, context)


def called(mine: UNet, x: torch.Tensor, times: torch.Tensor, context: torch.Tensor) -> Tensor:
    dtype = mine.dtype
    return mine(Tensor(case.nhwc(x), device="EMU").cast(dtype), Tensor(times.numpy(), device="EMU"),
                Tensor(context.numpy(), device="EMU").cast(dtype))


def test_convolutions_group_norms_and_attention_are_kernels_of_ours():
    _, mine = opened(dtypes.bfloat16)
    kernels = str(explain(called(mine, *given(mine.config.context))))
    assert [name for name in ("conv_wgmma", "group_norm", "flash", "gemm") if name not in kernels] == []


@pytest.mark.slow
@pytest.mark.parametrize("tf32", [False, True])
def test_outputs(tf32: bool):
    theirs, mine = opened(dtypes.float32 if tf32 else dtypes.bfloat16)
    x, times, context = given(mine.config.context)
    with torch.no_grad():
        wanted = case.nhwc(theirs.double()(x.double(), times, context.double()).sample)
        narrow = case.nhwc(theirs.bfloat16()(x.bfloat16(), times, context.bfloat16()).sample.float())
    with Context(ALLOW_TF32=1): found = called(mine, x, times, context).float().numpy()
    error, usual = (np.square(each - wanted).mean() ** 0.5 for each in (found, narrow))
    assert error <= (CUT * np.abs(wanted).max() if tf32 else C * usual)


FIELDS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 16}


@pytest.mark.slow
def test_embeddings_on_the_emulator(tmp_path: Path):
    """Within 1.5 × the error of the same model on a CPU."""
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**FIELDS)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("LayerNorm.weight" in name), 0.3)
    model.save_pretrained(tmp_path)
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    texts, errors = [[5, 9, 33, 2, 60], [7]], {}
    with torch.no_grad():
        exact = np.stack([model(torch.tensor([text]))[0][0].mean(0).numpy() for text in texts])
    for device in ("EMU", "CPU"):
        llm = LLM(tmp_path, "bfloat16", 8, device, max_num_batched_tokens=8)
        made = [np.array([each.outputs.embedding for each in llm.embed(texts)]) for _ in range(2)]
        assert np.array_equal(*made)
        errors[device] = np.square(made[0] - exact).mean() ** 0.5
        assert llm.embedder is not None
        if device == "EMU": assert llm.embedder.runner.steps[8].captured.graphs
        llm.close()
    assert errors["EMU"] <= 1.5 * errors["CPU"]
