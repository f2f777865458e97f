"""Reference of the term that adapters add to a linear layer, in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.grouped_gemm.reference import groups, inverse
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec, LoraSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, gather, round_to


def arguments(spec: LoraSpec) -> tuple[Argument, ...]:
    """out, rows, matrices, ranks, offsets, order."""
    if isinstance(spec, LoraShrinkSpec):
        own = [Argument("out", spec.dtype, (dense(spec.rows, spec.columns),), "out"),
               Argument("x", spec.dtype, (dense(spec.rows, spec.k),)),
               Argument("a", spec.matrix, (dense(spec.adapters, spec.columns, spec.k),))]
        parts = spec.parts
    else:
        assert isinstance(spec, LoraExpandSpec)
        own = [Argument("out", spec.dtype, (dense(spec.rows, spec.columns),), "out"),
               Argument("h", spec.dtype, (dense(spec.rows, spec.pitch),)),
               Argument("b", spec.matrix, (dense(spec.adapters, spec.rank, spec.columns),))]
        parts = len(spec.segments)
    groups_ = spec.adapters + 1
    even = tuple(group * spec.rows // groups_ for group in range(groups_ + 1))
    return (*own, Argument("ranks", dtypes.int32, (dense(spec.adapters, parts),), values=range(spec.rank,
                                                                                           spec.rank + 1)),
            Argument("offsets", dtypes.int32, (dense(groups_ + 1),), values=range(1), usual=even),
            Argument("order", dtypes.int32, (dense(spec.rows),), values=range(1), usual=range(spec.rows)))


def reference(spec: LoraSpec, given: Given, exact: bool = False) -> Results:
    """h, or what is added to rows."""
    wide = compute_dtype(dtypes.float32, exact)
    x = [gather(given[each.name], each.places[0]) for each in arguments(spec)[1:]]
    made = compute_results(spec, *(each if each.dtype == dtypes.int32 else each.cast(wide) for each in x))
    return made if exact else round_to(made, spec.dtype),


def compute_results(spec: LoraSpec, x: Tensor, w: Tensor, ranks: Tensor, offsets: Tensor,
                    order: Tensor) -> Tensor:
    """The results, before they are rounded, in float32, or in float64 of such tensors."""
    wide = compute_dtype(dtypes.float32, x.dtype == dtypes.float64)
    group, inside = groups(spec.rows, offsets)
    inside = inside & (group < spec.adapters)
    group = group.minimum(spec.adapters - 1)
    numbers = Tensor.arange(spec.rank, dtype=dtypes.int32).to(x.device)
    own = (numbers < ranks[group].unsqueeze(-1)) & inside.reshape(-1, 1, 1)     # (rows, segments, rank)
    if isinstance(spec, LoraShrinkSpec):
        made = (x[order].contiguous().unsqueeze(1).cast(wide) * w[group].cast(wide)).sum(-1)
        return own.reshape(made.shape).where(made, 0)
    assert isinstance(spec, LoraExpandSpec)
    h, b = x.cast(wide).reshape(spec.rows, len(spec.segments), spec.rank), w.cast(wide)[group].contiguous()
    h = own.where(h, 0).contiguous()
    sums = [(h[:, i].unsqueeze(-1) * b[:, :, first:end]).sum(1) for i, (first, end) in enumerate(spec.spans)]
    made = sums[0] if len(sums) == 1 else sums[0].cat(*sums[1:], dim=-1)
    return inside.unsqueeze(-1).where(made, 0).contiguous()[inverse(order)]
