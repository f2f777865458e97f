"""UOps as ONNX nodes.

Protocol: `Graph(builder, names)` translates nodes; `names` are those of the function's inputs. `step(node)`
says which values a node needs and how it is written; `name(node)` writes what is needed first, without
recursion, since graphs are deep. What depends on no input is computed now and becomes an initializer.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import helper
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.exporting import elementwise
from tinygrad_nv.onnx.exporting.builder import Builder, type_of
from tinygrad_nv.onnx.exporting.contraction import (
    emit_look_up,
    emit_matmul,
    look_up,
    matmul,
    reshape,
    transpose,
)
from tinygrad_nv.onnx.exporting.elementwise import strong

SAME = (Ops.CONTIGUOUS, Ops.CONTIGUOUS_BACKWARD, Ops.DETACH, Ops.NOOP, Ops.COPY)
REDUCTIONS = {Ops.ADD: "ReduceSum", Ops.MAX: "ReduceMax", Ops.MUL: "ReduceProd"}
FOLDED = 1 << 26    # elements of a constant that is computed now, at most
LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Step:
    """How a node is written: from the values of other nodes, each in a dtype."""
    sources: tuple[tuple[UOp, DType], ...]
    emit: Callable[[Sequence[str]], str]


class Graph:
    """The nodes that have been written, by name."""

    def __init__(self, builder: Builder, names: Mapping[UOp, str]) -> None:
        self.b, self.inputs = builder, frozenset(names)
        self.names: dict[tuple[UOp, DType], str] = {(node, strong(node.dtype)): name
                                                    for node, name in names.items()}
        self._constants: dict[UOp, bool] = {}

    def name(self, node: UOp, dtype: DType | None = None) -> str:
        """The name of a node's value in a dtype, its own by default; writes it first."""
        wanted = node, strong(node.dtype) if dtype is None else dtype
        stack, steps = [wanted], dict[tuple[UOp, DType], Step]()
        while stack:
            key = stack[-1]
            if key in self.names:
                stack.pop()
                continue
            if key not in steps: steps[key] = self.step(*key)
            step = steps[key]
            missing = [each for each in step.sources if each not in self.names]
            stack += missing
            if not missing: self.names[key] = step.emit([self.names[each] for each in step.sources])
        return self.names[wanted]

    def step(self, node: UOp, dtype: DType) -> Step:
        """How a node is written in a dtype."""
        if node.op is Ops.CONST:
            return Step((), lambda _: elementwise.number(self.b, node.arg, dtype))
        if dtype != strong(node.dtype):
            return Step(((node, strong(node.dtype)),),
                        lambda names: self.b.node("Cast", *names, to=type_of(dtype)))
        if node.op is Ops.BUFFER or self.constant(node):
            return Step((), lambda _: self.fold(node))
        return self._step(node)

    def _step(self, node: UOp) -> Step:
        """How a node that depends on inputs is written in its own dtype."""
        if node.op in SAME: return Step(_same(node.src[0]), lambda names: names[0])
        if node.op is Ops.REDUCE: return self._reduction(node)
        if node.op is Ops.STACK:
            return Step(tuple((each, strong(node.dtype)) for each in node.src), self._stack)
        if node.op is Ops.RESHAPE and node.src[0].op is Ops.RESHAPE:
            inner = node.src[0]
            while inner.op is Ops.RESHAPE: inner = inner.src[0]
            return Step(_same(inner), lambda names: reshape(self.b, names[0], _shape(inner), _shape(node)))
        if node.op in MOVES:
            return Step(_same(node.src[0]), lambda names: MOVES[node.op](self.b, node, names[0]))
        if node.op is Ops.CAST:
            to = type_of(node.dtype)
            return Step(_same(node.src[0]), lambda names: self.b.node("Cast", *names, to=to))
        if node.op is Ops.EXP2 and (inner := _times(node.src[0], 1 / LN2)) is not None:
            return Step(((inner, strong(node.dtype)),), lambda names: self.b.node("Exp", *names))
        if node.op in elementwise.OPS:
            dtype = elementwise.operand_dtype(node)
            kinds = [dtypes.bool if node.op is Ops.WHERE and i == 0 else dtype for i in range(len(node.src))]
            return Step(tuple(zip(node.src, kinds, strict=True)),
                        lambda names: elementwise.emit(self.b, node, names))
        if not self.depends(node): return Step((), lambda _: self.fold(node))
        raise OnnxError(f"the function has a {node.op.name}",
                        "movement, elementwise operations, reductions, matmuls and look-ups",
                        "leave assignments, random numbers and custom kernels out")

    def _reduction(self, node: UOp) -> Step:
        """A matmul, a look-up, or a reduction."""
        if (product := matmul(node)) is not None:
            kind = strong(product.dtype)
            return Step(((product.a.node, kind), (product.b.node, kind)),
                        lambda names: emit_matmul(self.b, product, names))
        if (found := look_up(node, self.value)) is not None:
            return Step(((found.table.node, strong(node.dtype)), (found.indices.node, dtypes.int64)),
                        lambda names: emit_look_up(self.b, found, names))
        op, number = node.arg
        source, order = node.src[0], tuple(range(len(node.src[0].shape)))
        if source.op is Ops.PERMUTE: source, order = source.src[0], tuple(source.arg)

        # ONNX reduces no bools: they are 0 and 1
        logical = node.dtype == dtypes.bool

        def emit(names: Sequence[str]) -> str:
            axes, kept = sorted(order[:number]), order[number:]
            made = self.b.node(REDUCTIONS[op], names[0], self.b.integers(*axes), keepdims=0)
            if logical: made = self.b.node("Cast", made, to=type_of(dtypes.bool))
            return transpose(self.b, made, [sorted(kept).index(d) for d in kept])
        return Step(((source, dtypes.int32 if logical else strong(node.dtype)),), emit)

    def _stack(self, names: Sequence[str]) -> str:
        rows = [self.b.node("Unsqueeze", each, self.b.integers(0)) for each in names]
        return self.b.node("Concat", *rows, axis=0)

    # **** constants ****

    def constant(self, node: UOp) -> bool:
        """Whether a node depends on no input and no weight."""
        if node not in self._constants:
            for each in node.toposort(enter_calls=False):
                if each not in self._constants:
                    self._constants[each] = each not in self.inputs and each.op is not Ops.BUFFER and \
                        all(self._constants.get(one, True) for one in each.src)
        return self._constants[node]

    def depends(self, node: UOp) -> bool:
        """Whether a node is computed from an input."""
        return not self.inputs.isdisjoint(node.toposort(enter_calls=False))

    def value(self, node: UOp) -> np.ndarray | None:
        """The value of a node that depends on nothing."""
        return Tensor(node).numpy() if self.constant(node) and node.max_numel() <= FOLDED else None

    def fold(self, node: UOp) -> str:
        """An initializer with a node's value now: a weight, or what depends on nothing."""
        if self.constant(node) and node.max_numel() > FOLDED:
            raise OnnxError(f"a constant of {node.max_numel()} elements", f"{FOLDED} at most",
                            "make it an input, or realize it before the function is exported")
        stem = "weight" if node.op is Ops.BUFFER else "constant"
        if strong(node.dtype) == dtypes.bfloat16:
            bits = Tensor(node).bitcast(dtypes.uint16).numpy()
            return self.b.weight(self.b.fresh(stem), bits, bfloat16=True)
        kind = helper.tensor_dtype_to_np_dtype(type_of(node.dtype))
        return self.b.constant(Tensor(node).numpy().astype(kind), stem)


