"""Rows of a table by number, as a function known by name, whose gradient is one too.

Protocol. `embedding(weight, tokens)` is `weight[tokens]`, which tinygrad computes in two kernels from 32,768
rows up, and whose gradient is a sum over all tokens for every row. Kernels of ours copy, and on a CPU add up
what there is (tile/embedding/spec.py); elsewhere both are what they are in tinygrad.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import Ops, UOp, sint

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.index import largest
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.embedding.reference import gradient
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec, Tokens
from tinygrad_nv.tile.templates import TABLE

NAME = "embedding"


@dataclass(frozen=True)
class Embedding:
    """Rows of weight (V, H) by tokens: (…, H)."""


@dataclass(frozen=True)
class EmbeddingGradient:
    """The gradient of weight (V, H), from tokens and the result's gradient."""
    rows: int


def embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    """weight[tokens]: rows of weight (V, H) for tokens of any shape, (…, H) in weight's dtype. Tokens from −V
    to −1 count from the last row; those of no row give 0. Raises `SpecError`."""
    if weight.ndim != 2: raise SpecError(f"weight of shape {weight.shape}", "(V, H)")
    if not dtypes.is_int(tokens.dtype): raise SpecError(f"tokens of {tokens.dtype.name}", "integers")
    if isinstance(weight.device, tuple): return weight[tokens]  # shards are tinygrad's
    return call(Embedding(), select_rows, weight, tokens, grad=_gradient)[0]


def select_rows(what: Embedding, weight: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
    """Rows in tinygrad."""
    return (weight[tokens],)


def mask_unknown_rows(x: Tensor, known: Tensor) -> Tensor:
    """Rows of x (R, H) where `known`, bool (R,), zeros elsewhere. Other rows are not read: they may never
    have been written. Raises `SpecError`."""
    rows = int(x.shape[0])
    own = known.where(Tensor.arange(rows, dtype=dtypes.int32), rows).cast(dtypes.int32)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        # each row is there once: no sum, as of rows of a table
        return known.unsqueeze(1).where(Tensor(grad), 0).uop, None
    return call(Embedding(), select_rows, x, own, grad=back)[0]


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    weight, tokens = call_.src[1:]
    rows = int(weight.shape[0])
    return call(EmbeddingGradient(rows), add_gradients, Tensor(tokens), Tensor(grad))[0].uop, None


def add_gradients(what: EmbeddingGradient, tokens: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradient as tinygrad has it."""
    return (gradient(what.rows, tokens, grad),)


# **** kernels ****

def lower_embedding(what: Embedding, target: Target, weight: UOp, tokens: UOp) -> tuple[UOp, ...]:
    """Returns rows by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    storage, where, rows = _place_tokens(tokens)
    v, width = map(int, weight.shape)
    spec = EmbeddingSpec(v, width, weight.dtype, where, rows is not None)
    out = program.Output((*tokens.shape, spec.width), spec.dtype)
    return _call_kernel(spec, target, out, [weight, storage], rows, 2 * prod(out.shape) * spec.dtype.itemsize)


def lower_gradient(what: EmbeddingGradient, target: Target, tokens: UOp,
                     grad: UOp) -> tuple[UOp, ...] | None:
    """Returns the gradient by a kernel; None on targets without one. Raises `Unsupported` or `SpecError`
    where there is none."""
    if TABLE.family(target.kind, EmbeddingGradientSpec) is None: return None
    storage, where, rows = _place_tokens(tokens)
    if rows is not None: raise Unsupported("a symbolic number of tokens")
    spec = EmbeddingGradientSpec(what.rows, int(grad.shape[-1]), grad.dtype, where)
    moved = (spec.rows + where.count) * spec.width * spec.dtype.itemsize
    out = program.Output((spec.rows, spec.width), spec.dtype)
    return _call_kernel(spec, target, out, [storage, grad], None, moved, where.count * spec.width)


def _place_tokens(tokens: UOp) -> tuple[UOp, Tokens, UOp | None]:
    """Returns where tokens lie, and their symbolic number. Raises `Unsupported` for more dimensions where
    that is one."""
    found = lay_out(tokens)
    many = [(extent, stride) for extent, stride in zip(tokens.shape, found.strides, strict=True)
            if largest(extent) != 1]
    symbols = [extent for extent, _ in many if isinstance(extent, UOp)]
    if symbols and (len(many) > 1 or symbols[0].op is not Ops.PARAM):
        raise Unsupported("a symbolic extent that is not the number of tokens")
    extents, strides = zip(*many, strict=True) if many else ((1,), (0,))
    where = Tokens(found.dtype, tuple(map(largest, extents)), strides, found.offset)
    return found.storage, where, symbols[0] if symbols else None


def _call_kernel(spec: EmbeddingSpec, target: Target, out: program.Output, inputs: list[UOp],
            rows: UOp | None, moved: sint, flops: int = 0) -> tuple[UOp, ...]:
    counted: dict[str, Any] = {} if rows is None else {"rows": rows, "variables": [rows]}
    return choose(spec, target).call(inputs[0].device, [out], inputs, NAME, flops=flops, nbytes=moved,
                                       **counted)


lower(Embedding, NAME, lower_embedding)
lower(EmbeddingGradient, NAME, lower_gradient)
