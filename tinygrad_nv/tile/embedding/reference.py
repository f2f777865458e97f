"""Rows of a table and its gradient in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense, gather, round_to


def arguments(spec: EmbeddingSpec) -> tuple[Argument, ...]:
    """out, weight, tokens; of a gradient out, tokens, grad."""
    lies, table = spec.tokens, dense(spec.rows, spec.width)
    spread = range(0, spec.rows, max(1, spec.rows // lies.count))
    tokens = Argument("tokens", lies.dtype, (Place(lies.offset, lies.extents, lies.strides),),
                      values=range(-spec.rows - 3, spec.rows + 3), usual=spread)
    rows = dense(lies.count, spec.width)
    if isinstance(spec, EmbeddingGradientSpec):
        return Argument("out", spec.dtype, (table,), "out"), tokens, Argument("grad", spec.dtype, (rows,))
    return Argument("out", spec.dtype, (rows,), "out"), Argument("weight", spec.dtype, (table,)), tokens


def reference(spec: EmbeddingSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[*extents, width], or [rows, width] of a gradient."""
    _, *inputs = arguments(spec)
    x = {each.name: gather(given[each.name], each.places[0]) for each in inputs}
    if not isinstance(spec, EmbeddingGradientSpec): return x["weight"][x["tokens"]].reshape(-1, spec.width),
    grad = x["grad"].cast(compute_dtype(dtypes.float32, exact)).contiguous()
    sums = gradient(spec.rows, x["tokens"].reshape(-1), grad)
    return sums if exact else round_to(sums, spec.dtype),


def gradient(rows: int, tokens: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a table of so many rows, which does not depend on what is in them."""
    weight = Tensor.empty(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device)
    return weight[tokens].gradient(weight, gradient=grad)[0]
