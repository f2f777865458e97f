"""Matrices of fp8, against transformers' dequantiser, and against the definition where it has none.
gpt-oss's experts, against transformers' dequantiser. torchao's tensors, by the parts that transformers
stores of them, against what they stand for."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tinygrad.dtype import dtypes
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.quant.reader_case import LAYER, Tensors, layer_of, matrix_of, read, same
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models.checkpoint import open_checkpoint, read_array
from tinygrad_nv.models.parts import read_part
from tinygrad_nv.quant.cut import cut_matrix, part_of
from tinygrad_nv.quant.readers.mxfp4 import reader
from tinygrad_nv.quant.readers.reader import Activations, TensorPart
from tinygrad_nv.quant.readers.schemes import cache_of
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import E4M3, INT8, MXFP4, NVFP4, UINT8, QType, Scale

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


EXPERTS = "model.layers.0.mlp.experts"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def case(*shape: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return {"blocks": torch.randint(0, 256, (*shape, 16), generator=make).to(torch.uint8),
            "scales": torch.randint(100, 140, shape, generator=make).to(torch.uint8)}


def test_experts(tmp_path: Path):
    """Of a file that has all of them in one tensor, gate and up in turn."""
    gate_up, down = case(3, 40, 5), case(3, 160, 1)
    save_file({f"{EXPERTS}.{matrix}_{name}": each for matrix, stored in (("gate_up_proj", gate_up),
               ("down_proj", down)) for name, each in stored.items()}, tmp_path / "model.safetensors")
    entries = open_checkpoint(tmp_path).entries
    stored = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    wanted = {}
    for matrix, each in (("gate_up_proj", gate_up), ("down_proj", down)):
        made = convert_moe_packed_tensors(each["blocks"], each["scales"]).transpose(1, 2)  # [E, N, K]
        wanted |= {"gate_proj": made[:, ::2], "up_proj": made[:, 1::2]} if "up" in matrix else {matrix: made}
    for name, matrices in wanted.items():
        for i, matrix in enumerate(matrices):
            shape = tuple(matrix.shape)
            found = reader(CONFIG, "config.json").matrix(f"{EXPERTS}.{i}.{name}", shape, stored)
            assert found is not None
            assert found.type == MXFP4
            arrays = found.arrays(lambda name: read_array(entries[name]))
            assert same(QTensor.of(found.type, shape, arrays, "CPU"), matrix.contiguous())


@pytest.mark.parametrize(("name", "shape", "axis"), [
    ("gate_proj", (20, 128), 0), ("up_proj", (20, 128), 0), ("down_proj", (128, 64), 1)])
def test_parts_of_experts(tmp_path: Path, name: str, shape: tuple[int, int], axis: int):
    """Half of the bytes, which are rows of gate and up in turn, or blocks of columns."""
    save_file({f"{EXPERTS}.{matrix}_{kind}": each for matrix, stored in (
        ("gate_up_proj", case(2, 40, 4)), ("down_proj", case(2, 128, 2))) for kind, each in stored.items()},
        tmp_path / "model.safetensors")
    entries, layer = open_checkpoint(tmp_path).entries, f"{EXPERTS}.1.{name}"
    stored = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    whole = reader(CONFIG, "config.json").matrix(layer, shape, stored)
    assert whole is not None
    for first in (0, shape[axis] // 2):
        part = TensorPart(axis, first, shape[axis] // 2)
        own = part_of(reader(CONFIG, "config.json"), layer, shape, stored, part)
        assert own is not None
        sizes = list[int]()

        def get(name: str, region: TensorPart | None, sizes: list[int] = sizes) -> np.ndarray:
            found = read_part(entries[name], region)
            sizes.append(found.nbytes)
            return found
        made = own.read(get)
        cut = cut_matrix(whole, shape, axis, first, part.count, layer)
        for key, array in cut.arrays(lambda name: read_array(entries[name])).items():
            assert np.array_equal(made[key].reshape(array.shape), array)
        assert 2 * sum(sizes) == sum(entries[name].nbytes for name in own.tensors)


def test_experts_that_do_not_fit():
    stored = {f"{EXPERTS}.0.gate_up_proj_blocks": ("U8", (40, 5, 16)),
              f"{EXPERTS}.0.gate_up_proj_scales": ("U8", (20, 5))}
    with pytest.raises(WeightError, match=r"experts.0.gate_up_proj_scales is U8 \[20, 5\]"):
        reader(CONFIG, "config.json").matrix(f"{EXPERTS}.0.up_proj", (20, 160), stored)


def test_layers():
    stored = case(24, 2)
    wanted = convert_moe_packed_tensors(stored["blocks"][None], stored["scales"][None])[0].T.contiguous()
    tensors = layer_of({f"weight_{name}": each for name, each in stored.items()})
    assert same(read(CONFIG, tensors, (24, 64))[0], wanted)


def test_layers_beside_experts():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(CONFIG, plain, (16, 64)) is None


def config_of(kind: str, **data: Any) -> dict[str, Any]:
    """As transformers writes it."""
    whole = {"default": {"_type": kind, "_version": 2, "_data": {"set_inductor_config": True, **data}}}
    return {"quant_method": "torchao", "modules_to_not_convert": None, "quant_type": whole}


INT8_ROWS = config_of("Int8WeightOnlyConfig", granularity={"_type": "PerRow", "_data": {"dim": -1}})
MAPPING = {"_type": "MappingType", "_data": "ASYMMETRIC"}


def parts(codes: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None = None) -> Tensors:
    found = {"qdata": codes, "scale": scale} | ({} if zeros is None else {"zero_point": zeros})
    return layer_of({f"_weight_{name}": each for name, each in found.items()})


def wide(each: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """A number for each element, of one for each block."""
    return each.float().repeat_interleave(n // each.shape[0], 0).repeat_interleave(k // each.shape[1], 1)


@pytest.mark.parametrize(("blocks", "scale"), [((24, 1), Scale(1, 0)), ((1, 1), Scale(0, 0)),
                                               ((24, 3), Scale(1, 32)), ((3, 2), Scale(8, 48))])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes(kind: str, blocks: tuple[int, int], scale: Scale):
    codes, scales = torch.randint(-127, 127, (24, 96), generator=MAKE).to(torch.int8), scales_of(*blocks)
    zeros = torch.zeros(blocks, dtype=torch.int8) if kind == "int8" else None
    if kind == "fp8": codes = codes.clamp(-127, -2).view(torch.float8_e4m3fn)   # -1 is NaN
    found, activations = read(INT8_ROWS, parts(codes, scales, zeros), (24, 96))
    assert same(found, codes.float() * wide(scales, 24, 96))
    assert (found.type, activations) == ((INT8 if kind == "int8" else E4M3) @ scale, None)


def test_zero_points():
    """Of IntxUnpackedToInt8Tensor. The mapping of inputs says nothing of weights."""
    codes = torch.randint(-8, 8, (24, 96), generator=MAKE).to(torch.int8)
    scales, zeros = scales_of(24, 3).bfloat16(), torch.randint(-8, 8, (24, 3), generator=MAKE).to(torch.int8)
    tensors = parts(codes, scales, zeros)
    made, _ = read(config_of("IntxWeightOnlyConfig", mapping_type=MAPPING), tensors, (24, 96))
    assert same(made, (codes - wide(zeros, 24, 96)) * wide(scales, 24, 96))
    assert made.type.element == UINT8
    with pytest.raises(WeightError, match="_weight_zero_point is not 0"):
        read(config_of("Int8DynamicActivationIntxWeightConfig", act_mapping_type=MAPPING), tensors, (24, 96))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int4(dtype: torch.dtype):
    """Int4Tensor, whose zero points are added; products with such scales are exact in float32."""
    codes = torch.randint(-8, 8, (24, 96), generator=MAKE).to(torch.int8)
    scales = scales_of(3, 24).to(dtype)
    zeros = (torch.randn(3, 24, generator=MAKE) * .05).to(dtype)
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    found, _ = read(config_of("Int4WeightOnlyConfig", group_size=32), parts(packed, scales, zeros), (24, 96))
    assert same(found, codes * wide(scales.T, 24, 96) + wide(zeros.T, 24, 96))


def test_what_does_not_fit():
    codes, scales = torch.zeros(24, 96, dtype=torch.int8), scales_of(24, 1)
    def refused(message: str, *tensors: torch.Tensor) -> None:
        with pytest.raises(WeightError, match=message):
            matrix_of(INT8_ROWS, parts(*tensors), (24, 96))
    refused("_weight_qdata is I32", torch.zeros(24, 12, dtype=torch.int32), scales)
    refused("_weight_scale is ", codes, scales_of(24, 5))
    refused("_weight_zero_point is ", codes, scales, torch.zeros(24, 3, dtype=torch.int8))
    refused("_weight_zero_point is missing", codes[:, :48], scales_of(3, 24))
    assert matrix_of(INT8_ROWS, {f"{LAYER}.weight": scales_of(24, 96)}, (24, 96)) is None
