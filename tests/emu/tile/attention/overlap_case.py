"""Exponentials that a warpgroup computes while its wgmmas run, as ptxas has ordered them.

Protocol: `assert_overlapped(code, loops)` holds the innermost loops of wgmmas, of which there are `loops`, to
this: every exponential stands between a wait that leaves wgmmas in flight and the next wait. All of them, not
a share: what keeps them there is that the row sums before that next wait need each one. ptxas keeps the order
of waits, but moves instructions past them. FlashAttention-3 built with the same ptxas has 19 of 90 there (128
elements of d, 176 columns), the template once had none.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.sass import SASSInstruction, inner_loops


def assert_overlapped(code: Sequence[SASSInstruction], loops: int) -> None:
    """Asserts it of a function."""
    found = [loop.after_waits("MUFU.EX2") for loop in inner_loops(code)]
    under = [(sum(count for left, count in waits if left), sum(count for _, count in waits))
             for waits in found]
    assert len(under) == loops
    assert all(own == every > 0 for own, every in under), f"exponentials under wgmmas, of all: {under}"
