"""bitsandbytes' layouts, written here element by element as its QuantState does."""
from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.support.quant.reader_case import LAYER, layer_of, matrix_of, read, same
from tinygrad_nv.quant.types import FP4, NF4, QType, Scale, per_channel_scale, per_group_scale

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BOOKS = {"nf4": NF4.values, "fp4": FP4.values}


def json_of(settings: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


def case(n: int, k: int, kind: str = "nf4", size: int = 64,
         nested: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer's tensors, and its matrix; `nested` is the block size of scales' scales."""
    make = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n * k,), generator=make).tolist()
    count = -(-n * k // size)
    settings = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [n, k]}
    book = torch.tensor(BOOKS[kind])
    stored = {"weight": torch.tensor([[a << 4 | b] for a, b in zip(codes[::2], codes[1::2], strict=True)],
                                     dtype=torch.uint8), "weight.quant_map": book}
    scales = torch.rand(count, generator=make) * .1
    if nested:
        numbers = torch.rand(256, generator=make) * 2 - 1
        larger = torch.rand(-(-count // nested), generator=make)
        small = torch.randint(0, 256, (count,), generator=make)
        offset = .0123456789
        scales = torch.stack([numbers[code] * larger[i // nested] + torch.tensor(offset)
                              for i, code in enumerate(small)])
        settings |= {"nested_blocksize": nested, "nested_offset": offset, "nested_dtype": "float32"}
        stored |= {"weight.absmax": small.to(torch.uint8), "weight.nested_quant_map": numbers,
                   "weight.nested_absmax": larger}
    else: stored["weight.absmax"] = scales
    stored[f"weight.quant_state.bitsandbytes__{kind}"] = json_of(settings)
    matrix = torch.stack([book[code] * scales[i // size] for i, code in enumerate(codes)])
    return stored, matrix.reshape(n, k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("n", "k", "size"), [(8, 64, 64), (5, 192, 64), (3, 256, 128), (2, 4096, 4096)])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks(n: int, k: int, size: int, kind: str, dtype: torch.dtype):
    tensors, matrix = case(n, k, kind, size)
    found, activations = read(FOUR, layer_of(tensors), (n, k))
    assert same(found, matrix.to(dtype))
    assert found.type == (NF4 if kind == "nf4" else FP4) @ per_group_scale(size)
    assert activations is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 72, 8), (3, 96, 32), (5, 50, 2)])
def test_blocks_that_go_on_into_the_next_row(n: int, k: int, group: int):
    tensors, matrix = case(n, k)
    found, _ = read(FOUR, layer_of(tensors), (n, k))
    assert same(found, matrix)
    assert found.type.scale == per_group_scale(group)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "k", "nested"), [(16, 64, 256), (40, 512, 256), (8, 128, 4)])
def test_double_quantisation(n: int, k: int, nested: int):
    tensors, matrix = case(n, k, nested=nested)
    assert same(read(FOUR, layer_of(tensors), (n, k))[0], matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_stored_as_floats(dtype: torch.dtype):
    tensors, matrix = case(8, 64)
    tensors["weight"] = tensors["weight"].reshape(-1).view(dtype)[:, None]
    assert same(read(FOUR, layer_of(tensors), (8, 64))[0], matrix)


def test_int8():
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (24, 71), generator=make).to(torch.int8)
    scales = torch.rand(24, generator=make)
    stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    found, _ = read(EIGHT, layer_of(stored), (24, 71))
    assert found.type.outer_last
    assert found.type.scale == per_channel_scale()
    assert found.type.outer == Scale(0, 0)
    wanted = codes * scales.view(-1, 1) * 7.874015718698502e-3      # int8_vectorwise_dequant
    assert same(found, wanted)
    assert not torch.equal(wanted, codes * (scales.view(-1, 1) * 7.874015718698502e-3))


def test_unquantised_layers():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(FOUR, plain, (16, 64)) is None
    assert matrix_of(EIGHT, plain, (16, 64)) is None


def test_type_is_that_of_kernels():
    assert QType(NF4, per_group_scale(64)) == read(FOUR, layer_of(case(4, 64)[0]), (4, 64))[0].type
