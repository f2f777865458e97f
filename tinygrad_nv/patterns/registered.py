"""The rewrites of this package, in their order, with what each needs to be in a graph and what it depends on
besides: `register` gives them to hooks.py."""
from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.patterns import attention, gemm, named, norm, target


@dataclass(frozen=True)
class Registered:
    """The arguments of `hooks.add_rewrite`."""
    name: str
    fn: Callable[[UOp], UOp]
    needs: tuple[Collection[Ops], ...]
    keys: tuple[Callable[[], Hashable], ...] = ()


REWRITES = (Registered("named", named.rewrite, named.NEEDS),
            Registered("attention", attention.rewrite, attention.NEEDS, (attention.configuration,)),
            Registered("gemm", gemm.rewrite, gemm.NEEDS, (gemm.configuration,)),
            Registered("norm", norm.rewrite, norm.NEEDS, (norm.configuration, target.configuration)))


def register() -> None:
    """Registers them all. Raises `HookError` where one is registered already."""
    for each in REWRITES: hooks.add_rewrite(each.name, each.fn, *each.keys, needs=each.needs)


def remove() -> None:
    """Undoes `register`."""
    for each in REWRITES: hooks.remove_rewrite(each.name)
