"""Matmuls of rows with the quantised matrix of their group, as a function known by name.

Protocol. `quant_grouped_matmul(x, stack, offsets)` is `grouped_matmul` (patterns/grouped_gemm/named.py) with
matrices that are dequantised to x's dtype: that is its reference, and what runs where no kernel does. With an
activation a stack has two matrices for each group, gate and up. `prepare_type` is how kernels of a device
read the matrices of a stack. On a CPU rows become int8 where the caller permits it, as those of
`quant_matmul` do. Its gradients are those of x and weights.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.grouped_gemm.slots import apart, check_slots, require_kinds
from tinygrad_nv.patterns.named import behind, call, lower
from tinygrad_nv.patterns.quant_gemm.named import in_bytes
from tinygrad_nv.patterns.target import Target, choose, target_of
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.types import QType, stack_buffers
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm import reference as grouped
from tinygrad_nv.tile.grouped_gemm.spec import FLOATS, GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped import reference
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "quant_grouped"


@dataclass(frozen=True)
class QuantGroupedMatmul:
    """Tensors: x (M, K), the buffers of a stack, offsets (E + 1), then those there are of order (R), weights
    (R) and bias (E, N). `int8`: kernels may round rows to int8, with a scale for each 32 inputs."""
    type: QType
    stack: tuple[int, int, int]
    rows: int
    gather: int = 0
    scatter: bool = False
    activation: str = ""
    weighted: bool = False
    biased: bool = False
    int8: bool = False

    @property
    def has_order(self) -> bool:
        """Whether there is an order."""
        return bool(self.gather or self.scatter or self.weighted)

    def spec(self, x: UOp) -> QuantGroupedSpec:
        """The matmul of x. Raises `SpecError`."""
        (count, n, k), halves = self.stack, 2 if self.activation else 1
        if count % halves: raise SpecError(f"{count} matrices with an activation", "two for each group")
        one = GroupedGemmSpec(count // halves, self.rows, n * halves, k, x.dtype, int(x.shape[0]),
                              self.gather, self.scatter, self.activation, self.weighted, self.biased)
        return QuantGroupedSpec(one, self.type, in_bytes(self.type, self.int8) and not self.type.permuted)


def quant_grouped_matmul(x: Tensor, stack: QStack, offsets: Tensor, order: Tensor | None = None, *,
                         gather: int = 0, scatter: bool = False, activation: str = "",
                         weights: Tensor | None = None, bias: Tensor | None = None,
                         int8: bool = False) -> Tensor:
    """Rows of x (M, K) times the matrix of their group, of a stack of E matrices [N, K], transposed: (R, N);
    with an activation of 2 E, gate and up of each group: (R, N). In x's dtype. R is the length of `order`,
    int32, else M; offsets int32 (E + 1), weights float32 (R), bias (E, N), or (E, 2 N) with an activation.
    With `int8` kernels of the CPU round rows to int8. Raises `SpecError`."""
    rows = int(x.shape[0] if order is None else order.shape[0])
    what = QuantGroupedMatmul(stack.type, stack.shape, rows, gather, scatter, activation, weights is not None,
                              bias is not None, int8)
    _check(what, x, offsets, order, weights, bias)
    more = [each for each in (order, weights, bias) if each is not None]
    return call(what, multiply, x, *stack.buffers.values(), offsets, *more, grad=_gradient)[0]


def _check(what: QuantGroupedMatmul, x: Tensor, offsets: Tensor, order: Tensor | None, weights: Tensor | None,
           bias: Tensor | None) -> None:
    if x.ndim != 2 or int(x.shape[1]) != what.stack[2] or x.dtype not in FLOATS:
        raise SpecError(f"x of {short(x.dtype)} {x.shape}", f"floats (M, {what.stack[2]})")
    one = what.spec(x.uop).grouped
    check_slots(what, one.groups, one.n, offsets, order, weights, bias)


def multiply(what: QuantGroupedMatmul, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """Returns the rows' products in plain tinygrad."""
    spec, names = what.spec(x.uop), stack_buffers(what.type, what.stack)
    stack, offsets, more = dict(zip(names, rest, strict=False)), rest[len(names)], rest[len(names) + 1:]
    w = reference.matrices(replace(spec, int8=False), stack)
    return (grouped.multiply_groups(spec.grouped, x, w, offsets, *apart(what, more)).cast(x.dtype),)


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    """Returns the gradients of x, weights and bias."""
    what, given = call_.arg.aux, [Tensor(each) for each in call_.src[1:]]
    first = 1 + len(stack_buffers(what.type, what.stack))
    places = [0, *(i for i in range(first, len(given)) if dtypes.is_float(given[i].dtype))]
    leaves = [each.detach() for each in given]
    # as of `quant_matmul`: else the matrices of all layers would be there at once
    leaves[1] = Tensor(behind(leaves[1].uop, grad))
    found = multiply(what, *leaves)[0].gradient(*(leaves[i] for i in places), gradient=Tensor(grad))
    made = dict(zip(places, found, strict=True))
    return tuple(made[i].cast(each.dtype).uop if i in made else None for i, each in enumerate(given))


# **** kernels ****

def lower_quant_grouped(what: QuantGroupedMatmul, target: Target, x: UOp, *rest: UOp) -> tuple[UOp,
                                                                                               ...] | None:
    """Returns the results of a kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, QuantGroupedSpec) is None: return None
    spec, one = what.spec(x), what.spec(x).grouped
    require_kinds(what, rest[len(stack_buffers(what.type, what.stack)) + 1:], one.dtype)
    moved = spec.active_bytes + (one.x_rows * one.k + one.rows * one.columns) * one.dtype.itemsize
    out = program.Output((one.rows, one.columns), one.dtype)
    return choose(spec, target).call(x.device, [out], [x, *rest], NAME, flops=spec.flops, nbytes=moved)


def prepare_type(type: QType, n: int, k: int, device: str | None) -> QType:
    """Returns the type of matrices [n, k] as kernels of a device read their stacks: in tiles or fragments
    where templates take those, of fragments with outer scales that multiply; else as it is."""
    target = target_of(device)
    if target is None or type.layout != "rows": return type
    read = type.with_multipliers() if target.matrix_layout == "fragments" else type
    try:
        made, one = replace(read, layout=target.matrix_layout), GroupedGemmSpec(1, 1, n, k, dtypes.bfloat16)
        found = TABLE.choose(QuantGroupedSpec(one, made), target)
    except SpecError: return type
    return type if found is None else made


lower(QuantGroupedMatmul, NAME, lower_quant_grouped)
