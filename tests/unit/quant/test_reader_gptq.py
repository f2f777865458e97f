"""GPTQ's layouts, written here element by element as AutoGPTQ and GPTQModel do."""
from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.quant.reader_case import LAYER, array_of, layer_of, matrix_of, read, same
from tinygrad_nv.quant.types import INT8, UINT3, UINT4, UINT8, QType, Scale

CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
                          "sym": False, "checkpoint_format": "gptq_v2"}
FORMATS = {1: "gptq", 2: "gptq_v2"}


def words(fields: list[int], bits: int) -> list[int]:
    """A stream of bits, cut into words."""
    stream = sum(field << i * bits for i, field in enumerate(fields))
    return [stream >> 32 * i & 0xFFFFFFFF for i in range(-(-len(fields) * bits // 32))]


def tensor(columns: list[list[int]]) -> torch.Tensor:
    """int32 of words."""
    return torch.from_numpy(np.array(columns, dtype=np.uint32).view(np.int32))


def v1(fields: list[int], bits: int) -> list[int]:
    """Words of zero points of v1."""
    if bits == 3: return words([field - 1 & 7 for field in fields], bits)
    ones = sum(1 << i for i in range(0, 32, bits))
    return [word - ones & 0xFFFFFFFF for word in words(fields, bits)]


def case(n: int, k: int, group: int, bits: int = 4, version: int = 2, symmetric: bool = False,
         order: bool = False,
         dtype: torch.dtype = torch.float16) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer's tensors, and its matrix."""
    make = torch.Generator().manual_seed(n + k + bits)
    codes = torch.randint(0, 1 << bits, (k, n), generator=make)
    zeros = torch.randint(0, 1 << bits, (-(-k // group), n), generator=make)
    if symmetric: zeros[:] = 1 << (bits - 1)
    scales = (torch.rand(zeros.shape, generator=make) * .01 + 1e-4).to(dtype)
    of = torch.arange(k) // group
    if order: of = of[torch.randperm(k, generator=make)]
    points = [v1(row, bits) if version == 1 else words(row, bits) for row in zeros.tolist()]
    stored = {"qweight": tensor([words(column, bits) for column in codes.T.tolist()]).T.contiguous(),
              "qzeros": tensor(points), "scales": scales, "g_idx": of.to(torch.int32)}
    return stored, ((codes - zeros[of]).to(dtype) * scales[of]).T.contiguous()


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("n", "k", "group"), [(32, 32, 32), (96, 160, 32), (64, 416, 128)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_zero_points(n: int, k: int, group: int, bits: int, version: int):
    tensors, matrix = case(n, k, group, bits, version)
    config = {**CONFIG, "bits": bits, "group_size": group, "checkpoint_format": FORMATS[version]}
    assert same(read(config, layer_of(tensors), (n, k))[0], matrix)


def test_a_config_without_a_format_is_of_version_1():
    """As AutoGPTQ wrote it before there was another."""
    tensors, matrix = case(32, 32, 32, version=1)
    config = {key: value for key, value in CONFIG.items() if key != "checkpoint_format"}
    assert same(read(config, layer_of(tensors), (32, 32))[0], matrix)


@pytest.mark.parametrize(("bits", "wanted"), [(3, QType(UINT3, Scale(1, 32, dtypes.float16), shift=4)),
                                              (4, QType(UINT4, Scale(1, 32, dtypes.float16), shift=8)),
                                              (8, QType(INT8, Scale(1, 32, dtypes.float16)))])
def test_symmetric(bits: int, wanted: QType):
    tensors, matrix = case(64, 96, 32, bits, 1, symmetric=True)
    found, _ = read({**CONFIG, "bits": bits, "sym": True, "checkpoint_format": "gptq"}, layer_of(tensors),
                    (64, 96))
    assert same(found, matrix)
    assert found.type == wanted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_order_of_activations(bits: int, symmetric: bool):
    tensors, matrix = case(96, 160, 64, bits, symmetric=symmetric, order=True)
    found, _ = read({**CONFIG, "bits": bits, "sym": symmetric, "desc_act": True, "group_size": 64},
                    layer_of(tensors), (96, 160))
    assert same(found, matrix)
    assert found.type.permuted


def test_order_of_one_group():
    tensors, matrix = case(32, 96, 96, order=True)
    found, _ = read({**CONFIG, "desc_act": True, "group_size": -1}, layer_of(tensors), (32, 96))
    assert same(found, matrix)
    assert found.type == QType(UINT4, Scale(1, 0, dtypes.float16), zeros=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_scales(dtype: torch.dtype):
    tensors, matrix = case(32, 96, 32, dtype=dtype)
    assert same(read(CONFIG, layer_of(tensors), (32, 96))[0], matrix)


def test_without_g_idx():
    tensors, matrix = case(32, 96, 32)
    del tensors["g_idx"]
    assert same(read(CONFIG, layer_of(tensors), (32, 96))[0], matrix)


def test_more_rows_than_are_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinygrad_nv.quant.packing.CHUNK", 64 * 64)
    tensors, matrix = case(160, 64, 32, bits=3)
    assert same(read({**CONFIG, "bits": 3}, layer_of(tensors), (160, 64))[0], matrix)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("bits", [3, 4])
def test_memory(bits: int, order: bool, monkeypatch: pytest.MonkeyPatch):
    """What is needed beside the buffers does not grow with the matrix."""
    n, k = 2048, 1024
    monkeypatch.setattr("tinygrad_nv.quant.packing.CHUNK", 1 << 16)
    shapes = {"qweight": (k * bits // 32, n), "qzeros": (k // 32, n * bits // 32), "scales": (k // 32, n)}
    tensors = {name: torch.zeros(shape, dtype=torch.float16 if name == "scales" else torch.int32)
               for name, shape in shapes.items()}
    tensors["g_idx"] = (torch.arange(k) % 32 if order else torch.arange(k) // 32).to(torch.int32)
    found = matrix_of({**CONFIG, "bits": bits, "desc_act": order}, layer_of(tensors), (n, k))
    assert found is not None
    tracemalloc.start()
    made = found.arrays(lambda name: array_of(tensors[name.removeprefix(f"{LAYER}.")]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.4 * sum(each.nbytes for each in made.values())


def test_settings_of_single_layers():
    tensors, matrix = case(32, 64, 32, bits=8)
    config = {**CONFIG, "dynamic": {"-:.*k_proj": {}, "-:.*v_proj": None, "+:.*up_proj": {"bits": 8},
                                    ".*": {"bits": 3}}}
    found, _ = read(config, layer_of(tensors), (32, 64))
    assert same(found, matrix)
    assert found.type.element == UINT8
    other = LAYER.replace("up_proj", "down_proj")
    tensors, matrix = case(32, 64, 32, bits=3)
    assert same(read(config, layer_of(tensors, other), (32, 64), other)[0], matrix)
    assert matrix_of(config, {}, (32, 64), LAYER.replace("up_proj", "k_proj")) is None


def test_unquantised_layers():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.float16)}
    assert matrix_of(CONFIG, plain, (16, 64)) is None
