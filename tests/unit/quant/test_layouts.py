"""Layouts of quantised matrices against the words of quant/types.py, element by element. Parts of
quantised matrices: rows and columns of every format are those of the matrix they stand for, and a part
that would cut a group is refused by name. Stacks of matrices: other layouts have the same numbers, each
matrix padded to tiles of its own; outer scales that divide become ones that multiply. 2:4 sparse
matrices: which columns are kept, and what is stored comes back."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_quant_case import TYPES, bits_of, elements, numbers_of, stored
from tests.support.quant.directory_case import KINDS
from tests.support.quant.reader_case import LAYER, array_of, layer_of, matrix_of, stored_of
from tinygrad_nv.errors import SpecError, WeightError
from tinygrad_nv.quant import types
from tinygrad_nv.quant.cut import cut_matrix, part_of
from tinygrad_nv.quant.layouts import rows_of
from tinygrad_nv.quant.packing import unpack
from tinygrad_nv.quant.readers.reader import StoredMatrix, TensorPart, reader_of
from tinygrad_nv.quant.sparse import SparseTensor, codes_of, compress, pack_metadata, two_of_four
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import QTensor, dequantize, in_memory
from tinygrad_nv.quant.types import MXFP4, NVFP4, QType, Scale, buffers, stack_buffers

SINGLE = {name: type for name, type in TYPES.items() if all(
    scale is None or scale.rows == 1 for scale in (type.scale, type.outer))}
Arrays = dict[str, np.ndarray]


def fragments(type: QType, n: int, k: int, given: Arrays) -> Arrays:
    """The buffers in fragments."""
    wanted, have = buffers(replace(type, layout="fragments"), n, k), buffers(type, n, k)
    made: Arrays = {}
    for name, (shape, dtype) in wanted.items():
        if name == "order": made[name] = given[name]
        elif name in ("codes", "high"):
            bits = type.low_bits if name == "codes" else type.bits - type.low_bits
            words = np.zeros((*shape[:-1], shape[-1] // 4), np.uint32)
            for row, codes in enumerate(unpack(given[name].reshape(n, -1), bits)):
                for column, code in enumerate(codes): put(words, row, column, int(code), bits, type.unit)
            made[name] = words.reshape(-1).view(np.uint8)
        else:
            numbers, to = numbers_of(given[name], dtype, have[name].shape), np.zeros(shape, np.float32)
            for row in range(n):
                at = row % 16 * 2 if row % 16 < 8 else row % 8 * 2 + 1
                to[row // 16, :numbers.shape[1], at] = numbers[row]
            made[name] = bits_of(to, dtype)
    return made


def put(words: np.ndarray, row: int, column: int, code: int, bits: int, unit: int) -> None:
    """A code of an element, as operand A of mma.m16n8k16 has it."""
    inside = column % unit
    lane = row % 8 * 4 + inside % 8 // 2
    field = inside // 16 * 4 + inside % 16 // 8 * 2 + row % 16 // 8
    place = bits * (field % (16 // bits)) + 16 * (inside % 2)
    words[row // 16, column // unit, lane, field // (16 // bits)] |= np.uint32(code << place)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SINGLE)
def test_fragments(name: str):
    type = SINGLE[name]
    n, k = 21, 512 if type.outer is not None else 96
    given = stored(type, n, k, 1)
    w = QTensor.of(type, (n, k), given)
    made = w.with_layout("fragments")
    for each, wanted in fragments(type, n, k, given).items():
        np.testing.assert_array_equal(made.buffers[each].bitcast(dtypes.uint8).numpy().reshape(-1), wanted)
    np.testing.assert_array_equal(made.dequantize().numpy(), w.dequantize().numpy())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["e4m3 blocks", "uint8 tensor", "NVFP4"])
def test_scales_of_single_rows(name: str):
    type, (n, k) = TYPES[name], (130, 256)
    w = QTensor.of(type, (n, k), stored(type, n, k, 1))
    with pytest.raises(SpecError, match="single rows"): w.with_layout("fragments")
    single = w.of_rows()
    assert {scale.rows for scale in (single.type.scale, single.type.outer) if scale is not None} == {1}
    for made in (single, single.with_layout("fragments")):
        np.testing.assert_array_equal(made.dequantize().numpy(), w.dequantize().numpy())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["rows", "tiles", "fragments"])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "gptq 3 bits"])
def test_single_rows(name: str, layout: types.Layout):
    type, (n, k) = SINGLE[name], (35, 512)
    w = QTensor.of(type, (n, k), stored(type, n, k, 1))
    laid, rows = w.with_layout(layout), Tensor([0, 34, 9, 8, 7, 16, 9])
    given = {each: rows_of(laid.type, each, data, rows, k, lambda lines, at: lines[at])
             for each, data in laid.buffers.items()}
    made = dequantize(type, (7, k), given).numpy()
    np.testing.assert_array_equal(made, w.dequantize().numpy()[rows.numpy()])


@pytest.mark.slow
def test_a_matrix_without_its_order():
    type, (n, k) = TYPES["gptq 2 bits"], (16, 64)
    w = QTensor.of(type, (n, k), stored(type, n, k, 1))
    order = w.buffers["order"].numpy()
    np.testing.assert_array_equal(w.in_order().dequantize().numpy(), w.dequantize().numpy()[:, order])


@pytest.mark.parametrize(("element", "code", "finite"), [
    (types.E4M3, 0x7E, True), (types.E4M3, 0xFF, False), (types.E5M2, 0xFB, True), (types.E5M2, 0x7C, False),
    (types.INT8, 0x7F, True)])
def test_codes_that_are_numbers(element: types.Element, code: int, finite: bool):
    type = element @ types.per_channel_scale()
    given = {"codes": np.full((2, 8), code, np.uint8), "scales": np.ones((2, 1), np.float32)}
    assert QTensor.of(type, (2, 8), given).finite == finite


@pytest.mark.parametrize("name", SINGLE)
def test_each_buffer_has_memory_of_its_own(name: str):
    """With one block in a row, too, where scales in tiles are a permutation of extents of 1: captured steps
    name the memory that they read."""
    type, n = SINGLE[name], 32
    k = 256 if type.scale is None or not type.scale.columns else type.scale.columns
    if type.outer is not None: k = 256
    made = QTensor.of(type, (n, k), stored(type, n, k, 1)).with_layout("tiles")
    assert all(each.uop.has_buffer_identity() and each.uop.is_realized for each in made.buffers.values())


SHAPE = 256, 256
# of rows, and of columns: the first, and how many
PARTS = (0, 128, 128), (1, 128, 128)


def quantised(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a random matrix of a kind, and what they stand for."""
    torch.manual_seed(1)
    tensors, plain = KINDS[kind].quantise(torch.randn(SHAPE))
    return layer_of(tensors), plain


