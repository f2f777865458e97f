# mypy: disallow-untyped-defs=False
"""Cross entropy with its gradient in Triton, as Liger-Kernel has it: one program a row, which it reads twice.

Protocol: `launch(gradient, losses, logits, classes, ignored)` of matrices whose rows lie side by side. Blocks
and warps are Liger's (ops/cross_entropy.py, MAX_FUSED_SIZE; arXiv 2410.10989), but the gradient does not
replace the logits.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MOST = 32768
WARPS = 32


@triton.jit
def _rows(gradient, losses, logits, classes, n, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(classes + row)
    x_at, to = logits + row * n, gradient + row * n
    at = tl.arange(0, BLOCK)
    if own == ignored:
        for first in range(0, n, BLOCK):
            tl.store(to + first + at, tl.zeros((BLOCK,), to.dtype.element_ty), mask=first + at < n)
        tl.store(losses + row, 0.0)
        return
    most, total = -float("inf"), 0.0
    for first in range(0, n, BLOCK):
        x = tl.load(x_at + first + at, mask=first + at < n, other=-float("inf")).to(tl.float32)
        now = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - now) + tl.sum(tl.exp(x - now))
        most = now
    tl.store(losses + row, most + tl.log(total) - tl.load(x_at + own).to(tl.float32))
    for first in range(0, n, BLOCK):
        x = tl.load(x_at + first + at, mask=first + at < n, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - most) / total
        p = tl.where(first + at == own, p - 1.0, p)
        tl.store(to + first + at, p.to(to.dtype.element_ty), mask=first + at < n)


def launch(gradient: Any, losses: Any, logits: Any, classes: Any, ignored: int) -> None:
    """One launch."""
    rows, n = logits.shape
    block = min(MOST, triton.next_power_of_2(n))
    _rows[(rows,)](gradient, losses, logits, classes, n, ignored, BLOCK=block, num_warps=WARPS)