def _same(node: UOp) -> tuple[tuple[UOp, DType], ...]: return ((node, strong(node.dtype)),)


def _times(node: UOp, factor: float) -> UOp | None:
    """Returns the operand that a node multiplies with a constant, if it does."""
    if node.op is not Ops.MUL: return None
    for given, by in (node.src, node.src[::-1]):
        if by.op is Ops.CONST and abs(float(by.arg) - factor) < 1e-6 * factor: return given
    return None


# **** movement ****

def _shape(node: UOp) -> list[int]:
    """The extents of a node. Raises `OnnxError` where one is a variable."""
    if not all(isinstance(n, int) for n in node.shape):
        raise OnnxError(f"a Tensor of shape {node.shape}", "extents that are numbers", "bind variables first")
    return list(map(int, node.shape))


def _reshape(b: Builder, node: UOp, name: str) -> str:
    return reshape(b, name, _shape(node.src[0]), _shape(node))


def _expand(b: Builder, node: UOp, name: str) -> str:
    return b.node("Expand", name, b.integers(*_shape(node)))


def _permute(b: Builder, node: UOp, name: str) -> str: return transpose(b, name, node.arg)


def _flip(b: Builder, node: UOp, name: str) -> str:
    axes = [i for i, flipped in enumerate(node.arg) if flipped]
    n = len(axes)
    back, beyond = b.integers(*[-1] * n), b.integers(*[-(1 << 62)] * n)
    return b.node("Slice", name, back, beyond, b.integers(*axes), back)


def _shrink(b: Builder, node: UOp, name: str) -> str:
    extents = zip(_shape(node.src[0]), _shape(node), strict=True)
    axes = [i for i, (old, new) in enumerate(extents) if old != new]
    if not axes: return name
    first, size = ([int(node.marg[i][j]) for i in axes] for j in range(2))
    return b.node("Slice", name, b.integers(*first),
                  b.integers(*(a + n for a, n in zip(first, size, strict=True))), b.integers(*axes))


def _pad(b: Builder, node: UOp, name: str) -> str:
    before = [int(first) for first, _ in node.marg]
    extents = zip(_shape(node), _shape(node.src[0]), before, strict=True)
    after = [new - old - first for new, old, first in extents]
    return b.node("Pad", name, b.integers(*before, *after), mode="constant")


MOVES: dict[Ops, Callable[[Builder, UOp, str], str]] = {
    Ops.RESHAPE: _reshape, Ops.EXPAND: _expand, Ops.PERMUTE: _permute, Ops.FLIP: _flip, Ops.SHRINK: _shrink,
    Ops.PAD: _pad}
