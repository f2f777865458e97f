"""Work of one CTA: cycles of each of its SM's resources.

Protocol: `Work` counts for one `block_k` of the sum (a step) and for what follows the sum of a tile. The
cycles are those that the resource is taken for; what overlaps is cost.py's matter. Each template's cost.py
computes them from spec and schedule; tune.py from counters of the emulator.

Formulas. wgmma m64nNkK, K of 32 bytes: 64 · N · K multiply-adds at the SM's rate, and (64 + N) · 32 bytes
read from shared memory at 128 bytes a cycle. mma.sync: the same multiply-adds; every warp reads its rows of
A and of B, so that a tile's bytes are read once for each warp beside or below. Copies write a stage once.
Four schedulers issue an instruction a cycle each.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tinygrad_nv.tile.expression import Apply, Load, walk
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.operations import OPERATIONS

SMEM_BYTES_PER_CYCLE, SCHEDULERS, L2_BYTES_PER_CYCLE = 128, 4, 64
INSTRUCTION_BYTES = 32              # of K that one tensor-core instruction takes, for every dtype
STORE_LATENCY = 400.0               # cycles until the first of a tile's sums is on its way


class Work(NamedTuple):
    """Cycles: `tensor`, `shared` and `issue` for a step, `finish` for the end of a tile. `ahead`: steps that
    are being loaded while one is worked on."""
    tensor: float
    shared: float
    issue: float
    finish: float
    ahead: int = 1


@dataclass(frozen=True)
class Ending:
    """Epilogue of a sum, for each element: instructions, and bytes loaded and stored."""
    operations: int
    load_bytes: int
    store_bytes: int


@lru_cache(4096)
def ending(spec: GemmSpec) -> Ending:
    """Instructions and bytes of a spec's epilogue."""
    operations, load_bytes = 0, 0
    for node in walk(spec.epilogue):
        if isinstance(node, Apply): operations += _operations(node)
        elif isinstance(node, Load) and node.m and node.n: load_bytes += node.dtype.itemsize
    return Ending(operations, load_bytes, spec.out.dtype.itemsize)


def _operations(node: Apply) -> int:
    """16-bit results are rounded by an instruction more."""
    return OPERATIONS[node.op].cost + (node.dtype.itemsize == 2 and node.op != "cast")


def ending_cycles(elements: int, end: Ending, store_operations: float) -> float:
    """Cycles of the end of a tile of so many elements, each of which is stored by so many instructions: its
    address, rounding and store."""
    issue = elements * (store_operations + end.operations) / (32 * SCHEDULERS)
    return STORE_LATENCY + max(issue, epilogue_cycles(elements, end))


def epilogue_cycles(elements: int, end: Ending) -> float:
    """Cycles in which L2 moves what the epilogue loads and stores."""
    return elements * (end.load_bytes + end.store_bytes) / L2_BYTES_PER_CYCLE


def chunk_bytes(operand: Operand) -> int:
    """Bytes that cp.async may take at once; an element, through a register, where it cannot be used."""
    aligned = operand.alignment_bytes if operand.major else 0
    return aligned if aligned >= 4 else operand.dtype.itemsize
