"""Instructions of a loop of SASS beside its tensor-core instructions, ours beside Triton's for the same
matmuls.

Nothing runs on a GPU: Triton's kernels (gemm_peers.py) and ours are assembled by the same ptxas for the same
architecture, and the innermost loop with tensor-core instructions is found in the listings. "instr" counts
all of the loop, "around" the fewest that a warp executes in an iteration (waits that succeed at once). "a
unit" divides "around" by the work of a warp in quarters of 64x8x16: one HMMA.16816, 1/32 of an
HGMMA.64x256x16. Registers, spills and shared memory are those of the whole kernel.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from itertools import product as pairs
from pathlib import Path
from typing import Any

import triton
from tinygrad.dtype import DType, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib import gemm_peers
from bench.lib.gemm_peers import Peer
from bench.lib.measure import each, save, table
from tinygrad_nv.ptx.assemble import Assembly, assemble
from tinygrad_nv.ptx.sass import TENSOR, disassemble, functions, main_loop
from tinygrad_nv.tile.gemm.schedules import Mma, RingSchedule, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EXTENT = 4096
DTYPES = {"bf16": dtypes.bfloat16, "f16": dtypes.float16, "e4m3": dtypes.fp8e4m3, "s8": dtypes.int8}
MAJORS = {"K": "x @ w.T", "MN": "x @ w"}


@dataclass(frozen=True)
class GemmCase:
    """One kernel's main loop and resources. `b_major` is what is computed, where that is no product."""
    arch: str
    b_major: str
    block: str
    kernel: str
    instructions: int
    around: int
    tensor: int
    units: float
    registers: int
    spills: int
    smem_bytes: int
    opcodes: dict[str, int]
    ours: bool = False
    dtype: str = "bf16"

    @property
    def each(self) -> float:
        """Instructions around the loop for each unit of work."""
        return self.around / self.units

    @property
    def case(self) -> tuple[str, str, str, str]:
        """Returns the spec, and the tile it is computed in."""
        return self.arch, self.dtype, self.b_major, self.block


def spec(b_major: str = "MN", dtype: str = "bf16", m: int = EXTENT, n: int = EXTENT,
         k: int = EXTENT) -> GemmSpec:
    """A product of dense operands, A with K innermost."""
    kind = DTYPES[dtype]
    right = Operand(kind, k, 1) if b_major == "K" else Operand(kind, 1, n)
    return GemmSpec(m, n, k, Operand(kind, k, 1), right, Result(_result(kind), n, 1))


def _result(kind: DType) -> DType:
    return {dtypes.int8: dtypes.int32, dtypes.fp8e4m3: dtypes.bfloat16}.get(kind, kind)


def measure(assembly: Assembly, name: str, shared: int, **facts: Any) -> GemmCase:
    """The row of an assembled kernel with `shared` dynamic bytes."""
    loop = main_loop(functions(disassemble(assembly.cubin))[name])
    assert loop is not None, f"{name}: no loop with tensor-core instructions"
    used = assembly.kernels[name]
    return GemmCase(instructions=len(loop.instructions), around=loop.around, tensor=loop.tensor,
                    units=loop.units,
                    registers=used.registers, spills=used.spill_store_bytes + used.spill_load_bytes,
                    smem_bytes=used.shared_bytes + shared, opcodes=dict(loop.counts.most_common()), **facts)


def of_triton(peer: Peer, arch: str) -> GemmCase:
    """Triton's kernel."""
    made = gemm_peers.compile_kernel(peer, arch)
    return measure(assemble(made.readable, arch), made.name, made.shared_bytes, arch=arch, kernel=str(peer),
                   b_major=peer.b_major, block="x".join(map(str, peer.block)), dtype=peer.dtype)


def of_ours(schedule: RingSchedule, arch: str, b_major: str, dtype: str = "bf16") -> GemmCase:
    """Our kernel."""
    made = TABLE.build(spec(b_major, dtype), schedule, GPU(arch))
    return measure(assemble(made.ptx, arch), made.name, made.dynamic_smem, arch=arch, b_major=b_major,
                   block=f"{schedule.block_m}x{schedule.block_n}x{schedule.block_k}", dtype=dtype,
                   kernel=f"ours, {str(schedule).partition(', ')[2]}", ours=True)


# **** which ****

def peers(arch: str, b_major: str) -> list[Peer]:
    """Triton's kernels of the tile that suits the architecture."""
    if arch == "sm_80":
        sizes = [*pairs((4, 8), (3, 4))]
        return [*(Peer("pointers", (128, 128, 32), warps, stages, b_major) for warps, stages in sizes),
                Peer("pointers, masked", (128, 128, 32), 4, 3, b_major)]
    kinds = (("pointers", 8), ("descriptors", 8), ("persistent", 8), ("warp-specialised", 4))
    return [Peer(kind, (128, 256, 64), warps, 3, b_major) for kind, warps in kinds]


def schedules(arch: str) -> list[RingSchedule]:
    """Ours for the same tile, those that the templates take."""
    if arch == "sm_80":
        small = Mma().block(128, 128).k(32)
        tried: list[RingSchedule] = [small.warps(2, columns).stages(stages)
                                     for columns, stages in pairs((2, 4), (3, 4))]
    else:
        tile = Wgmma().block(128, 256).k(64)
        tried = [tile.stages(3), tile.stages(4), tile.stages(4).cluster(2)]
    return [schedule for schedule in tried if not TABLE.problems(spec(), schedule, GPU(arch))]


def rows(arch: str, b_major: str) -> list[GemmCase]:
    """Triton's, then ours."""
    return [*(of_triton(peer, arch) for peer in peers(arch, b_major)),
            *(of_ours(schedule, arch, b_major) for schedule in schedules(arch))]


def best(found: list[GemmCase], ours: bool) -> GemmCase | None:
    """The row with the fewest instructions for its work."""
    return min((row for row in found if row.ours == ours), key=lambda row: row.each, default=None)


# **** what is said ****

HEADER = ["", "instr", "around", "tensor", "a tensor instr", "a unit", "registers", "spilled B", "smem KiB"]


def cells(row: GemmCase) -> list[str]:
    """A row of the table."""
    return [row.kernel, str(row.instructions), str(row.around), str(row.tensor),
            f"{row.around / row.tensor:.2f}", f"{row.each:.3f}", str(row.registers), str(row.spills),
            f"{row.smem_bytes / 1024:.0f}"]


def overhead(row: GemmCase) -> str:
    """Returns the instructions of a loop beside the tensor core's, the most first."""
    return ", ".join(f"{count} {opcode}" for opcode, count in row.opcodes.items() if opcode not in TENSOR)


def report(found: list[GemmCase]) -> str:
    """A table for each product and tile, and where the best of each side spends its instructions."""
    lines = []
    for case in dict.fromkeys(row.case for row in found):
        mine = [row for row in found if row.case == case]
        arch, dtype, b_major, block = case
        what = MAJORS.get(b_major, b_major)
        lines += [f"{arch} {dtype} {what} {block}", table(HEADER, [cells(row) for row in mine])]
        for ours in (False, True):
            if (one := best(mine, ours)) is not None: lines.append(f"  {one.kernel}: {overhead(one)}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Compiles everything and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help="print only")
    arguments = parser.parse_args()
    found = [row for arch, b_major in each(list(pairs(("sm_80", "sm_90a"), MAJORS)))
             for row in rows(arch, b_major)]
    print(report(found))
    record = {"triton": triton.__version__, "rows": [{**asdict(row), "each": row.each} for row in found]}
    if not arguments.dry: save("sass_gemm", record)


if __name__ == "__main__": main()
