"""AutoAWQ's gemm layout, written here element by element, and read by compressed-tensors as well."""
from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from tinygrad.dtype import dtypes

from tests.support.quant.reader_case import LAYER, layer_of, matrix_of, read, same
from tinygrad_nv.quant.types import UINT4, QType, per_channel_scale, per_group_scale

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
          "modules_to_not_convert": None}


def word(fields: list[int]) -> int:
    """Eight outputs as int32: output 2i is nibble i, output 2i + 1 is nibble i + 4."""
    made = sum(fields[2 * i] << 4 * i | fields[2 * i + 1] << 4 * (i + 4) for i in range(4))
    return made - (1 << 32) if made >> 31 else made


def packed(codes: torch.Tensor) -> torch.Tensor:
    """int32 [R, C / 8] of codes [R, C]."""
    return torch.tensor([[word(row[i:i + 8]) for i in range(0, len(row), 8)] for row in codes.tolist()],
                        dtype=torch.int32)


def case(n: int, k: int, group: int, dtype: torch.dtype = torch.float16,
         seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A layer's tensors, and its matrix."""
    make = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (k, n), generator=make)
    zeros = torch.randint(0, 16, (-(-k // group), n), generator=make)
    scales = (torch.rand(zeros.shape, generator=make) * .01 + 1e-4).to(dtype)
    of = torch.arange(k) // group
    matrix = ((codes - zeros[of]).to(dtype) * scales[of]).T.contiguous()
    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales}, matrix


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 32, 32), (24, 96, 32), (136, 160, 32), (40, 4096, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_groups(n: int, k: int, group: int, dtype: torch.dtype):
    tensors, matrix = case(n, k, group, dtype)
    found, activations = read({**CONFIG, "group_size": group}, layer_of(tensors), (n, k))
    assert same(found, matrix)
    assert activations is None
    wanted = dtypes.float16 if dtype == torch.float16 else dtypes.bfloat16
    assert found.type == QType(UINT4, per_group_scale(group, wanted), zeros=True)


def test_as_compressed_tensors_reads_it():
    tensors, matrix = case(72, 128, 32)
    made = AutoAWQConverter(group_size=32).process(layer_of(tensors))
    scheme = AutoAWQConverter(group_size=32)._build_quant_config().config_groups["config_group_0"]
    state = {name.removeprefix(f"{LAYER}."): each for name, each in made.items()}
    assert torch.equal(PackedQuantizationCompressor.decompress(state, scheme)["weight"], matrix)
    assert same(read(CONFIG, layer_of(tensors), (72, 128))[0], matrix)


def test_one_group_of_all_inputs():
    tensors, matrix = case(16, 96, 96)
    found, _ = read({**CONFIG, "group_size": -1}, layer_of(tensors), (16, 96))
    assert same(found, matrix)
    assert found.type.scale == per_channel_scale(0, dtypes.float16)


def test_without_zero_points():
    tensors, _ = case(16, 64, 32)
    tensors["qzeros"] = packed(torch.full((2, 16), 8))
    with_zeros, _ = read(CONFIG, layer_of(tensors), (16, 64))
    del tensors["qzeros"]
    found, _ = read({**CONFIG, "zero_point": False}, layer_of(tensors), (16, 64))
    assert found.type == QType(UINT4, per_group_scale(32, dtypes.float16), shift=8)
    assert (found.dequantize().numpy() == with_zeros.dequantize().numpy()).all()


@pytest.mark.parametrize("names", [{"w_bit": 4, "q_group_size": 32, "version": "GEMM"},
                                   {"bits": 4, "group_size": 32, "format": "gemm"}])
def test_other_names_of_settings(names: dict[str, object]):
    tensors, matrix = case(16, 64, 32)
    assert same(read({"quant_method": "awq", **names}, layer_of(tensors), (16, 64))[0], matrix)


def test_more_rows_than_are_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinygrad_nv.quant.packing.CHUNK", 64 * 64)
    tensors, matrix = case(168, 64, 32)
    assert same(read(CONFIG, layer_of(tensors), (168, 64))[0], matrix)


def test_unquantised_layers():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(CONFIG, plain, (16, 64)) is None
