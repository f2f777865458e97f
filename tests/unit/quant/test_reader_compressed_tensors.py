"""Layers that compressed-tensors' own compressors write, against what they decompress to."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from tinygrad.dtype import dtypes

from tests.support.quant.reader_case import LAYER, layer_of, matrix_of, read, same
from tinygrad_nv.quant.readers.compressed_tensors import reader
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.readers.schemes import cache_of
from tinygrad_nv.quant.types import E4M3, INT8, NVFP4, QType, Scale

Tensors = dict[str, torch.Tensor]
ALL_BITS = range(1, 9)


def config_of(scheme: QuantizationScheme, **more: Any) -> dict[str, Any]:
    """A quantization_config with one group, as it is saved."""
    config = QuantizationConfig(config_groups={"group_0": scheme}, quantization_status="compressed", **more)
    return json.loads(config.model_dump_json())


def scheme_of(format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], format=format, weights=QuantizationArgs(**weights),
                              input_activations=QuantizationArgs(**inputs) if inputs else None)


def parameters(scheme: QuantizationScheme, n: int, k: int, dtype: torch.dtype) -> Tensors:
    """Random weights, and scales and zero points of the scheme's shapes."""
    args, make = scheme.weights, torch.Generator().manual_seed(n * k)
    rows, columns = args.block_structure or (1, args.group_size or k)
    shape = (1,) if args.strategy == "tensor" else (-(-n // rows), -(-k // columns))
    scale = (torch.rand(shape, generator=make) * .02 + .005).to(dtype)
    state = {"weight": (torch.randn(n, k, generator=make) * .1).to(dtype), "weight_scale": scale}
    if not args.symmetric:
        half = 1 << (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=make).to(torch.int8)
    return state


def compressed(scheme: QuantizationScheme, n: int, k: int,
               dtype: torch.dtype = torch.bfloat16) -> tuple[Tensors, torch.Tensor]:
    """What the package stores, and what it makes of that."""
    writer = BaseCompressor.get_value_from_registry(scheme.format)
    state = writer.compress(parameters(scheme, n, k, dtype), scheme)
    return state, writer.decompress(state, scheme)["weight"]


def agrees(scheme: QuantizationScheme, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    state, matrix = compressed(scheme, n, k, dtype)
    return same(read(config_of(scheme), layer_of(state), (n, k))[0], matrix)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_groups(bits: int, symmetric: bool):
    scheme = scheme_of("pack-quantized", num_bits=bits, strategy="group", group_size=32, symmetric=symmetric)
    assert agrees(scheme, 35, 96)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_channels_of_columns_that_fill_no_word(bits: int, symmetric: bool):
    scheme = scheme_of("pack-quantized", num_bits=bits, strategy="channel", symmetric=symmetric)
    assert agrees(scheme, 7, 72, torch.float16)


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_tensor(symmetric: bool):
    assert agrees(scheme_of("pack-quantized", num_bits=4, strategy="tensor", symmetric=symmetric), 9, 40)


def spaced(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as versions before 0.18 pack them: as many in a word as fit in it."""
    each, mask = 32 // bits, (1 << bits) - 1
    rows = [[sum((code + (1 << (bits - 1)) & mask) << i * bits for i, code in enumerate(row[j:j + each]))
             for j in range(0, len(row), each)] for row in codes.tolist()]
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_packed_as_older_versions_do(bits: int):
    make, half = torch.Generator().manual_seed(bits), 1 << (bits - 1)
    codes = torch.randint(-half, half, (64, 128), generator=make)
    zeros = torch.randint(-half, half, (64, 4), generator=make)
    scales = torch.rand(64, 4, generator=make).to(torch.float16)
    state = {"weight_packed": spaced(codes, bits), "weight_scale": scales,
             "weight_zero_point": spaced(zeros.T, bits).T.contiguous(),
             "weight_shape": torch.tensor([64, 128])}
    of = torch.arange(128) // 32
    scheme = scheme_of("pack-quantized", num_bits=bits, strategy="group", group_size=32, symmetric=False)
    found, _ = read(config_of(scheme), layer_of(state), (64, 128))
    assert same(found, (codes - zeros[:, of]).to(torch.float16) * scales[:, of])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_order_of_activations(bits: int, symmetric: bool):
    scheme = scheme_of("pack-quantized", num_bits=bits, strategy="group", group_size=32, symmetric=symmetric)
    state, matrix = compressed(scheme, 40, 128)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    config = config_of(scheme)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    groups = torch.empty(128, dtype=torch.int32)
    groups[order] = torch.arange(128, dtype=torch.int32) // 32
    # input k has the place inverse[k] in a matrix whose groups follow each other
    codes = unpack_from_int32(state["weight_packed"], bits, matrix.shape)
    inverse = torch.argsort(torch.argsort(groups, stable=True))
    state["weight_packed"] = pack_to_int32(codes[:, inverse].contiguous(), bits)
    found, _ = read(config, layer_of({**state, "weight_g_idx": groups}), (40, 128))
    assert found.type.permuted
    assert same(found, matrix[:, inverse])


def test_groups_without_an_order():
    scheme = scheme_of("pack-quantized", num_bits=4, strategy="group", group_size=32)
    state, matrix = compressed(scheme, 16, 64)
    for groups in (torch.full((64,), -1), torch.arange(64) // 32):
        tensors = layer_of({**state, "weight_g_idx": groups.to(torch.int32)})
        assert same(read(config_of(scheme), tensors, (16, 64))[0], matrix)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(strategy: str, symmetric: bool):
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    scheme = scheme_of("int-quantized", inputs, num_bits=8, strategy=strategy, symmetric=symmetric)
    assert agrees(scheme, 33, 71)
    state, _ = compressed(scheme, 8, 16)
    found, activations = read(config_of(scheme), layer_of(state), (8, 16))
    assert activations == Activations("int8", Scale(1, 0))
    if symmetric: assert found.type.element == INT8


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("strategy", "more"), [
    ("tensor", {}), ("channel", {}), ("group", {"group_size": 32}), ("block", {"block_structure": [16, 32]})])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
def test_fp8(strategy: str, more: dict[str, Any], dtype: torch.dtype, format: str):
    scheme = scheme_of(format, num_bits=8, type="float", strategy=strategy, **more)
    assert agrees(scheme, 40, 96 if strategy == "group" else 90, dtype)


def test_fp8_block_and_activations_of_groups():
    inputs = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    scheme = scheme_of("float-quantized", inputs, num_bits=8, type="float", strategy="block",
                       block_structure=[128, 128])
    state, matrix = compressed(scheme, 130, 300)
    found, activations = read(config_of(scheme), layer_of(state), (130, 300))
    assert same(found, matrix)
    assert found.type == QType(E4M3, Scale(128, 128, dtypes.bfloat16))
    assert activations == Activations("e4m3", Scale(1, 128))


def test_static_activations():
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    scheme = scheme_of("float-quantized", inputs, num_bits=8, type="float", strategy="tensor")
    state, _ = compressed(scheme, 8, 16)
    state["input_scale"] = torch.tensor([.5])
    found = matrix_of(config_of(scheme), layer_of(state), (8, 16))
    assert found is not None
    assert found.activations == Activations("e4m3", Scale(0, 0), static=True)
    assert f"{LAYER}.input_scale" in found.tensors


def test_int4_that_is_not_packed():
    assert agrees(scheme_of("naive-quantized", num_bits=4, strategy="group", group_size=32), 12, 64)


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(shape[1])).to(torch.uint8)


FP4 = {"num_bits": 4, "type": "float"}
FP8 = {"num_bits": 8, "type": "float"}
INT8_TOKENS, FP8_TOKENS = ({"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
                           for kind in ("int", "float"))
G32 = {"strategy": "group", "group_size": 32}
MICROSCALED = {"mxfp4-pack-quantized": (4, "weight_packed", 2),
               "mxfp6-pack-quantized": (6, "weight_packed", 4 / 3), "mxfp8-quantized": (8, "weight", 1)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", list(MICROSCALED))
def test_microscaled(format: str):
    bits, name, each = MICROSCALED[format]
    scheme = scheme_of(format, num_bits=bits, type="float", **G32, scale_dtype="torch.uint8")
    codes = random_bytes(24, int(160 / each))
    if format == "mxfp8-quantized": codes = (codes & 0xF7).view(torch.float8_e4m3fn)    # no NaN
    state = {name: codes, "weight_scale": random_bytes(24, 5, low=1, high=250)}
    matrix = BaseCompressor.get_value_from_registry(format).decompress(state, scheme)["weight"]
    assert same(read(config_of(scheme), layer_of(state), (24, 160))[0], matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4(dtype: torch.dtype):
    scheme = scheme_of("nvfp4-pack-quantized", **FP4, strategy="tensor_group", group_size=16)
    make = torch.Generator().manual_seed(1)
    state = {"weight_packed": random_bytes(20, 48), "weight_global_scale": torch.tensor([1234.567]),
             "weight_scale": (torch.rand(20, 6, generator=make) * 400).to(torch.float8_e4m3fn)}
    matrix = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
    found, _ = read(config_of(scheme), layer_of(state), (20, 96))
    assert found.type.divided
    assert found.type.scale == NVFP4.scale
    if dtype == torch.float32:      # before the package rounds
        book = torch.tensor([*found.type.element.values])
        codes = torch.stack([state["weight_packed"] & 15, state["weight_packed"] >> 4], -1).flatten(1).long()
        scales = state["weight_scale"].float() / state["weight_global_scale"]
        matrix = book[codes] * scales.repeat_interleave(16, 1)
    assert same(found, matrix)


TARGETS = [["Linear"], ["re:.*mlp.*"], [LAYER], ["re:.*down_proj"], ["re:.*up", "Linear"], ["Module"],
           ["up_proj"], ["re:up_proj"], ["LlamaMLP"], []]
IGNORED = [[], ["lm_head"], [LAYER], ["re:.*layers.0.*"], ["re:layers"], ["Linear"],
           ["re:.*self_attn", "up_proj"]]


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("ignore", IGNORED)
def test_targets_as_the_package_matches_them(targets: list[str], ignore: list[str]):
    module = torch.nn.Linear(2, 2)
    scheme = scheme_of("pack-quantized", num_bits=4, strategy="channel")
    scheme = scheme.model_copy(update={"targets": targets})
    found = reader(config_of(scheme, ignore=ignore), "config.json")
    for layer in (LAYER, "lm_head", "model.layers.10.self_attn.q_proj"):
        assert (found.group(layer) is not None) == is_match(layer, module, targets, ignore)


def test_groups_of_their_own_formats():
    args = {"re:.*up_proj": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
            "Linear": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
            "re:.*o_proj": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
            "re:.*proj": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}),
            LAYER.replace("up", "down"): ("pack-quantized", {"num_bits": 8, "strategy": "channel"})}
    groups = {f"group_{i}": scheme_of(format, **weights).model_copy(update={"targets": [target]})
              for i, (target, (format, weights)) in enumerate(args.items())}
    config = QuantizationConfig(config_groups=groups, format="mixed-precision", ignore=["re:.*gate_proj"])
    config = json.loads(config.model_dump_json())
    for name in ("up", "down", "gate"):
        layer = LAYER.replace("up", name)
        first = match_targets(layer, torch.nn.Linear(2, 2), args)[0]
        scheme = next(scheme for scheme in groups.values() if scheme.targets == [first])
        state, matrix = compressed(scheme, 16, 64)
        if name == "gate": assert matrix_of(config, layer_of(state, layer), (16, 64), layer) is None
        else: assert same(read(config, layer_of(state, layer), (16, 64), layer)[0], matrix)


@pytest.mark.parametrize(("inputs", "weights"), [
    (None, {"num_bits": 4, **G32}), (None, {"num_bits": 8, "strategy": "channel"}),
    (INT8_TOKENS, {"num_bits": 8, "strategy": "channel"}),
    (FP8_TOKENS, {"num_bits": 4, "strategy": "channel"}),
    (FP8_TOKENS, {**FP8, "strategy": "channel"}), (None, {**FP8, "strategy": "channel"}),
    (None, {**FP4, "strategy": "tensor_group", "group_size": 16}), (None, {**FP4, **G32}),
    (None, {**FP8, **G32, "scale_dtype": "torch.uint8"})])
def test_format_of_a_group_that_names_none(inputs: dict[str, Any] | None, weights: dict[str, Any]):
    scheme = scheme_of("pack-quantized", inputs, **weights).model_copy(update={"format": None})
    group = reader(config_of(scheme, format="mixed-precision"), "config.json").group(LAYER)
    assert group is not None
    assert group.format == infer_module_format(torch.nn.Linear, scheme).value


def test_config_inside_another():
    scheme = scheme_of("pack-quantized", num_bits=4, **G32)
    state, matrix = compressed(scheme, 16, 64)
    inside = config_of(scheme, format="pack-quantized")
    config = {"quant_method": "compressed-tensors", "quantization_config": inside, "sparsity_config": {}}
    assert same(read(config, layer_of(state), (16, 64))[0], matrix)


def test_transforms_that_are_in_the_weights():
    """As llmcompressor's SpinQuant writes R1 and R2."""
    scheme = scheme_of("pack-quantized", num_bits=4, strategy="group", group_size=32)
    state, matrix = compressed(scheme, 24, 64)
    rotations = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_output"},
                                               {"targets": ["Linear"], "location": "weight_input"}]}
    config = {**config_of(scheme), "transform_config": {"config_groups": {"R1": rotations}}}
    assert same(read(config, layer_of(state), (24, 64))[0], matrix)


def test_unquantised_layers():
    scheme = scheme_of("pack-quantized", num_bits=4, strategy="channel")
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(config_of(scheme), plain, (16, 64)) is None
    assert matrix_of(config_of(scheme_of("dense", num_bits=4, strategy="channel")), plain, (16, 64)) is None


def test_cache():
    scheme = scheme_of("pack-quantized", num_bits=4, strategy="channel")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    def of(**more: Any) -> Activations | None:
        return cache_of(config_of(scheme, kv_cache_scheme={**cache, **more}), "config.json")
    assert of() == Activations("e4m3", Scale(0, 0), static=True)
    assert of(strategy="attn_head", type="int") == Activations("int8", Scale(1, 0), static=True)
    assert of(strategy="token", dynamic=True) == Activations("e4m3", Scale(1, 0))
    for other in ({"num_bits": 4}, {"symmetric": False}, {"strategy": "channel"}): assert of(**other) is None
    assert cache_of(config_of(scheme), "config.json") is None
