"""Matmuls with a quantised matrix, as a function known by name.

Protocol. `quant_matmul(x, w, bias)` is x Wᵀ + bias with W dequantised to x's dtype: that is its reference,
and what runs where no kernel does. Its gradient is that of x; quantised matrices have none.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.named import call
from tinygrad_nv.quant.tensor import QTensor, dequantized
from tinygrad_nv.quant.types import QType, buffers


@dataclass(frozen=True)
class QuantMatmul:
    """x Wᵀ + bias: x (…, K), W of a type and shape [N, K]; tensors: x, W's buffers, bias if there is one."""
    type: QType
    shape: tuple[int, int]
    bias: bool = False


def quant_matmul(x: Tensor, w: QTensor, bias: Tensor | None = None) -> Tensor:
    """x (…, K) times W [N, K], transposed, plus bias (N): (…, N) in x's dtype. Raises `SpecError`."""
    if not x.shape or x.shape[-1] != w.shape[1]:
        raise SpecError(f"x of shape {x.shape}, w of {list(w.shape)}", f"x of shape (…, {w.shape[1]})")
    what, more = QuantMatmul(w.type, w.shape, bias is not None), [] if bias is None else [bias]
    return call(what, multiplied, x, *w.buffers.values(), *more, grad=_gradient)[0]


def multiplied(what: QuantMatmul, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The same in tinygrad."""
    return (x.linear(_matrix(what, x, *rest).T, rest[-1] if what.bias else None),)


def _matrix(what: QuantMatmul, x: Tensor, *rest: Tensor) -> Tensor:
    given = dict(zip(buffers(what.type, *what.shape), rest, strict=False))
    # contiguous: fused into the matmul it would be dequantised again for every row
    return dequantized(what.type, what.shape, given, x.dtype).contiguous()


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    what, (x, *rest) = call_.arg.aux, [Tensor(each) for each in call_.src[1:]]
    made = Tensor(grad) @ _matrix(what, x, *rest)
    sums = Tensor(grad).reshape(-1, what.shape[0]).sum(0).uop if what.bias else None
    return made.uop, *[None] * (len(rest) - what.bias), *[sums] * what.bias
