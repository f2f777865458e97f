"""The rewrites of this package, in their order: where each is, what it needs to be in a graph, and what it
depends on besides. `register` gives them to hooks/. A rewrite is imported with the first graph that has what
it needs.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import ALLOW_TF32
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from tinygrad_nv import config, hooks
from tinygrad_nv.lazy_import import lazy_import
from tinygrad_nv.patterns import building, target
from tinygrad_nv.patterns.epilogue import ELEMENTWISE, SERIES


@dataclass(frozen=True)
class Registered:
    """The arguments of `hooks.add_rewrite`."""
    name: str
    fn: Callable[[UOp], UOp]
    needs: tuple[Collection[Ops], ...]
    keys: tuple[Callable[[], Hashable], ...] = ()


def _guard(name: str, fn: Callable[[UOp], UOp], needs: Iterable[Collection[Ops]],
           *keys: Callable[[], Hashable]) -> Registered:
    """A rewrite that leaves the graph as it is where its matching raises."""
    return Registered(name, building.guard_rewrite(name, fn), tuple(needs), (building.strict, *keys))


# **** what rewrites depend on besides the graph and the targets ****

def attention_settings() -> Hashable:
    """The settings of attention."""
    return config.get("NV_ATTENTION"), config.get("NV_DETERMINISTIC")


def gemm_settings() -> Hashable:
    """The settings of matmuls."""
    return config.get("NV_GEMM"), ALLOW_TF32.value


def norm_settings() -> Hashable:
    """The settings of reductions."""
    return config.get("NV_NORM")


REWRITES = (
    _guard("stable", lazy_import("tinygrad_nv.patterns.stable:rewrite"),
           [{Ops.RECIPROCAL, Ops.EXP2, Ops.MUL}]),
    _guard("statistics", lazy_import("tinygrad_nv.patterns.statistics:rewrite"),
           [{Ops.REDUCE, Ops.MUL, Ops.CAST}, {Ops.REDUCE, Ops.POW, Ops.CAST}]),
    Registered("division", lazy_import("tinygrad_nv.patterns.division:rewrite"),
               ({Ops.FLOORDIV}, {Ops.CDIV}, {Ops.FLOORMOD}, {Ops.CMOD})),
    # what lowers functions by name depends on the settings of attention, too
    Registered("named", lazy_import("tinygrad_nv.patterns.named:rewrite"), ({Ops.FUNCTION},),
               (building.strict, attention_settings, target.configuration)),
    _guard("attention", lazy_import("tinygrad_nv.patterns.attention.match:rewrite"),
           [{Ops.REDUCE, Ops.EXP2}], attention_settings, target.configuration),
    _guard("grouped_gemm", lazy_import("tinygrad_nv.patterns.grouped_gemm.match:rewrite"),
           [{Ops.REDUCE, Ops.MUL, Ops.WHERE, Ops.CMPNE}], gemm_settings, target.configuration),
    _guard("gemm", lazy_import("tinygrad_nv.patterns.gemm.match:rewrite"), [{Ops.REDUCE, Ops.MUL}],
           gemm_settings, target.configuration),
    # a row's results are made of its statistic by elements
    _guard("norm", lazy_import("tinygrad_nv.patterns.column_sum:rewrite"),
           [*({Ops.REDUCE, op} for op in ELEMENTWISE), *({op} for op in SERIES)],
           norm_settings, target.configuration),
    Registered("several devices", lazy_import("tinygrad_nv.patterns.rewriting:rewrite_allreduces"),
               ({Ops.UNSHARD}, {Ops.ALLREDUCE}), (target.configuration,)))


_lower_eight_bits = lazy_import("tinygrad_nv.patterns.eight_bits:lower")


def _decompose(sink: UOp, ctx: tuple[set[DType], Renderer]) -> UOp | None:
    """A kernel without the dtypes of 8 bits that its renderer lacks; None where it has none."""
    found: UOp | None = _lower_eight_bits(sink, *ctx) if ctx[0].intersection(dtypes.fp8s) else None
    return found


DECOMPOSITION = PatternMatcher([(UPat(Ops.SINK, name="sink"), _decompose)])


def register() -> None:
    """Registers them all. Raises `HookError` where one is registered already."""
    hooks.install_decomposition(DECOMPOSITION)
    for each in REWRITES: hooks.add_rewrite(each.name, each.fn, *each.keys, needs=each.needs)


def remove() -> None:
    """Undoes `register`."""
    for each in REWRITES: hooks.remove_rewrite(each.name)
