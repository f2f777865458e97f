"""Quantised matrices of ONNX models as this package's.

Protocol: `dequantized(graph)` puts a node `tinygrad_nv.QuantMatMul` in the place of each MatMul and Gemm
whose second operand a DequantizeLinear makes of constants (QDQ). `matrix_of` makes the QTensor of such
constants, `matrix_of_blocks` that of com.microsoft.MatMulNBits; both in the order in which kernels read it
fastest. A matrix that is of no type of quant/types.py is None, and is dequantised in the graph.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import prepared
from tinygrad_nv.onnx.fusion import DOMAIN, names_read
from tinygrad_nv.onnx.model import Graph, Node
from tinygrad_nv.quant.packing import packed
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import INT8, UINT4, UINT8, QType, Scale

SCALES: dict[np.dtype, DType] = {np.dtype("float32"): dtypes.float32, np.dtype("float16"): dtypes.float16}


def dequantized(graph: Graph) -> Graph:
    """The graph with matmuls of quantised constants as one node each, in the graphs of nodes too."""
    writers = {name: node for node in graph.nodes for name in node.outputs}
    readers = Counter((*names_read(graph), *graph.outputs))
    nodes = []
    for node in graph.nodes:
        inner = {name: dequantized(each) if isinstance(each, Graph) else each
                 for name, each in node.attributes.items()}
        made = _quantised(replace(node, attributes=inner), graph, writers)
        nodes.append(made)
        if made.op == "QuantMatMul": readers[node.inputs[1]] -= 1
    unread = {name for name, number in readers.items() if number == 0}
    return replace(graph, nodes=tuple(each for each in nodes if not unread.issuperset(each.outputs)))


def _quantised(node: Node, graph: Graph, writers: dict[str, Node]) -> Node:
    """A MatMul or Gemm of a dequantised constant as one node, another node as it is."""
    a = node.attributes
    if node.domain or node.op not in ("MatMul", "Gemm") or a.get("transA", 0) or a.get("alpha", 1.0) != 1 \
            or a.get("beta", 1.0) != 1: return node
    source = writers.get(node.inputs[1])
    if source is None or source.op != "DequantizeLinear" or source.domain: return node
    if not all(name in graph.constants for name in source.inputs if name): return node
    constants = (*source.inputs, "")[:3]
    options = {"axis": source.attributes.get("axis", 1), "block_size": source.attributes.get("block_size", 0),
               "transposed": a.get("transB", 0)}
    return Node("QuantMatMul", DOMAIN, 1, node.name, (node.inputs[0], *constants, *node.inputs[2:]),
                node.outputs, options, node.proto)


# **** matrices ****

def matrix_of(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, axis: int, block: int,
              transposed: bool) -> QTensor | None:
    """The matrix [outputs, inputs] of codes [inputs, outputs], or `transposed` [outputs, inputs], of int8,
    uint8, int4 or uint4, with scales and zero points along `axis`, in blocks of `block` if that is not 0."""
    if codes.ndim != 2 or scale.dtype not in SCALES: return None
    bits = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}.get(codes.dtype.name)
    if bits is None: return None
    signed = codes.dtype.name.startswith("int")
    numbers = codes.astype(np.int16)
    zeros = np.zeros(scale.shape, np.int16) if zero is None else zero.astype(np.int16)
    of_inputs = axis % 2 == (1 if transposed else 0)
    if not transposed: numbers = numbers.T
    if block: columns = block if of_inputs else -1
    elif scale.size == 1: columns = 0
    else: columns = -1 if of_inputs else 0
    if columns < 0: return None
    scales, zeros = (_grid(each, transposed) for each in (scale, zeros))
    grid = Scale(0 if scale.size == 1 and not block else 1, columns, SCALES[scale.dtype])
    half = 1 << (bits - 1)
    if signed: numbers, zeros = numbers + half, zeros + half
    return _made(numbers.astype(np.uint8), scales, zeros.astype(np.uint8), grid, bits)


def _grid(scales: np.ndarray, transposed: bool) -> np.ndarray:
    """Scales as [blocks of outputs, blocks of inputs]."""
    if scales.ndim < 2: return scales.reshape(-1, 1)
    return scales if transposed else scales.T


def matrix_of_blocks(data: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, n: int,
                     k: int, size: int) -> QTensor | None:
    """The matrix [n, k] of MatMulNBits: blocks of `size` inputs, 4-bit codes two to a byte, the lower
    first."""
    if scales.dtype not in SCALES or bits not in (4, 8) or (zeros is not None and zeros.dtype != np.uint8):
        return None
    blocks = -(-k // size)
    numbers = _numbers(data.reshape(n, -1), bits)[:, :k]
    points = np.full((n, blocks), 1 << (bits - 1), np.uint8) if zeros is None else \
        _numbers(zeros.reshape(n, -1), bits)[:, :blocks]
    return _made(numbers, scales.reshape(n, blocks), points, Scale(1, size, SCALES[scales.dtype]), bits)


def _numbers(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes of bytes."""
    return data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def _made(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, grid: Scale,
          bits: int) -> QTensor | None:
    """The matrix of unsigned codes; zero points that all are the middle make it symmetric."""
    half = 1 << (bits - 1)
    arrays = {"scales": np.ascontiguousarray(scales)}
    if symmetric := bool((zeros == half).all()):
        kind = QType(INT8, grid) if bits == 8 else QType(UINT4, grid, shift=half)
    else: kind, arrays["zeros"] = QType(UINT8 if bits == 8 else UINT4, grid, zeros=True), zeros
    if bits == 8: arrays["codes"] = (numbers ^ 128).view(np.int8) if symmetric else numbers
    else: arrays["codes"] = packed(numbers, 4)
    try: return prepared(QTensor.of(kind, (numbers.shape[0], numbers.shape[1]), arrays))
    except SpecError: return None   # a row of half a byte
