"""The rewrites of this package, in their order, with what each needs to be in a graph and what it depends on
besides: `register` gives them to hooks/."""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from types import ModuleType

from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.patterns import (
    building,
    division,
    eight_bits,
    named,
    reductions,
    several_devices,
    stable,
    statistics,
    target,
)
from tinygrad_nv.patterns.attention import lower, lower_backward
from tinygrad_nv.patterns.attention import match as attention
from tinygrad_nv.patterns.gemm import match as gemm
from tinygrad_nv.patterns.grouped_gemm import match as grouped_gemm


@dataclass(frozen=True)
class Registered:
    """The arguments of `hooks.add_rewrite`."""
    name: str
    fn: Callable[[UOp], UOp]
    needs: tuple[Collection[Ops], ...]
    keys: tuple[Callable[[], Hashable], ...] = ()


def _guard(name: str, family: ModuleType, *keys: Callable[[], Hashable]) -> Registered:
    """Returns a registered rewrite that leaves a graph whose matching raises as it is."""
    return Registered(name, building.guard_rewrite(name, family.rewrite), family.NEEDS,
                      (building.strict, *keys))


# what lowers functions by name depends on the settings of attention, too
REWRITES = (_guard("stable", stable), _guard("statistics", statistics),
            Registered("division", division.rewrite, division.NEEDS),
            Registered("named", named.rewrite, named.NEEDS,
                       (building.strict, attention.configuration, target.configuration)),
            *(_guard(name, family, family.configuration, target.configuration)
              for name, family in (("attention", attention), ("grouped_gemm", grouped_gemm),
                                   ("gemm", gemm), ("norm", reductions))),
            Registered("several devices", several_devices.rewrite, several_devices.NEEDS,
                       (target.configuration,)))


def register() -> None:
    """Registers them all, and lets attention known by name become kernels. Raises `HookError` where one is
    registered already."""
    lower.register()
    lower_backward.register()
    hooks.install_decomposition(eight_bits.RULES)
    for each in REWRITES: hooks.add_rewrite(each.name, each.fn, *each.keys, needs=each.needs)


def remove() -> None:
    """Undoes `register`."""
    for each in REWRITES: hooks.remove_rewrite(each.name)
