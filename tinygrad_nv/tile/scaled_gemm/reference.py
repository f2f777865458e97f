"""A matmul with scales of groups in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.gemm import reference as gemm
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, evaluate, gather
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec


def arguments(spec: ScaledGemmSpec) -> tuple[Argument, ...]:
    """out, a, b, a_scale, b_scale, x0, x1, …"""
    out, a, b, *extras = gemm.arguments(spec)

    def scales(name: str, one: BlockScales, rows: int) -> Argument:
        extents = -(-rows // one.rows), spec.groups
        return Argument(name, dtypes.float32, (Place(one.offset, extents, (one.mn, one.k)),))
    each = scales("a_scale", spec.a_scale, spec.m), scales("b_scale", spec.b_scale, spec.n)
    return out, a, b, *each, *extras


def reference(spec: ScaledGemmSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[m, n]."""
    _, a, b, a_scale, b_scale, *_ = arguments(spec)
    wide, rest = compute_dtype(spec.accumulate, exact), -spec.k % GROUP
    # stored before the pad: tinygrad 0.14 reads the index into a table of numbers beyond what is not padded
    left, right = (gather(given[one.name], one.places[0]).cast(wide).contiguous().pad(((0, 0), (0, rest)))
                   .reshape(-1, spec.groups, GROUP).permute(1, 0, 2).contiguous() for one in (a, b))
    sums = left @ right.transpose(-1, -2)
    for one, scale, axis in ((a_scale, spec.a_scale, -1), (b_scale, spec.b_scale, -2)):
        each = gather(given[one.name], one.places[0]).cast(wide).repeat_interleave(scale.rows, 0)
        rows = spec.m if axis == -1 else spec.n
        sums = sums * each[:rows].transpose(0, 1).unsqueeze(axis)
    return evaluate(spec.epilogue, (spec.m, spec.n), [sums.sum(0).contiguous()], given, exact),
