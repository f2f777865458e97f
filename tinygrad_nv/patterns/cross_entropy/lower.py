"""Losses to kernels: of logits one, of an output layer four for each chunk of rows.

Protocol. For each chunk of rows of `LinearLosses`, with one buffer of float32 logits for all chunks:

    logits = hidden weightᵀ + bias                    a matmul; the teacher's too, where it has a weight
    losses; the gradient dl over the logits           tile/cross_entropy; of 16 bits beside them
    d_hidden = factor · dl weight                     a matmul
    d_weight = d_weight + factor · dlᵀ hidden         a matmul over float32 sums, where they lie
    d_bias likewise, with ones for hidden             a matmul of one row

tinygrad runs what reads a buffer before what writes it next, so chunks follow each other and share buffers:
beside the results, chunk · V numbers are kept. Each element of d_weight is loaded once and then stored by the
lane that has its sum, so it may be written where it was read. The last chunk rounds to the result's dtype.
"""
from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import ALLOW_TF32, all_int
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.cross_entropy.named import (
    LinearLosses,
    Operands,
    RowLosses,
    gradient_dtype,
    rows_spec,
    total,
)
from tinygrad_nv.patterns.named import Uses, lower
from tinygrad_nv.patterns.target import Chosen, Target, choose
from tinygrad_nv.tile.cross_entropy.spec import RowsSpec
from tinygrad_nv.tile.expression import Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.templates import TABLE

NAME = "cross_entropy"
CHUNK_BYTES = {"cpu": 32 << 20, "gpu": 1 << 30}     # of float32 logits
FEWEST_ROWS = {"cpu": 64, "gpu": 1024}              # of a chunk: each reads and writes d_weight once
Place: TypeAlias = program.Output | UOp


