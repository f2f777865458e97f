"""gpt-oss's experts, against transformers' dequantiser."""
from __future__ import annotations

import torch
from reader_case import LAYER, array_of, layer_of, matrix_of, read, same, stored_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tinygrad_nv.quant.readers.mxfp4 import reader
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import MXFP4

MATRICES = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def case(*shape: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return {"blocks": torch.randint(0, 256, (*shape, 16), generator=make).to(torch.uint8),
            "scales": torch.randint(100, 140, shape, generator=make).to(torch.uint8)}


def test_experts():
    stored = case(3, 40, 5)
    tensors = {f"{MATRICES}_{name}": each for name, each in stored.items()}
    wanted = convert_moe_packed_tensors(stored["blocks"], stored["scales"])     # [E, K, N]
    found = reader(CONFIG, "config.json").experts(MATRICES, 3, (40, 160), stored_of(tensors))
    assert found.type == MXFP4
    made = QTensor.of(found.type, (120, 160), found.arrays(lambda name: array_of(tensors[name])), "CPU")
    assert same(made, wanted.transpose(1, 2).reshape(120, 160).contiguous())


def test_layers():
    stored = case(24, 2)
    wanted = convert_moe_packed_tensors(stored["blocks"][None], stored["scales"][None])[0].T.contiguous()
    tensors = layer_of({f"weight_{name}": each for name, each in stored.items()})
    assert same(read(CONFIG, tensors, (24, 64))[0], wanted)


def test_unquantised_layers():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(CONFIG, plain, (16, 64)) is None
