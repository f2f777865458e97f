"""DEV=EMU: 2:4 sparse checkpoints are multiplied by mma's sparse forms on GPUs, dense or with a bitmask on
disk, and give the logits that a CPU gives with their zeros."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad.dtype import DType
from transformers import AutoModelForCausalLM

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised import sparse
from tinygrad_nv.quant.activations import SparseWeight

IDS = [5, 17, 80, 33, 2]
NEAR = {"2:4": 2.0**-6, "w8a8": 1e-3, "fp8": 0.05}  # of the largest logit; bfloat16, or codes of inputs


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of bfloat16."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(
        hidden_size=128, intermediate_size=192, num_hidden_layers=1))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("EMU_ARCH", "sm_90a")


def opened(directory: Path, dtype: DType, device: str) -> Llama:
    model = Llama(read_config(directory), dtype, device)
    weights.load(model, directory)
    return model


def logits(model: Llama) -> Tensor: return model(Tensor([IDS], dtype=dtypes.int32, device=model.device))


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are packed 16 rows at a time."""
    monkeypatch.setattr(sparse, "CHUNK", 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scheme", "format"), [("2:4", "compressed-tensors"), ("2:4", "sparse-24-bitmask"),
                                                ("w8a8", "sparse-24-bitmask"), ("fp8", "compressed-tensors")])
def test_sparse_layers(command, source: Path, tmp_path: Path, scheme: str, format: str):
    out, dtype = tmp_path / "made", dtypes.bfloat16 if scheme == "2:4" else dtypes.float32
    sparsity = () if scheme == "2:4" else ("--sparsity", "2:4")
    command("quantize", source, "--scheme", scheme, *sparsity, "--format", format, "--out", out,
            "--no-report").succeeded()
    on_gpu, on_cpu = opened(out, dtype, "EMU:90"), opened(out, dtypes.float32, "CPU")
    block = on_gpu.blocks[0]
    for linear in (block.attention.qkv, block.attention.output, block.feed_forward.gate_up,
                   block.feed_forward.down):
        assert [type(part) for part in linear.parts] == [SparseWeight]
    made = logits(on_gpu)
    assert [each.template for each in explain(made).kernels].count("sparse_wgmma") == 4
    wanted = logits(on_cpu).numpy()
    off = np.abs(made.float().numpy() - wanted).max() / np.abs(wanted).max()
    assert off <= NEAR[scheme]


def test_a_layer_that_is_not_sparse_stays_dense(command, source: Path, tmp_path: Path):
    """Whatever the config says of all of them."""
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "2:4", "--out", out, "--no-report").succeeded()
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, :3] = 1.0
    save_file(tensors, out / "model.safetensors")
    model = opened(out, dtypes.bfloat16, "EMU:90")
    assert isinstance(model.blocks[0].feed_forward.down.parts[0], Tensor)
    assert isinstance(model.blocks[0].feed_forward.gate_up.parts[0], SparseWeight)
    assert np.isfinite(logits(model).float().numpy()).all()
