"""Sums of squares of chunks (tile/optimizer/spec.py).

Protocol: parts have whole chunks. A chunk is added up in `SUMS` vectors, turn about, which are added at its
end: one order, whatever the number of parts.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.optimizer.adamw import BYTES_OF_PART, PARTS
from tinygrad_nv.cpu.optimizer.table import walk
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.optimizer.spec import CHUNK, SquaresSpec

SUMS = 8    # chains of additions, more than their latency needs


class CPUSquares(CPUSchedule):
    """Shares of chunks."""
    template: ClassVar[str] = "squared_sums"


def default(spec: SquaresSpec, target: CPU) -> CPUSquares:
    """Some parts for each thread, where there is enough to do."""
    most = PARTS * target.threads if target.threads > 1 else 1
    return CPUSquares(target.isa, max(1, min(most, sum(spec.chunks), spec.nbytes // BYTES_OF_PART)))


def build(spec: SquaresSpec, s: CPUSquares) -> CPUKernel:
    """The kernel: sums; all tensors."""
    c, kind = c_type(spec.dtype), short(spec.dtype)
    adds = " ".join(f"{{ const vf a = load_{kind}(g + i + {j} * W); s{j} = fma_(a, a, s{j}); }}"
                    for j in range(SUMS))
    total = " + ".join(f"s{j}" for j in range(SUMS))
    body = f"""    vf {', '.join(f's{j} = (vf)0.f' for j in range(SUMS))};
    s64 i = 0;
    for (; i + {SUMS} * W <= n; i += {SUMS} * W) {{ {adds} }}
    for (; i < n; i += W) {{ const vf a = load_n_{kind}(g + i, n - i); s0 = fma_(a, a, s0); }}
    sums[c] = sum_({total});"""
    text = walk(spec.counts, s.parts, CHUNK, [(f"const {c}", "g")], body)
    tensors = [(c, f"g{i}") for i in range(len(spec.counts))]
    return kernel("squares", s.isa, text, [("float", "sums")], tensors, parts=s.parts)
