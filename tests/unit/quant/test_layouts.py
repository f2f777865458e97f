"""Layouts of quantised matrices against the words of quant/types.py, element by element."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_quant_case import TYPES, bits_of, numbers_of, stored
from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant import types
from tinygrad_nv.quant.layouts import rows_of
from tinygrad_nv.quant.packing import unpack
from tinygrad_nv.quant.tensor import QTensor, dequantize
from tinygrad_nv.quant.types import QType, buffers

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
