"""What one CTA has to do: cycles of each of its SM's resources, by schedule or from the emulator's counters.

Protocol: `Work` counts for one `block_k` of the sum (a step) and for what follows the sum of a tile. The
cycles are those that the resource is taken for; what overlaps is cost.py's matter. `planned` computes them
from spec and schedule, `counted` from two runs on the emulator that differ in K alone: the difference is
what steps cost, the rest what a tile costs beside them.

Formulas. wgmma m64nNkK, K of 32 bytes: 64 · N · K multiply-adds at the SM's rate, and (64 + N) · 32 bytes
read from shared memory at 128 bytes a cycle. mma.sync: the same multiply-adds; every warp reads its rows of
A and of B, so that a tile's bytes are read once for each warp beside or below. Copies write a stage once.
Four schedulers issue an instruction a cycle each.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tinygrad.dtype import DType

from tinygrad_nv.tile.expression import Apply, Load, walk
from tinygrad_nv.tile.gemm.gemv.plan import Plan, turned
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gpu import Machine
from tinygrad_nv.tile.operations import OPERATIONS
from tinygrad_nv.tile.schedule import Schedule

if TYPE_CHECKING:
    from tinygrad_nv.ptx.emulator.report import Site, Stats

SMEM_BYTES_PER_CYCLE, SCHEDULERS, L2_BYTES_PER_CYCLE = 128, 4, 64
INSTRUCTION_BYTES = 32              # of K that one tensor-core instruction takes, for every dtype
STORE_OPS = {"wgmma": 4.0, "mma": 4.0, "gemv": 10.0}   # an element's address, rounding and store
WARP_STEP = 45                      # instructions of a consumer's warp for a stage: wait, wgmmas, release
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
    """What follows a sum, for each element: instructions, and bytes loaded and stored."""
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


def width(spec: GemmSpec, s: Schedule) -> int:
    """Columns of B that a tile needs. Of a product of several parts block_n is all of them, for gemv each."""
    return s.block_n * spec.parts if s.template == "gemv" else s.block_n


def columns(spec: GemmSpec, s: Schedule) -> int:
    """Columns of the result that a tile has."""
    return s.block_n if s.template == "gemv" else max(1, s.block_n // spec.parts)


def planned(spec: GemmSpec, s: Schedule, machine: Machine, end: Ending) -> Work:
    """The work of a schedule as its template does it."""
    size, wide = spec.a.dtype.itemsize, width(spec, s)
    stage = (s.block_m + wide) * s.block_k * size
    steps_of_k = s.block_k * size / INSTRUCTION_BYTES
    products = s.block_m * wide * s.block_k
    finish = _finish(spec, s, end)
    if s.template == "gemv":
        plan = Plan.of(turned(spec, s), s)
        # a weight goes to the tensor cores, or is widened and multiplied for each row
        lanes = wide * s.block_k * (1.0 if plan.tensor else 1.5 + 1.25 * plan.spec.m)
        return Work(0, 0, lanes / machine.fp32_fma, finish, plan.warps_k)
    tensor = products / (machine.tensor_fma * machine.tensor_scale(spec.a.dtype, s.template)
                         * machine.sustained)
    if s.template == "wgmma":
        read = -(-s.block_m // 64) * (64 + wide) * steps_of_k * INSTRUCTION_BYTES
        issue = WARP_STEP * 4 * (1 if s.mode == "pingpong" else s.consumers) / SCHEDULERS
        return Work(tensor, (read + stage) / SMEM_BYTES_PER_CYCLE, issue, finish, s.depth - 1)
    read = (s.block_m * s.warps_n + wide * s.warps_m) * s.block_k * size
    issued = products / (16 * 8) / (INSTRUCTION_BYTES / size) + read / 512 + _copies(spec, s)
    return Work(tensor, (read + stage) / SMEM_BYTES_PER_CYCLE, issued / SCHEDULERS, finish, s.depth - 1)


def _copies(spec: GemmSpec, s: Schedule) -> float:
    """Instructions of warps that bring a stage: five for each chunk of a lane."""
    elements = ((spec.a, s.block_m * s.block_k), (spec.b, width(spec, s) * s.block_k))
    return sum(5 * count * operand.dtype.itemsize / chunk_bytes(operand) / 32 for operand, count in elements)


def chunk_bytes(operand: Operand) -> int:
    """Bytes that cp.async may take at once; an element, through a register, where it cannot be used."""
    aligned = operand.aligned_bytes if operand.major else 0
    return aligned if aligned >= 4 else operand.dtype.itemsize


def _finish(spec: GemmSpec, s: Schedule, end: Ending) -> float:
    elements = (min(spec.m, spec.n) if s.template == "gemv" else s.block_m) * columns(spec, s)
    issue = elements * (STORE_OPS[s.template] + end.operations) / (32 * SCHEDULERS)
    return STORE_LATENCY + max(issue, elements * (end.load_bytes + end.store_bytes) / L2_BYTES_PER_CYCLE)


# **** from counters ****

def counted(short: Stats, long: Stats, steps: tuple[int, int], tiles: int, spec: GemmSpec, s: Schedule,
            machine: Machine, end: Ending) -> Work:
    """The work of a CTA by the counters of two launches of `tiles` tiles each, whose sums take `steps[0]` and
    `steps[1]` steps."""
    few, many = (_cycles(stats, spec.a.dtype, s, machine) for stats in (short, long))
    more = tiles * (steps[1] - steps[0])
    tensor, shared, issue = ((b - a) / more for a, b in zip(few, many, strict=True))
    busy = max((a / tiles - steps[0] * step for a, step in zip(few[1:], (shared, issue), strict=True)))
    bytes_of_tile = s.block_m * columns(spec, s) * (end.load_bytes + end.store_bytes)
    return Work(tensor, shared, issue, STORE_LATENCY + max(busy, bytes_of_tile / L2_BYTES_PER_CYCLE),
                planned(spec, s, machine, end).ahead)


def _cycles(stats: Stats, dtype: DType, s: Schedule, machine: Machine) -> tuple[float, float, float]:
    """Cycles of a whole launch on one SM: tensor cores, shared memory, schedulers."""
    rate = machine.tensor_fma * machine.tensor_scale(dtype, s.template) * machine.sustained
    read = float(sum(map(_operand_bytes, stats.sites)))
    if s.template == "wgmma":  # TMA has no passes, as cp.async has; what is multicast is counted once
        asked = s.block_m / s.cluster_n + s.block_n / s.cluster_m
        read += stats.asynchronous_bytes * (s.block_m + s.block_n) / asked
    passes = sum(site.passes for site in stats.sites)
    return (stats.tensor_flops / 2 / rate, passes + read / SMEM_BYTES_PER_CYCLE,
            stats.warp_instructions / SCHEDULERS)


def _operand_bytes(site: Site) -> int:
    """Bytes that a wgmma reads from shared memory: both operands, for each warpgroup."""
    if not site.opcode.startswith("wgmma.mma_async"): return 0
    columns = next(int(word[4:].partition("k")[0]) for word in site.opcode.split(".") if word[:4] == "m64n")
    return site.warps // 4 * (64 + columns) * INSTRUCTION_BYTES
