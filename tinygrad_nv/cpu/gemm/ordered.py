"""The class of a matmul's schedules on a CPU: the blocked one, with blocks of k that rows do not change.

Protocol: tile/order.py. The blocked kernel adds an element's terms one after the other from each block's
first on, then the blocks; so the class is its instruction set and `block_k`, which is that of panels two
vectors wide, whatever the width is. gemv and AMX tiles add in other orders, and do not take all numbers of
rows.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from tinygrad_nv.cpu.gemm.blocked import kernel as blocked
from tinygrad_nv.cpu.gemm.blocked.blocks import deepest
from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.order import Ordered

Blocked = TypeVar("Blocked", bound=CPUGemm)


@lru_cache(4096)
def order_schedule(spec: GemmSpec, target: CPU) -> Ordered | None:
    """The schedule of the class; None where the kernel does not take a matmul."""
    made = in_blocks(blocked.default(spec, target), spec, target)
    return None if blocked.problems(spec, made) else Ordered(made, words(made))


def in_blocks(s: Blocked, spec: GemmSpec, target: CPU) -> Blocked:
    """A schedule with the class's blocks of k."""
    per, lanes = PER[kind_of(spec, target.isa)], target.isa.lanes
    units = -(-spec.k // per)
    most = deepest(spec, target, 2 * lanes, per)
    return replace(s, block_k=up(-(-units // -(-units // most)), lanes) * per)


def words(s: CPUGemm) -> str:
    """The class."""
    return f"{s.isa}, blocks of {s.block_k} along k"