def layer_stored(kind: str) -> tuple[StoredMatrix, Any, np.ndarray]:
    """The matrix, what reads its tensors, and what they stand for."""
    named, plain = quantised(kind)
    found = matrix_of(KINDS[kind].config, named, SHAPE)
    assert found is not None
    return found, lambda name: array_of(named[name]), plain.numpy()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts(kind: str, part: tuple[int, int, int]):
    whole, get, plain = layer_stored(kind)
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
    whole, get, _ = layer_stored(kind)
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
    whole, _, _ = layer_stored(kind)
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


COUNT, N, K = 3, 20, 96
DIVIDED = replace(NVFP4, outer=Scale(1, 0), divided=True)
LAST = replace(types.INT8 @ types.per_channel_scale(), outer=types.per_channel_scale(), outer_last=True)


def made(type: QType) -> tuple[QStack, np.ndarray]:
    """A random stack in rows, and its numbers."""
    each = [stored(type, N, K, seed=i) for i in range(COUNT)]
    buffers = {}
    for name, (shape, dtype) in stack_buffers(type, (COUNT, N, K)).items():
        data = Tensor(np.concatenate([one[name] for one in each]), device="CPU")
        buffers[name] = data.bitcast(in_memory(dtype)).reshape(shape).contiguous()
    return QStack(type, (COUNT, N, K), buffers), np.stack([elements(type, N, K, one) for one in each])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tiles", "fragments"])
def test_layouts(layout: types.Layout):
    stack, wanted = made(MXFP4)
    assert np.array_equal(stack.dequantize().numpy(), wanted)
    assert np.array_equal(stack.with_layout(layout).dequantize().numpy(), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("type", [DIVIDED, LAST], ids=["divided", "last"])
def test_outer_scales_that_multiply(type: QType):
    """Within a unit of float32's last place for the reciprocal, and one for each multiplication."""
    stack, _ = made(type)
    wanted, found = stack.dequantize().numpy(), stack.with_multipliers()
    assert found.type == type.with_multipliers()
    np.testing.assert_allclose(found.dequantize().numpy(), wanted, rtol=3 * 2.0**-23, atol=0)


def test_the_two_largest_are_kept():
    """As a stable sort has them, of equal ones the first."""
    size = np.random.default_rng(0).integers(0, 4, (64, 128)).astype(np.float32)
    order = np.argsort(-size.reshape(-1, 4), -1, kind="stable")
    wanted = np.zeros((64 * 32, 4), bool)
    np.put_along_axis(wanted, order[:, :2], True, -1)
    np.testing.assert_array_equal(two_of_four(size), wanted.reshape(64, 128))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "kind"), [(dtypes.float16, np.float16), (dtypes.int8, np.int8)])
@pytest.mark.parametrize("shape", [(16, 64), (37, 132), (5, 4)])
def test_a_matrix_comes_back(dtype, kind, shape: tuple[int, int]):
    w = np.random.default_rng(1).integers(-9, 10, shape).astype(kind)
    kept = two_of_four(np.abs(w.astype(np.float32)))
    arrays = compress(w, kept) | {"scales": 2.0 ** (np.arange(shape[0], dtype=np.float32) % 8)[:, None]}
    made = SparseTensor.of(dtype, shape, arrays, "CPU")
    assert isinstance(made.values, Tensor)
    assert made.values.shape == (shape[0], shape[1] // 2)
    np.testing.assert_array_equal(made.dense().numpy(), w * kept * arrays["scales"])


def test_metadata_of_lanes():
    """Row 9's columns 20 and 22: 16-bit elements have them in lane 4 + 1, the upper half's second four bits;
    8-bit ones in lane 4 + 1 as rows from 8 on, its sixth."""
    kept = np.tile([True, True, False, False], (16, 16))
    kept[9, 20:24] = [True, False, True, False]
    for itemsize, lane, place in ((2, 4 + 1, 16 + 4), (1, 4 + 1, 20)):
        words = pack_metadata(codes_of(kept), itemsize).reshape(32)
        wanted = np.full(32, 0x44444444, np.uint32)
        wanted[lane] ^= (0b0100 ^ 0b1000) << place
        np.testing.assert_array_equal(words, wanted)
