"""Instructions of main loops that multiply with quantised matrices, for each weight that becomes an operand.

    python bench/timing/sass_quant.py [--marlin DIR[:INCLUDE…]]

Nothing runs on a GPU: kernels are assembled by ptxas, and the innermost loop with tensor-core instructions is
found in the listings, as sass_gemm.py does. "around" are the fewest instructions that a warp executes in an
iteration, "a weight" those that are not of tensor cores for each weight of a lane: copies, barriers, factors
and activations among them. `--marlin` is a checkout of github.com/IST-DASLab/marlin and folders of headers.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, table
from bench.lib.specs import BF16, F16, QTYPES, quant_matmul
from bench.timing.judges import to_ptx
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import Loop, disassemble, functions, main_loop
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv, QuantMma, QuantWgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EXTENT = 4096


@dataclass(frozen=True)
class Row:
    """A kernel's loop: instructions around it, those of tensor cores, weights of a lane."""
    kernel: str
    type: str
    dtype: str
    arch: str
    around: int
    tensor: int
    weights: int

    @property
    def each(self) -> float: return (self.around - self.tensor) / self.weights


def loop_of(ptx: str, arch: str, name: str) -> Loop:
    """The main loop of a kernel."""
    found = main_loop(functions(disassemble(assemble(ptx, arch).cubin))[name])
    assert found is not None, f"{name}: no loop with tensor-core instructions"
    return found


def ours() -> Iterator[Row]:
    """A gemv of one row, and loops of many; a lane of mma.sync has 8 weights of each 16 x 16, a thread of
    wgmma of each 64 x 16."""
    tall, wide = QuantMma().block(64, 128).k(64).warps(1, 4).stages(4), QuantWgmma().block(128, 256).k(64)
    hopper = GPU("sm_90a", 132)
    cases: tuple[tuple[int, Schedule, GPU, int], ...] = (
        (1, QuantGemv().of(1, 2), hopper, 2), (1024, wide.warps(12).stages(4), hopper, 0),
        (1024, tall, GPU("sm_80", 108), 0))
    for m, schedule, gpu, units in cases:
        for name, type in QTYPES.items():
            for dtype in (BF16, F16):
                spec = quant_matmul(type, m, EXTENT, EXTENT, dtype)
                made = TABLE.build(spec, schedule, gpu)
                loop = loop_of(made.ptx, gpu.arch, made.name)
                if units: weights = units * type.unit // 2
                elif isinstance(schedule, QuantMma): weights = schedule.block_n // schedule.warps_n * 64 // 32
                else: weights = 32
                yield Row(str(schedule), name, short(dtype), gpu.arch, loop.around, loop.tensor, weights)


def marlin(folder: Path, include: tuple[Path, ...]) -> Iterator[Row]:
    """Its kernels for groups of 128: by 16 rows of activations, `rows` of them at once."""
    text = to_ptx('#include "marlin/marlin_cuda_kernel.cu"\n', (folder, *include),
                  ("--expt-relaxed-constexpr",))
    for name in re.findall(r"\.entry (\w*Marlin\w*)\(", text):
        numbers = re.findall(r"Li(\d+)E", name.replace("Lin1", "Li0"))
        threads, rows, columns, depth, stages, group = map(int, numbers)
        if group <= 0: continue
        loop = loop_of(text, "sm_90a", name)
        # each HMMA has four of a lane's weights; rows of activations share them
        words = f"{threads} threads, {16 * rows} rows, {16 * columns} x {16 * depth}, {stages} stages"
        yield Row(f"Marlin {words}", "int4", "f16", "sm_90a", loop.around, loop.tensor,
                  loop.tensor * 4 // rows)


def main() -> int:
    """Prints and keeps the table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marlin", metavar="DIR[:INCLUDE…]")
    parser.add_argument("--dry", action="store_true", help="print only")
    given = parser.parse_args()
    rows = list(ours())
    if given.marlin:
        folder, *include = map(Path, given.marlin.split(os.pathsep))
        rows += marlin(folder, tuple(include))
    print(table(("kernel", "arch", "matrix", "activations", "around", "tensor", "weights", "a weight"),
                [(row.kernel, row.arch, row.type, row.dtype, str(row.around), str(row.tensor),
                  str(row.weights), f"{row.each:.2f}") for row in rows]))
    found = [{**vars(row), "each": round(row.each, 3)} for row in rows]
    if not given.dry: save("sass_quant", {"rows": found})
    return 0


if __name__ == "__main__": sys.exit(main())
