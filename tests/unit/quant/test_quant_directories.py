"""Whole directories in each format: what is loaded is what they stand for."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import dtypes

from tests.support.quant.directory_case import KINDS, write
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.layers import Linear
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.activations import QWeight


def loaded(directory: Path) -> Llama:
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model


def linears(model: Llama) -> list[Linear]:
    return [linear for block in model.blocks
            for part in (block.attention, block.feed_forward)
            for linear in vars(part).values() if isinstance(linear, Linear)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded(kind: str, tmp_path: Path):
    quantised, plain = (linears(loaded(directory)) for directory in write(kind, tmp_path))
    for one, other in zip(quantised, plain, strict=True):
        parts = [part.matrix for part in one.parts if isinstance(part, QWeight)]
        assert len(parts) == len(one.parts) > 0
        # one matmul, with scales of a matrix, too; rows that are no whole blocks of 128 do not stack
        assert len(parts) == 1 or kind == "fp8"
        made = np.concatenate([part.dequantize().numpy() for part in parts])
        if kind == "ct-nvfp4": made = torch.from_numpy(made).bfloat16().float().numpy()
        assert np.array_equal(made, other.weight.numpy())


def test_modelopts_own_file(tmp_path: Path):
    """Of versions that leave config.json as it was."""
    quantised, plain = write("modelopt", tmp_path)
    data = json.loads((quantised / "config.json").read_text())
    config = data.pop("quantization_config")
    (quantised / "config.json").write_text(json.dumps(data))
    (quantised / "hf_quant_config.json").write_text(json.dumps({
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": config["quant_algo"], "exclude_modules": ["lm_head"]}}))
    part = loaded(quantised).blocks[0].feed_forward.down.parts[0]
    assert isinstance(part, QWeight)
    assert np.array_equal(part.matrix.dequantize().numpy(),
                          loaded(plain).blocks[0].feed_forward.down.weight.numpy())
