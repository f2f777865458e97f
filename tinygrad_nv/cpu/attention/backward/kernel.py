"""The backward pass of flash attention on a CPU (FlashAttention-2, Dao 2023, algorithm 2).

Protocol: a BackwardSpec and a schedule to a kernel whose parameters are those of tile/kernel.py's
BackwardKernel, less turns; dq is not read before it is written. A block of `block_n` keys, with dk and dv of
it in scratch memory, meets all blocks of `block_m` rows that see it, of all query heads of its key head:

    for a block of keys:                                    k, kᵀ and vᵀ in float32
        for a query head, a block of rows:                  q and grad in float32
            for ROWS rows, a panel of columns they see:
                s = q kᵀ; dp = grad vᵀ                      tiles in registers
                p = 2^((score(s) − l) log2 e); ds = p (dp − delta) ∂score/∂s
            for ROWS keys:   dv += pᵀ grad; dk += dsᵀ q     over the rows that see them
            for ROWS rows:   dq += ds k                     over the keys they see

Vectors lie along keys where there are scores, else along d. p and ds are not rounded to 16 bits: products are
of float32.

No bit depends on the parts. Up to as many parts as there are key heads share out key heads, and everything
is computed once. More of them share out blocks of keys, for dk and dv, and then blocks of rows, for dq, which
compute s and dp again: 7 products instead of 5, each in the same order.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.attention.backward.text import Text
from tinygrad_nv.cpu.attention.backward.tiles import ROWS, pitch
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.spec import KEEP_ALL

STACK_BYTES = 1 << 20   # what a kernel may keep on a thread's stack
BLOCKS = ((96, 128), (96, 64), (48, 64))    # rows and keys
PARTS = 8               # of a thread: who is done takes the next
ONCE = 5 / 7            # of the threads' time must be of use where key heads are shared out


@dataclass(frozen=True)
class CPUFlashBackward(CPUSchedule):
    """Blocks of `block_m` queries and of `block_n` keys."""
    block_m: int = 48
    block_n: int = 64
    template: ClassVar[str] = "flash_backward"

    def words(self) -> list[str]: return [*super().words(), f"{self.block_m}x{self.block_n}"]


def problems(spec: BackwardSpec, s: CPUFlashBackward) -> list[str]:
    """Why this template does not take a backward pass; empty when it does."""
    try: slope = derivative(spec.forward.score, precise=True)
    except SpecError as error: return [str(error.found)]
    return list(dict.fromkeys([*expression.problems(spec.forward.score), *expression.problems(slope)]))


def default(spec: BackwardSpec, target: CPU) -> CPUFlashBackward:
    """The default schedule, where none was tuned: the largest blocks that fit a stack and half of a cache."""
    most = min(STACK_BYTES, max(target.l2_bytes // 2, stack_bytes(spec, *BLOCKS[-1])))
    m, n = next(blocks for blocks in BLOCKS if stack_bytes(spec, *blocks) <= most)
    return CPUFlashBackward(target.isa, _parts(spec, target.threads, m, n), m, n)


def stack_bytes(spec: BackwardSpec, block_m: int, block_n: int) -> int:
    """Scratch memory of a kernel."""
    one, scores = spec.forward, pitch(block_n)
    wide = pitch(one.d), pitch(one.d_v)
    keys = (block_n + ROWS) * (2 * wide[0] + wide[1]) + sum(wide) * scores
    rows = (block_m + ROWS) * (sum(wide) + 2 * scores + 2)
    return 4 * (keys + rows + ROWS * wide[0]) + (block_m * block_n if one.kept < KEEP_ALL else 0)


def _parts(spec: BackwardSpec, threads: int, block_m: int, block_n: int) -> int:
    """Key heads for all threads, or blocks where too few of them would have key heads."""
    one = spec.forward
    heads, blocks = prod(one.batch[:2]), items(spec, block_m, block_n)
    rounds = -(-heads // threads)
    if heads >= ONCE * rounds * threads or sum(blocks) <= heads: return min(heads, PARTS * threads)
    return min(sum(blocks), max(PARTS * threads, heads + 1))


def items(spec: BackwardSpec, block_m: int, block_n: int) -> tuple[int, int]:
    """Blocks of keys and blocks of rows, in all."""
    one = spec.forward
    return prod(one.batch[:2]) * -(-one.s_kv // block_n), prod(one.batch) * -(-one.s_q // block_m)


def build(spec: BackwardSpec, schedule: CPUFlashBackward) -> CPUKernel:
    """The kernel of a backward pass."""
    one, isa = spec.forward, schedule.isa
    text = Text(spec, isa, schedule.block_m, schedule.block_n)
    outputs = [("float", "dq"), (c_type(spec.dk.dtype), "dk"), (c_type(spec.dv.dtype), "dv")]
    inputs = [(c_type(one.q.dtype), name) for name in ("q", "k", "v", "grad")]
    inputs += [("float", "l"), ("float", "delta")]
    if one.kept < KEEP_ALL: inputs.append(("u32", "seed"))
    inputs += [(c_type(dtype), f"x{i}") for i, dtype in enumerate(one.parameters)]
    body = text.body(schedule.parts, *items(spec, schedule.block_m, schedule.block_n))
    return kernel(_name(spec, isa), isa, body, outputs, inputs, one.symbolic, schedule.parts,
                  before=text.functions())


def _name(spec: BackwardSpec, isa: ISA) -> str:
    one = spec.forward
    return f"flash_backward_{one.s_q}x{one.s_kv}x{one.d}"
