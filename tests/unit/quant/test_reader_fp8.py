"""Matrices of fp8, against transformers' dequantiser, and against the definition where it has none."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from tinygrad.dtype import dtypes
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.support.quant.reader_case import LAYER, layer_of, matrix_of, read, same
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.readers.schemes import cache_of
from tinygrad_nv.quant.types import E4M3, NVFP4, QType, Scale

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
MAKE = torch.Generator().manual_seed(0)


def codes_of(n: int, k: int) -> torch.Tensor:
    """Random numbers, and all that there are: subnormals, both zeros."""
    made = torch.randint(0, 256, (n, k), generator=MAKE).to(torch.uint8)
    made[(made & 127) == 127] = 0x80
    return made.view(torch.float8_e4m3fn)


def scales_of(*shape: int) -> torch.Tensor: return torch.rand(shape, generator=MAKE) * .01 + 1e-5


def by_blocks(codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    n, k = codes.shape
    return codes.float() * scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]


@pytest.mark.parametrize(("n", "k", "block"), [(256, 384, 128), (64, 96, 32), (16, 16, 16), (96, 64, 128)])
def test_blocks_as_transformers(n: int, k: int, block: int):
    codes, scales = codes_of(n, k), scales_of(-(-n // block), -(-k // block))
    found, activations = read({**BLOCKS, "weight_block_size": [block, block]},
                              layer_of({"weight": codes, "weight_scale_inv": scales}), (n, k))
    assert same(found, Fp8Dequantize(None)._dequantize_one(codes, scales))
    assert activations == Activations("e4m3", Scale(1, block))


@pytest.mark.parametrize(("n", "k"), [(130, 300), (1, 129), (257, 128)])
def test_blocks_that_are_cut_off(n: int, k: int):
    codes, scales = codes_of(n, k), scales_of(-(-n // 128), -(-k // 128))
    found, _ = read(BLOCKS, layer_of({"weight": codes, "weight_scale_inv": scales}), (n, k))
    assert same(found, by_blocks(codes, scales, 128, 128))
    assert found.type == E4M3 @ Scale(128, 128)


def test_blocks_other_than_those_of_the_config():
    codes, scales = codes_of(64, 96), scales_of(2, 3)
    found, _ = read(BLOCKS, layer_of({"weight": codes, "weight_scale_inv": scales}), (64, 96))
    assert same(found, Fp8Dequantize(None)._dequantize_one(codes, scales))


@pytest.mark.parametrize("stored", ["uint8", "e8m0"])
def test_scales_of_powers_of_two(stored: str):
    codes, scales = codes_of(256, 128), torch.randint(90, 130, (2, 1), generator=MAKE).to(torch.uint8)
    if stored == "e8m0": scales = scales.view(torch.float8_e8m0fnu)
    config = {**BLOCKS, "scale_fmt": "ue8m0"}
    found, _ = read(config, layer_of({"weight": codes, "weight_scale_inv": scales}), (256, 128))
    assert found.type.scale == Scale(128, 128, dtypes.uint8, e8m0=True)
    assert same(found, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_one_scale(shape: tuple[int, ...], name: str):
    codes, scale = codes_of(24, 40), scales_of(1).reshape(shape)
    tensors = layer_of({"weight": codes, name: scale, "input_scale": torch.tensor(.1)})
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    found = matrix_of(config, tensors, (24, 40))
    assert found is not None
    assert f"{LAYER}.input_scale" in found.tensors
    assert found.activations == Activations("e4m3", Scale(0, 0), static=True)
    assert same(read(config, tensors, (24, 40))[0], codes.float() * scale)


def test_fbgemm():
    codes, scales = codes_of(24, 40), scales_of(24, 1)
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    found, activations = read(config, layer_of({"weight": codes, "weight_scale": scales}), (24, 40))
    assert same(found, codes.float() * scales)
    assert found.type == QType(E4M3, Scale(1, 0))
    assert activations == Activations("e4m3", Scale(1, 0))


@pytest.mark.parametrize(("algorithm", "shape", "blocks"), [
    ("FP8", (), (0, 0)), ("FP8_PER_CHANNEL_PER_TOKEN", (160,), (1, 0)), ("FP8_PB_WO", (2, 2), (128, 128)),
    ("FP8_PB_WO", (2, 1, 2, 1), (128, 128))])
def test_modelopt(algorithm: str, shape: tuple[int, ...], blocks: tuple[int, int]):
    codes, scales = codes_of(160, 192), scales_of(*shape)
    stored = {"weight": codes, "weight_scale": scales, "input_scale": torch.tensor(.5)}
    config = {**MODELOPT, "quant_algo": algorithm}
    found, _ = read(config, layer_of(stored), (160, 192))
    assert found.type.scale == Scale(*blocks)
    flat = scales.reshape(found.type.scale.blocks(160, 192))
    assert same(found, by_blocks(codes, flat, blocks[0] or 160, blocks[1] or 192))


@pytest.mark.parametrize("config", [
    {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    {**MODELOPT, "quant_algo": "W4A16_NVFP4"}])
def test_modelopt_nvfp4(config: dict[str, Any]):
    codes = torch.randint(0, 256, (20, 48), generator=MAKE).to(torch.uint8)
    scales, outer = (scales_of(20, 6) * 4e4).to(torch.float8_e4m3fn), torch.tensor(1.7e-4)
    stored = {"weight": codes, "weight_scale": scales, "weight_scale_2": outer,
              "input_scale": torch.tensor(1.)}
    found, _ = read(config, layer_of(stored), (20, 96))
    book = torch.tensor([*NVFP4.element.values])
    numbers = book[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    assert found.type == NVFP4
    assert same(found, numbers * (scales.float() * outer).repeat_interleave(16, 1))


def test_modelopt_mxfp8_and_mixed():
    codes, scales = codes_of(16, 96), torch.randint(100, 130, (16, 3), generator=MAKE).to(torch.uint8)
    config = {**MODELOPT, "quant_algo": "MIXED_PRECISION",
              "quantized_layers": {LAYER: {"quant_algo": "MXFP8"}}}
    tensors = layer_of({"weight": codes, "weight_scale": scales})
    found, _ = read(config, tensors, (16, 96))
    assert same(found, by_blocks(codes, torch.exp2(scales.float() - 127), 1, 32))
    assert matrix_of(config, tensors, (16, 96), "model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize("config", [BLOCKS, MODELOPT, {"quant_method": "fbgemm_fp8"}])
def test_unquantised_layers(config: dict[str, Any]):
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(config, plain, (16, 64)) is None


@pytest.mark.parametrize("config", [
    {**MODELOPT, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
    {**BLOCKS, "kv_cache_scheme": "static"}])
def test_cache(config: dict[str, Any]):
    assert cache_of(config, "config.json") == Activations("e4m3", Scale(0, 0), static=True)
    assert cache_of(BLOCKS, "config.json") is None


def test_a_cache_alone():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert matrix_of(config, plain, (16, 64)) is None
