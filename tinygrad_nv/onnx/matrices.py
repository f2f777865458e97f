"""Quantised matrices of ONNX models as this package's.

Protocol: `fuse_dequantized(graph)` puts a node `tinygrad_nv.QuantMatMul` in the place of each MatMul and Gemm
whose second operand is made of constants by a DequantizeLinear (QDQ), or as Cast(codes) · scale; with the
Add of a bias behind it. `matrix_of` makes the QTensor of such constants, `matrix_of_blocks` that of
com.microsoft.MatMulNBits; both in the order in which kernels read it fastest. A matrix that is of no type of
quant/types.py is None, and is dequantised in the graph.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from onnx import TensorProto
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import prepare_matrix
from tinygrad_nv.onnx.elements import kind_of, plain, to_numpy
from tinygrad_nv.onnx.fusion import DOMAIN, names_read
from tinygrad_nv.onnx.model import Graph, Node
from tinygrad_nv.quant.packing import pack
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import INT8, UINT4, UINT8, QType, Scale

CODES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT4: (-8, 7),
    TensorProto.UINT4: (0, 15)}
WIDER = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT16, TensorProto.INT32,
         TensorProto.INT64)     # types that hold all codes, and differences of them
SCALES: dict[np.dtype, DType] = {np.dtype("float32"): dtypes.float32, np.dtype("float16"): dtypes.float16}


def fuse_dequantized(graph: Graph) -> Graph:
    """The graph with matmuls of quantised constants as one node each, in the graphs of nodes too."""
    writers = {name: node for node in graph.nodes for name in node.outputs}
    nodes = []
    for node in graph.nodes:
        inner = {name: fuse_dequantized(each) if isinstance(each, Graph) else each
                 for name, each in node.attributes.items()}
        nodes.append(_fuse_node(replace(node, attributes=inner), graph, writers))
    before = Counter((*names_read(graph), *graph.outputs))
    nodes = _with_biases(nodes, graph, before)
    read = Counter((*names_read(replace(graph, nodes=tuple(nodes))), *graph.outputs))
    live = []
    for node in reversed(nodes):
        # what is read no more; what never was stays, for what it may refuse
        if any(read[name] or not before[name] for name in node.outputs): live.append(node)
        else: read.subtract(names_read(replace(graph, nodes=(node,))))
    return replace(graph, nodes=tuple(live[::-1]))


def _fuse_node(node: Node, graph: Graph, writers: dict[str, Node]) -> Node:
    """A MatMul or Gemm of a dequantised constant as one node, another node as it is."""
    a = node.attributes
    if node.domain or node.op not in ("MatMul", "Gemm") or a.get("transA", 0) or a.get("alpha", 1.0) != 1 \
            or a.get("beta", 1.0) != 1: return node
    name, transposed = node.inputs[1], bool(a.get("transB", 0))
    while (source := writers.get(name)) is not None and source.op in ("Transpose", "Identity"):
        if source.op == "Transpose":
            if source.attributes.get("perm", [1, 0]) != [1, 0]: return node
            transposed = not transposed
        name = source.inputs[0]
    if (found := _codes(source, graph, writers)) is None: return node
    options = {"axis": found.axis, "block_size": found.block, "transposed": int(transposed)}
    return Node("QuantMatMul", DOMAIN, 1, node.name, (node.inputs[0], *found.names, *node.inputs[2:]),
                node.outputs, options, node.proto)


def _with_biases(nodes: list[Node], graph: Graph, read: Counter[str]) -> list[Node]:
    """Nodes with the Add of a constant to each row of a quantised matmul as part of the matmul."""
    made = {node.outputs[0]: node for node in nodes if node.op == "QuantMatMul" and len(node.inputs) == 4}
    out = []
    for node in nodes:
        for name, bias in (node.inputs, node.inputs[::-1]) if node.op == "Add" and not node.domain else ():
            matmul = made.get(name)
            if matmul is not None and read[name] == 1 and bias in graph.constants \
                    and len(plain(graph.constants[bias]).shape) == 1:
                node = replace(matmul, inputs=(*matmul.inputs, bias), outputs=node.outputs)
                break
        out.append(node)
    return out


@dataclass(frozen=True)
class _Codes:
    """Names of the constants codes, scale and zero point ("": 0), along which axis the latter two are, and in
    blocks of how many elements (0: of none)."""
    names: tuple[str, str, str]
    axis: int
    block: int = 0


def _codes(source: Node | None, graph: Graph, writers: dict[str, Node]) -> _Codes | None:
    """The constants that a node dequantises: DequantizeLinear, or Cast(codes) · scale, less a zero point."""
    if source is None or source.domain: return None
    if source.op == "DequantizeLinear":
        codes, scale, zero = (*source.inputs, "")[:3]
        made = _Codes((codes, scale, zero), source.attributes.get("axis", 1),
                      source.attributes.get("block_size", 0))
        return made if all(each in graph.constants for each in made.names if each) else None
    if source.op != "Mul": return None
    for scale, name in (source.inputs, source.inputs[::-1]):
        if scale in graph.constants and (given := _read(name, graph, writers)) is not None:
            return _along(*given, scale, graph)
    return None


def _read(name: str, graph: Graph, writers: dict[str, Node]) -> tuple[str, str] | None:
    """Codes and zero point of Cast(codes), or of Cast(codes) less a zero point."""
    zero, widened = "", False
    while (node := writers.get(name)) is not None and not node.domain:
        if node.op == "Sub" and not zero and (point := _constant_behind(node.inputs[1], graph, writers)):
            zero, widened = point, False
        elif node.op == "Cast" and node.attributes["to"] in WIDER: widened = True
        elif node.op != "Identity": return None
        name = node.inputs[0]
    codes = graph.constants.get(name)
    # int8 less int8 would wrap around
    return (name, zero) if widened and codes is not None and kind_of(codes) in CODES else None


def _constant_behind(name: str, graph: Graph, writers: dict[str, Node]) -> str:
    """The constant that a name is, or is cast from to a wider type; "" of another."""
    while name not in graph.constants:
        node = writers.get(name)
        if node is None or node.op != "Cast" or node.domain or node.attributes["to"] not in WIDER: return ""
        name = node.inputs[0]
    return name


def _along(codes: str, zero: str, scale: str, graph: Graph) -> _Codes | None:
    """Returns these constants, if scale and zero point are numbers or lie along one axis, and the zero point
    is one of the codes."""
    shapes = set[tuple[int, ...]]()
    for each in filter(None, (scale, zero)):
        shape = plain(graph.constants[each]).shape
        if prod(shape) != 1: shapes.add((1,) * (2 - len(shape)) + shape)
    if len(plain(graph.constants[codes]).shape) != 2 or len(shapes) > 1: return None
    if any(len(shape) != 2 or 1 not in shape for shape in shapes): return None
    if zero:
        points, (least, most) = to_numpy(graph.constants[zero]), CODES[kind_of(graph.constants[codes])]
        if not np.all((points >= least) & (points <= most) & (points == np.trunc(points))): return None
    return _Codes((codes, scale, zero), 1 if not shapes or shapes.pop()[0] == 1 else 0)


# **** matrices ****

def matrix_of(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, axis: int, block: int,
              transposed: bool) -> QTensor | None:
    """The matrix [outputs, inputs] of codes [inputs, outputs], or `transposed` [outputs, inputs], of int8,
    uint8, int4 or uint4, with scales and zero points along `axis`, in blocks of `block` if that is not 0."""
    if codes.ndim != 2 or scale.dtype not in SCALES: return None
    bits = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}.get(codes.dtype.name)
    if bits is None: return None
    signed = codes.dtype.name.startswith("int")
    if zero is not None: scale, zero = np.broadcast_arrays(scale, zero)
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
    return _make_matrix(numbers.astype(np.uint8), scales, zeros.astype(np.uint8), grid, bits)


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
    return _make_matrix(numbers, scales.reshape(n, blocks), points, Scale(1, size, SCALES[scales.dtype]),
                        bits)


def _numbers(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes of bytes."""
    return data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def _make_matrix(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, grid: Scale,
          bits: int) -> QTensor | None:
    """The matrix of unsigned codes; zero points that all are the middle make it symmetric. A row of half a
    byte is kept as codes of 8 bits."""
    if numbers.shape[1] % 2:
        if bits == 4 and (zeros == 8).all(): numbers, zeros = numbers + 120, zeros + 120
        bits = 8
    half = 1 << (bits - 1)
    arrays = {"scales": np.ascontiguousarray(scales)}
    if symmetric := bool((zeros == half).all()):
        kind = QType(INT8, grid) if bits == 8 else QType(UINT4, grid, shift=half)
    else: kind, arrays["zeros"] = QType(UINT8 if bits == 8 else UINT4, grid, zeros=True), zeros
    if bits == 8: arrays["codes"] = (numbers ^ 128).view(np.int8) if symmetric else numbers
    else: arrays["codes"] = pack(numbers, 4)
    try: return prepare_matrix(QTensor.of(kind, (numbers.shape[0], numbers.shape[1]), arrays))
    except SpecError: return None
