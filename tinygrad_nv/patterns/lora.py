"""LoRA: the terms that adapters add to a linear layer, as functions known by name.

Protocol. `lora_added(x, a, b, ranks, segments, offsets, order)` is `expand` of `shrink` (tile/lora/spec.py).
Rows without an adapter get 0. `group_rows(adapter of each row, E + 1)` gives order and offsets, once for all
layers of a step: rows without an adapter have number E. What is added is an operand of the base matmul's
epilogue, which computes what it computes without adapters. There is no gradient.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.lora import reference
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec, LoraSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "lora"


@dataclass(frozen=True)
class LoraShrink:
    """Tensors: x (R, K), a (E, S · rank, K), ranks (E, S), offsets (E + 2), order (R)."""
    rank: int

    def spec(self, x: UOp, a: UOp) -> LoraShrinkSpec:
        """Returns the spec for such tensors."""
        (rows, k), (adapters, columns) = map(int, x.shape), map(int, a.shape[:2])
        return LoraShrinkSpec(adapters, rows, self.rank, x.dtype, a.dtype, k, columns // self.rank)


@dataclass(frozen=True)
class LoraExpand:
    """Tensors: h (R, S · rank), b (E, rank, N), ranks (E, S), offsets (E + 2), order (R)."""
    segments: tuple[int, ...]

    def spec(self, h: UOp, b: UOp) -> LoraExpandSpec:
        """Returns the spec for such tensors."""
        adapters, rank = map(int, b.shape[:2])
        return LoraExpandSpec(adapters, int(h.shape[0]), rank, h.dtype, b.dtype, self.segments)


def lora_added(x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, segments: tuple[int, ...], offsets: Tensor,
               order: Tensor) -> Tensor:
    """Returns what adapters add for rows of x (R, K): (R, N), of N columns in `segments`, in x's dtype. a (E,
    S · rank, K) has the A of each segment, b (E, rank, N) the transposed B; ranks int32 (E, S), offsets int32
    (E + 2), order int32 (R). Raises `SpecError`."""
    _check(x, a, b, ranks, segments, offsets, order)
    h = call(LoraShrink(int(b.shape[1])), compute, x, a, ranks, offsets, order)[0]
    return call(LoraExpand(segments), compute, h, b, ranks, offsets, order)[0]


def _check(x: Tensor, a: Tensor, b: Tensor, ranks: Tensor, segments: tuple[int, ...], offsets: Tensor,
           order: Tensor) -> None:
    fits = (x.ndim, a.ndim, b.ndim) == (2, 3, 3) and a.shape[1] == len(segments) * b.shape[1] and \
        a.shape[2] == x.shape[1] and b.shape == (a.shape[0], b.shape[1], sum(segments)) and a.dtype == b.dtype
    if not fits:
        raise SpecError(f"x {x.shape}, a {a.shape}, b {b.shape}, segments {segments}",
                        "x (R, K), a (E, S · rank, K), b (E, rank, N), segments of N columns in all")
    wanted = {"ranks": (ranks, (a.shape[0], len(segments))), "offsets": (offsets, (int(a.shape[0]) + 2,)),
              "order": (order, (x.shape[0],))}
    for name, (given, shape) in wanted.items():
        if given.shape != shape or given.dtype != dtypes.int32:
            raise SpecError(f"{name} of {short(given.dtype)} {given.shape}", f"int32 {shape}")


def compute(what: LoraShrink | LoraExpand, x: Tensor, w: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the products in plain tinygrad."""
    return (reference.compute_results(what.spec(x.uop, w.uop), x, w, *more).cast(x.dtype),)


def lower_shrink(what: LoraShrink, target: Target, x: UOp, a: UOp, ranks: UOp, offsets: UOp,
                   order: UOp) -> tuple[UOp, ...] | None:
    """Returns h by a kernel: where a target has none of its own, a grouped matmul of adapters with rows.
    Raises `Unsupported` or `SpecError` where there is none."""
    spec = what.spec(x, a)
    if TABLE.family(target.kind, LoraShrinkSpec) is not None:
        return _call_kernel(spec, target, [x, a, ranks, offsets, order])
    if TABLE.family(target.kind, GroupedGemmSpec) is None: return None
    if spec.matrix != spec.dtype:
        raise Unsupported(f"adapters of {short(spec.matrix)}, not {short(spec.dtype)}")
    return _call_kernel(spec, target, [x, a, offsets, order], spec.grouped_gemm)


def lower_expand(what: LoraExpand, target: Target, h: UOp, b: UOp, *more: UOp) -> tuple[UOp, ...] | None:
    """Returns what is added, by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    if TABLE.family(target.kind, LoraExpandSpec) is None: return None
    return _call_kernel(what.spec(h, b), target, [h, b, *more])


def _call_kernel(spec: LoraShrinkSpec | LoraExpandSpec, target: Target, inputs: list[UOp],
            chosen: LoraSpec | GroupedGemmSpec | None = None) -> tuple[UOp, ...]:
    out = program.Output((spec.rows, spec.columns), spec.dtype)
    return choose(chosen or spec, target).call(inputs[0].device, [out], inputs, NAME, flops=spec.flops,
                                                 nbytes=spec.active_bytes)


lower(LoraShrink, NAME, lower_shrink)
lower(LoraExpand, NAME, lower_expand)
