"""Parts of quantised matrices: rows and columns of every format are those of the matrix they stand for, and a
part that would cut a group is refused by name."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.quant.directory_case import KINDS
from tests.support.quant.reader_case import LAYER, array_of, layer_of, matrix_of, stored_of
from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.cut import cut_matrix, part_of
from tinygrad_nv.quant.readers.reader import StoredMatrix, TensorPart, reader_of
from tinygrad_nv.quant.tensor import QTensor

SHAPE = 256, 256
# of rows, and of columns: the first, and how many
PARTS = (0, 128, 128), (1, 128, 128)


def quantised(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix of a kind, and what they stand for."""
    torch.manual_seed(1)
    tensors, plain = KINDS[kind].quantise(torch.randn(SHAPE))
    return layer_of(tensors), plain


def stored(kind: str) -> tuple[StoredMatrix, Any, np.ndarray]:
    """The matrix, what reads its tensors, and what they stand for."""
    named, plain = quantised(kind)
    found = matrix_of(KINDS[kind].config, named, SHAPE)
    assert found is not None
    return found, lambda name: array_of(named[name]), plain.numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts(kind: str, part: tuple[int, int, int]):
    whole, get, plain = stored(kind)
    axis, first, count = part
    if axis and whole.type.permuted:
        with pytest.raises(WeightError, match="act order"): cut_matrix(whole, SHAPE, *part, LAYER)
        return
    cut = cut_matrix(whole, SHAPE, *part, LAYER)
    shape = (count, SHAPE[1]) if axis == 0 else (SHAPE[0], count)
    made = QTensor.of(cut.type, shape, cut.arrays(get), "CPU").dequantize().numpy()
    if kind == "ct-nvfp4": made = torch.from_numpy(made).bfloat16().float().numpy()
    assert np.array_equal(made, plain[first:first + count] if axis == 0 else plain[:, first:first + count])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts_are_read_alone(kind: str, part: tuple[int, int, int]):
    """The same buffers as of a matrix that is read whole and cut, from half of the bytes of its tensors. Of
    nf4 alone, whose blocks may end in the middle of a row, all is read."""
    whole, get, _ = stored(kind)
    if part[0] and whole.type.permuted: return      # refused: test_parts
    read = dict[str, int]()

    def of_part(name: str, region: TensorPart | None) -> np.ndarray:
        found = get(name)
        if region is not None:
            found = found.take(range(region.first, region.first + region.count), region.axis)
        read[name] = found.nbytes
        return found
    own = part_of(reader_of(KINDS[kind].config, "config.json"), LAYER, SHAPE, stored_of(quantised(kind)[0]),
                  TensorPart(*part))
    assert own is not None
    cut = cut_matrix(whole, SHAPE, *part, LAYER)
    made, wanted = own.read(of_part), cut.arrays(get)
    assert (own.type, own.activations, made.keys()) == (cut.type, cut.activations, wanted.keys())
    for name, array in wanted.items():
        assert np.array_equal(np.ascontiguousarray(made[name]).reshape(-1).view(np.uint8),
                              np.ascontiguousarray(array).reshape(-1).view(np.uint8)), name
    every = sum(get(name).nbytes for name in read)
    assert sum(read.values()) == pytest.approx(every if kind == "nf4" else every / 2, rel=0.05)


@pytest.mark.parametrize(("kind", "part", "words"), [
    ("awq", (1, 48, 64), ("columns 48 to 112", "a scale is of 32 columns", "whole groups of 32", LAYER)),
    ("awq", (1, 64, 80), ("columns 64 to 144", "a scale is of 32 columns")),
    ("fp8", (0, 64, 64), ("rows 64 to 128", "a scale is of 128 rows", "fewer tensor parallel ranks")),
    ("gptq-3-bits", (1, 128, 128), ("columns 128 to 256", "act order", "desc_act"))])
def test_groups_that_would_be_cut(kind: str, part: tuple[int, int, int], words: tuple[str, ...]):
    whole, _, _ = stored(kind)
    with pytest.raises(WeightError) as raised: cut_matrix(whole, SHAPE, *part, LAYER)
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_last_group_may_be_smaller():
    """Of 200 rows in blocks of 128 the last have 72, and are a part."""
    torch.manual_seed(1)
    tensors, plain = KINDS["fp8"].quantise(torch.randn(200, 256))
    named = layer_of(tensors)
    found = matrix_of(KINDS["fp8"].config, named, (200, 256))
    assert found is not None
    cut = cut_matrix(found, (200, 256), 0, 128, 72, LAYER)
    made = QTensor.of(cut.type, (72, 256), cut.arrays(lambda name: array_of(named[name])), "CPU")
    assert np.array_equal(made.dequantize().numpy(), plain.numpy()[128:])
