"""All-reduce in plain tinygrad (tile/reference.py): x has the numbers of all GPUs, one row each."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.all_reduce.spec import FLOATS, AllReduceSpec
from tinygrad_nv.tile.reference import Argument, Given, Results, compute_dtype, dense, gather, round_to


def arguments(spec: AllReduceSpec) -> tuple[Argument, ...]:
    """out; residual_out; x of all GPUs, of which a kernel has its own row; residual; weight; peers."""
    rows = dense(spec.count // (spec.columns or spec.count), spec.columns or spec.count)
    x = Argument("x", spec.dtype, (dense(spec.world, spec.count),))
    peers = Argument("peers", dtypes.uint64, (dense(spec.world),), values=range(1))
    if not spec.columns: return Argument("out", spec.dtype, (rows,), "out"), x, peers
    outs = [Argument(name, spec.dtype, (rows,), "out") for name in ("out", "residual_out")]
    return (*outs, x, Argument("residual", spec.dtype, (rows,)),
            Argument("weight", spec.dtype, (dense(spec.columns),)), peers)


def reference(spec: AllReduceSpec, given: Given, exact: bool = False) -> Results:
    """Returns the results of every GPU."""
    places = {each.name: each.places[0] for each in arguments(spec)}
    wide = compute_dtype(dtypes.float32, exact) if spec.dtype in FLOATS else spec.dtype

    def of(name: str) -> Tensor: return gather(given[name], places[name]).cast(wide)

    def one(made: Tensor) -> Tensor: return made if exact else round_to(made, spec.dtype)
    x = of("x")
    total = x[0]
    for rank in range(1, spec.world): total = (total + x[rank]).contiguous()
    total = one(total).reshape(places["out"].extents)
    if not spec.columns: return total,
    new = one(total.cast(wide) + of("residual"))
    scale = (new.cast(wide).square().mean(-1, keepdim=True) + spec.eps).sqrt().reciprocal()
    scaled = one(new.cast(wide) * scale)
    return one(scaled.cast(wide) * of("weight")), new
