"""torchao's tensors, by the parts that transformers stores of them, against what they stand for."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.quant.reader_case import LAYER, Tensors, layer_of, matrix_of, read, same
from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.types import E4M3, INT8, UINT8, Scale

MAKE = torch.Generator().manual_seed(0)


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


def scales_of(*shape: int) -> torch.Tensor: return torch.rand(shape, generator=MAKE) * .01 + 1e-5


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
