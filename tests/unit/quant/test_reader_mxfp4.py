"""gpt-oss's experts, against transformers' dequantiser."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.quant.reader_case import LAYER, layer_of, matrix_of, read, same
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models.checkpoint import open_checkpoint, read_array
from tinygrad_nv.models.parts import read_part
from tinygrad_nv.quant.cut import cut_matrix, part_of
from tinygrad_nv.quant.readers.mxfp4 import reader
from tinygrad_nv.quant.readers.reader import TensorPart
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import MXFP4

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


def test_unquantised_layers():
    plain = {f"{LAYER}.weight": torch.zeros(16, 64, dtype=torch.bfloat16)}
    assert matrix_of(CONFIG, plain, (16, 64)) is None