def lower_rows(what: RowLosses, target: Target, uses: Uses, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns losses and the gradient of logits by a kernel. Raises `Unsupported` or `SpecError` where there
    is none."""
    given = Operands.of(what, arguments)
    rows, size = _extents(given.rows)
    scale = given.scale if given.factors is None else \
        given.factors.shrink(((0, 1),)).expand(rows).contiguous()
    spec = rows_spec(replace(what, scaled=scale is not None), (rows, size), given.rows.dtype,
                     None if given.teacher is None else given.teacher.dtype,
                     gradient_dtype(given.rows.dtype) if 1 in uses.after else None)
    losses, gradient = _call_kernel(spec, target, given.rows, given.labels, given.teacher, scale, None)
    return _sum_losses(losses, given), given.rows if gradient is None else gradient


def lower_linear(what: LinearLosses, target: Target, uses: Uses, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns losses and gradients, chunk after chunk. Raises `Unsupported` or `SpecError` where there is no
    kernel."""
    given = Operands.of(what, arguments)
    rows, _ = _extents(given.rows)
    wanted = frozenset(uses.after)
    chunks, losses, hidden = _Chunks(what, target, given, wanted), list[UOp](), list[UOp]()
    for first in range(0, rows, chunks.chunk):
        made, gradient = chunks.run(first, min(chunks.chunk, rows - first), first + chunks.chunk >= rows)
        losses.append(made)
        if gradient is not None: hidden.append(gradient)
    results: list[UOp | None] = [_sum_losses(_join_chunks(losses), given), None, chunks.d_weight]
    if hidden: results[1] = _join_chunks(hidden)
    if what.biased: results.append(chunks.d_bias)
    # what is not used is not computed: any value stands for it
    return tuple(given.rows if each is None else each for each in results)


def _extents(x: UOp) -> tuple[int, int]:
    if not all_int(x.shape): raise Unsupported("a symbolic number of rows")
    if isinstance(x.device, tuple): raise Unsupported("shards")
    rows, size = x.shape
    return int(rows), int(size)


def _join_chunks(parts: list[UOp]) -> UOp:
    """Rows of chunks, one after the other, in memory: the gradient of the norm before is made of them, and
    that of its weight."""
    return parts[0].cat(*parts[1:]).contiguous() if len(parts) > 1 else parts[0]


def _sum_losses(losses: UOp, given: Operands[UOp]) -> UOp:
    """Returns what a function gives of losses."""
    factors = None if given.factors is None else Tensor(given.factors)
    return total(Tensor(losses), factors).uop


def _call_kernel(spec: RowsSpec, target: Target, logits: UOp, labels: UOp, teacher: UOp | None,
                 scale: UOp | None,
            beside: Place | None) -> tuple[UOp, UOp | None]:
    """Returns losses, and the gradient: over the logits, in `beside`, or where there is neither in storage of
    its own."""
    losses: list[Place] = [program.Output((spec.rows,), dtypes.float32)]
    inputs = [logits, labels, *([] if teacher is None else [teacher])]
    if spec.scaled and scale is not None: inputs.append(scale)
    if spec.in_place: outputs: list[Place] = [inputs.pop(0), *losses]
    elif spec.gradient is None: outputs = losses
    else:
        fresh = program.Output((spec.rows, spec.size), spec.gradient)
        outputs = [fresh if beside is None else beside, *losses]
    made = choose(spec, target).call(labels.device, outputs, inputs, NAME, flops=spec.flops,
                                       nbytes=spec.nbytes)
    return made[-1], made[0] if len(made) > 1 else None


class _Chunks:
    """The chunks of a call: what is the same for all, and the buffers that the next one takes over."""

    def __init__(self, what: LinearLosses, target: Target, given: Operands[UOp],
                 wanted: frozenset[int]) -> None:
        assert given.weight is not None
        self.what, self.target, self.given, self.wanted = what, target, given, wanted
        self.hidden, self.weight = _memory(given.rows), _memory(given.weight)
        if self.hidden.dtype != self.weight.dtype:
            raise Unsupported(f"hidden states of {self.hidden.dtype.name}, "
                              f"weight of {self.weight.dtype.name}")
        (rows, self.h), self.v = _extents(self.hidden), int(self.weight.shape[0])
        self.dtype, self.gradients = self.hidden.dtype, bool(wanted - {0})
        self.in_place = self.gradients and self.dtype == dtypes.float32
        self.chunk = what.chunk or chunk_rows(rows, self.v, target.kind)
        self.logits: Place = program.Output((min(self.chunk, rows), self.v), dtypes.float32)
        self.taught, self.beside = self.logits, program.Output((min(self.chunk, rows), self.v), self.dtype)
        self.d_weight: UOp | None = None
        self.d_bias: UOp | None = None

    def run(self, first: int, rows: int, last: bool) -> tuple[UOp, UOp | None]:
        """Losses of a chunk, and the gradient of its hidden states where that is wanted."""
        given, part = self.given, slice(first, first + rows)
        hidden = self.cut(self.hidden, first, rows)
        biases = [] if given.bias is None else [_memory(given.bias)]
        self.logits = logits = self.logits_of(hidden, self.weight, rows, self.logits, biases)
        teacher, scale = given.teacher, given.scale
        if given.teacher_weight is not None and teacher is not None:
            taught, weight = self.cut(_memory(teacher), first, rows), _memory(given.teacher_weight)
            self.taught = teacher = self.logits_of(taught, weight, rows, self.taught, [])
        elif teacher is not None: teacher = self.cut(teacher, first, rows)
        spec = rows_spec(self.what, (rows, self.v), dtypes.float32,
                         None if teacher is None else teacher.dtype, self.dtype if self.gradients else None,
                         self.in_place)
        losses, dl = _call_kernel(spec, self.target, logits, _memory(given.labels[part]), teacher,
                             None if scale is None else _memory(scale[part]), self.beside)
        if dl is None: return losses, None
        if self.in_place: self.logits = dl
        else: self.beside = dl
        return losses, self.gradients_of(dl, hidden, rows, last)

    def cut(self, x: UOp, first: int, rows: int) -> UOp:
        """Rows of a matrix, in memory of their own where they are not all."""
        if rows == x.shape[0]: return x
        return x.shrink(((first, first + rows), (0, int(x.shape[1])))).contiguous()

    def logits_of(self, hidden: UOp, weight: UOp, rows: int, to: Place, biases: list[UOp]) -> UOp:
        """float32 logits of a chunk."""
        k, dtype = int(hidden.shape[1]), hidden.dtype
        value: Expression = Sum()
        for bias in biases: value = value + Load(0, bias.dtype, 0, 1).cast(dtypes.float32)
        each = Operand(dtype, k, 1)
        how = self.matmul((rows, self.v, k), each, each, dtypes.float32, value)
        return self.call(how, to, [hidden, weight, *biases])

    def gradients_of(self, dl: UOp, hidden: UOp, rows: int, last: bool) -> UOp | None:
        """Returns the gradient of hidden states; those of weight and bias are added up."""
        v, h, dtype = self.v, self.h, self.dtype
        if 2 in self.wanted:
            a, b, to = Operand(dtype, 1, v), Operand(dtype, 1, h), self.weight.dtype
            self.d_weight = self.add_to(self.d_weight, (v, h, rows), a, b, [dl, hidden], to, last)
        if 3 in self.wanted and self.given.bias is not None:
            ones = Tensor.ones(rows, dtype=dtype, device=dl.device).uop.contiguous()
            a, b, to = Operand(dtype, rows, 1), Operand(dtype, 1, v), self.given.bias.dtype
            self.d_bias = self.add_to(self.d_bias, (1, v, rows), a, b, [ones, dl], to, last)
        if 1 not in self.wanted: return None
        to, a, b = gradient_dtype(dtype), Operand(dtype, v, 1), Operand(dtype, 1, h)
        how = self.matmul((rows, h, v), a, b, to, self.multiply_factor(Sum(), 0))
        return self.call(how, program.Output((rows, h), to), [dl, self.weight, *self.factors])

    def add_to(self, before: UOp | None, extents: tuple[int, int, int], a: Operand, b: Operand,
              inputs: list[UOp], dtype: DType, last: bool) -> UOp:
        """Returns the sums with those of a chunk: (m, n) of a result, or (n) of one row."""
        m, n, _ = extents
        value, more = self.multiply_factor(Sum(), 0), list(self.factors)
        if before is not None:
            value = value + Load(len(more), dtypes.float32, n, 1)
            more.append(before)
        to = gradient_dtype(dtype) if last else dtypes.float32
        fresh = program.Output((m, n) if m > 1 else (n,), to)
        place: Place = fresh if before is None or to != dtypes.float32 else before
        return self.call(self.matmul(extents, a, b, to, value), place, [*inputs, *more])

    @property
    def factors(self) -> list[UOp]:
        """Factors of sums, of which the first counts."""
        return [] if self.given.factors is None else [_memory(self.given.factors)]

    def multiply_factor(self, value: Expression, parameter: int) -> Expression:
        """Returns a sum times the factor."""
        return value if self.given.factors is None else value * Load(parameter, dtypes.float32, 0, 0)

    def matmul(self, extents: tuple[int, int, int], a: Operand, b: Operand, dtype: DType,
               value: Expression) -> Chosen:
        """A matmul and its schedule."""
        m, n, k = extents
        spec = GemmSpec(m, n, k, a, b, Result(dtype, n, 1), epilogue=value.cast(dtype),
                        tf32=a.dtype == dtypes.float32 and bool(ALLOW_TF32.value))
        return _choose(spec, self.target)

    def call(self, how: Chosen, to: Place, inputs: list[UOp]) -> UOp:
        """A matmul into storage."""
        return how.call(self.hidden.device, [to], inputs, flops=how.spec.flops)[0]


def chunk_rows(rows: int, size: int, kind: str) -> int:
    """Rows of a chunk: of chunks that are as even as can be."""
    most = max(FEWEST_ROWS[kind], CHUNK_BYTES[kind] // (4 * size))
    count = -(-rows // most)
    return -(-rows // count)


def _choose(spec: GemmSpec, target: Target) -> Chosen:
    """Returns what computes a matmul, also one that its family leaves to tinygrad, as it is too small to be
    worth a call."""
    if (schedule := TABLE.choose(spec, target)) is None:
        family = TABLE.family(target.kind, GemmSpec)
        schedule = None if family is None else family.default(spec, target)
    if schedule is None: raise Unsupported(TABLE.why_not(spec, target))
    return Chosen(spec, schedule, target)


def _memory(x: UOp) -> UOp:
    """A value in memory: chunks read it again and again."""
    return x if x.has_buffer_identity(after_ok=True) else x.contiguous()


lower(RowLosses, NAME, lower_rows, sees_uses=True)
lower(LinearLosses, NAME, lower_linear, sees_uses=True)
