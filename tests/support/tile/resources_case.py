"""What ptxas makes of kernels of attention: that it neither spills nor takes more than there is, how long its
loops are, and exponentials that a warpgroup computes while its wgmmas run, as ptxas has ordered them.

Protocol: `assert_overlapped(code, loops)` holds the innermost loops of wgmmas, of which there are `loops`, to
this: every exponential stands between a wait that leaves wgmmas in flight and the next wait. All of them, not
a share: what keeps them there is that the row sums before that next wait need each one. ptxas keeps the order
of waits, but moves instructions past them. FlashAttention-3 built with the same ptxas has 19 of 90 there (128
elements of d, 176 columns), the template once had none.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.assemble import Assembly, assemble
from tinygrad_nv.ptx.sass import SASSInstruction, disassemble, functions, inner_loops, main_loop
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.kernel import AttentionKernel, BackwardKernel
from tinygrad_nv.tile.limits import SMEM_BYTES

REGISTERS = 65536  # of an SM


def scores(s: int, scale: float) -> dict[str, Expression]:
    """Of `s` rows and keys, two key heads of two query heads each."""
    scaled, capped = Sum() * scale, tanh(Sum() * scale * 0.02) * 50.0
    distance = Position("n").cast(dtypes.float32) - Position("m").cast(dtypes.float32)
    bias = Load(0, dtypes.float32, s, 1)
    return {"mask": where(Load(0, dtypes.bool, s, 1), scaled, Constant(-math.inf)), "bias": scaled + bias,
            "bias of heads": scaled + Load(0, dtypes.bfloat16, s, 1, (0, s * s, 0)).cast(dtypes.float32),
            "soft-cap": capped, "soft-cap and bias": capped + bias, "ALiBi": scaled + distance * 0.0625,
            "ALiBi by head": scaled + Load(0, dtypes.float32, 0, 0, (0, 2, 1)) * distance}


def fitting(made: AttentionKernel | BackwardKernel, arch: str) -> Assembly:
    """A kernel, that neither spills nor takes more than there is; ptxas serialised nothing."""
    assembly = assemble(made.ptx, arch)
    used = assembly.kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert -(-used.registers // 8) * 8 * made.threads <= REGISTERS
    assert used.shared_bytes + made.dynamic_smem <= SMEM_BYTES[arch]
    return assembly


def code_of(made: AttentionKernel | BackwardKernel, arch: str) -> Sequence[SASSInstruction]:
    """The instructions of a kernel that fits."""
    return functions(disassemble(fitting(made, arch).cubin))[made.name]


def around(ptx: str, name: str) -> float:
    """Instructions around the main loop for each product of it, by mma.sync."""
    loop = main_loop(functions(disassemble(assemble(ptx, "sm_80").cubin))[name])
    assert loop is not None
    return loop.around / loop.tensor


def assert_overlapped(code: Sequence[SASSInstruction], loops: int) -> None:
    """Asserts it of a function."""
    found = [loop.after_waits("MUFU.EX2") for loop in inner_loops(code)]
    under = [(sum(count for left, count in waits if left), sum(count for _, count in waits))
             for waits in found]
    assert len(under) == loops
    assert all(own == every > 0 for own, every in under), f"exponentials under wgmmas, of all: {under}"
