"""Demands of a SASS instruction on an SM: its unit, how long that is busy, and when its result is there.

Sources: CUDA C++ Programming Guide, "Arithmetic Instructions", results a cycle and SM of compute capability
9.0: 128 of float32 (FMA), 64 of integers and comparisons (ALU), 16 of MUFU and of most conversions (XU), 64
of float64, 32 of shuffles. A scheduler has a quarter: a warp takes 1, 2, 8 cycles of its units. Latencies of
what clears a scoreboard: HOPPER_TIMING.md 7.3 to 7.5, and what ptxas schedules for where that has none.

wgmma (HOPPER_TIMING.md 7.3): the tensor core takes N / 2 cycles for m64nNk16 of 16 bits, the same for the
other k of one instruction; shared memory gives 128 bytes a cycle of B, 32 N, and of A where it lies there,
2048. """
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import IntEnum

from tinygrad_nv.ptx.sass import SASSInstruction
from tinygrad_nv.ptx.timing.gpu import GPUFigures


class Unit(IntEnum):
    """csrc/sm.c."""
    CONTROL = 0
    FMA = 1
    ALU = 2
    HALF = 3
    WIDE = 4
    XU = 5
    UNIFORM = 6
    DOUBLE = 7
    SHARED = 8
    MEMORY = 9
    TENSOR = 10
    COPY = 11


class Kind(IntEnum):
    """csrc/sm.c."""
    PLAIN = 0
    WGMMA = 1
    WGMMA_WAIT = 2
    MMA = 3
    SHARED_ACCESS = 4
    GLOBAL_READ = 5
    GLOBAL_WRITE = 6
    TMA_READ = 7
    TMA_WRITE = 8
    BULK_COMMIT = 9
    COPY_ASYNC = 10
    COPY_COMMIT = 11
    COPY_WAIT = 12
    HOLD = 13
    WGMMA_ARRIVE = 14


@dataclass(frozen=True)
class Cost:
    """`busy`: cycles for which the unit takes nothing else of the scheduler. `latency`: cycles from issue to
    the result. `tensor`, `shared`: of tensor cores and shared memory. `registers`: that it reads, of sums of
    tensor cores also those that it writes. `number`: csrc/sm.c."""
    unit: Unit
    busy: int = 1
    latency: int = 6
    kind: Kind = Kind.PLAIN
    tensor: int = 0
    shared: int = 0
    registers: int = 0
    number: int = 0
    known: bool = True


DSMEM_LATENCY = 200     # cycles [hopper 7.5]: 181 in a TPC, 201 to 211 across
_VARIABLE = 20      # cycles of results that ptxas waits for and nothing is published of: assumed
# beginnings of opcode and modifiers, and their cost; the first that fits
_GROUPS: tuple[tuple[str, Cost], ...] = (
    ("F2FP I2FP FSEL FMNMX FSET HMNMX2 HSET", Cost(Unit.ALU, 2)),
    ("MUFU F2F F2I I2F. I2F FRND POPC FLO BREV FCHK", Cost(Unit.XU, 8, 18)),
    ("FFMA FADD FMUL FSWZADD", Cost(Unit.FMA)),
    ("HFMA2 HADD2 HMUL2", Cost(Unit.HALF)),
    ("DFMA DADD DMUL DSETP DMNMX", Cost(Unit.DOUBLE, 2, 16)),
    ("IMAD IDP", Cost(Unit.WIDE, 2)),
    ("HMMA IMMA QMMA BMMA DMMA", Cost(Unit.TENSOR, kind=Kind.MMA)),
    ("WARPGROUP.DEPBAR", Cost(Unit.CONTROL, kind=Kind.WGMMA_WAIT)),
    ("WARPGROUP.ARRIVE", Cost(Unit.CONTROL, kind=Kind.WGMMA_ARRIVE)),
    ("LDS", Cost(Unit.SHARED, 1, 0, Kind.SHARED_ACCESS)),  # LDSM too; its latency is the GPU's
    ("STS", Cost(Unit.SHARED, 1, _VARIABLE, Kind.SHARED_ACCESS)),
    ("ATOMS", Cost(Unit.SHARED, 1, 40, Kind.SHARED_ACCESS)),
    ("SHFL", Cost(Unit.SHARED, 2, 24)), ("SYNCS", Cost(Unit.SHARED, 2, _VARIABLE)),
    ("REDUX MATCH", Cost(Unit.ALU, 2, _VARIABLE)), ("VOTE. R2UR ELECT", Cost(Unit.ALU, 2, 12)),
    ("LDGSTS ARRIVES.LDGSTSBAR", Cost(Unit.MEMORY, 4, 30, Kind.COPY_ASYNC)),
    ("LDGDEPBAR", Cost(Unit.CONTROL, kind=Kind.COPY_COMMIT)),
    ("LDG", Cost(Unit.MEMORY, 4, 0, Kind.GLOBAL_READ)),
    ("LD.", Cost(Unit.MEMORY, 4, DSMEM_LATENCY, Kind.GLOBAL_READ)),     # or of global memory: noted then
    ("LDL STL", Cost(Unit.MEMORY, 4, 40)),
    ("STG ST. REDG RED.", Cost(Unit.MEMORY, 4, _VARIABLE, Kind.GLOBAL_WRITE)),
    ("ATOMG ATOM", Cost(Unit.MEMORY, 4, 300, Kind.GLOBAL_READ)),
    ("LDC S2UR S2R", Cost(Unit.MEMORY, 2, 25)),
    ("MEMBAR.ALL.CTA MEMBAR.SC.CTA", Cost(Unit.MEMORY, 2, _VARIABLE)),
    ("MEMBAR", Cost(Unit.MEMORY, 2, kind=Kind.HOLD)),    # its latency is the GPU's
    ("CCTL FENCE ERRBAR CGAERRBAR", Cost(Unit.MEMORY, 2, _VARIABLE)),
    ("CS2R", Cost(Unit.ALU, 2, 12)), ("ULDC", Cost(Unit.UNIFORM, 2, 12)),
    ("UTMALDG UBLKCP", Cost(Unit.COPY, 2, _VARIABLE, Kind.TMA_READ)),
    ("UTMASTG UTMAREDG UBLKRED", Cost(Unit.COPY, 2, _VARIABLE, Kind.TMA_WRITE)),
    ("UTMACMDFLUSH", Cost(Unit.COPY, 2, kind=Kind.BULK_COMMIT)),
    ("UTMACCTL UTMAPF UBLKPF", Cost(Unit.COPY, 2, _VARIABLE)),
    ("BAR. UCGABAR NANOSLEEP ACQBULK PREEXIT USETMAXREG", Cost(Unit.CONTROL, 2, _VARIABLE)),
    ("WARPSYNC.ALL", Cost(Unit.CONTROL, kind=Kind.HOLD)),   # after a branch; of warps with wgmmas alone
    ("BRA BRX JMX JMP EXIT RET CALL BSSY BSYNC BREAK NOP YIELD WARPSYNC WARPGROUP KILL BPT BMOV PMTRIG "
     "RPCMOV LEPC GETLMEMBASE ENDCOLLECTIVE", Cost(Unit.CONTROL)),
    ("IADD LOP PLOP3 ISETP SEL SHF LEA PRMT IABS IMNMX VIMNMX VIADD MOV P2R R2P SGXT BMSK VABSDIFF I2I ICMP "
     "ISET SHL SHR VHMNMX CSMTEST QSPC", Cost(Unit.ALU, 2)),
    ("UIADD3 UIMAD UISETP ULEA ULOP3 UMOV UPRMT USEL USHF UPLOP3 UP2UR UR2UP UFLO UPOPC UBMSK USGXT UBREV "
     "VOTEU UVIADD UVIMNMX UF2FP UCLEA UIABS", Cost(Unit.UNIFORM, 2)),
)
_ROWS = tuple((name, cost) for names, cost in _GROUPS for name in names.split())
_NEVER = Cost(Unit.CONTROL, 1, 1)
UNKNOWN = Cost(Unit.ALU, 2, _VARIABLE, known=False)
_ASYNC = re.compile(r"[HIQB]GMMA")
_REGISTER = re.compile(r"\bR\d+")
_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")


def cost_of(each: SASSInstruction, gpu: GPUFigures) -> Cost:
    """Returns what an instruction takes on a GPU. One without a row is taken for an integer operation whose
    result is variable, and is not `known`."""
    if each.guard == "@!PT": return _NEVER     # ptxas keeps some that never happen, as LDS beside barriers
    whole = each.opcode + each.modifiers + "."
    if _ASYNC.match(each.opcode): return _wgmma(each, gpu)
    if each.opcode == "DEPBAR": return Cost(Unit.CONTROL, kind=Kind.COPY_WAIT, number=pending(each))
    found = next((cost for name, cost in _ROWS if whole.startswith(name)), UNKNOWN)
    if found.kind is Kind.MMA:
        return replace(found, latency=gpu.mma_latency, tensor=_mma_cycles(each, gpu),
                       registers=_mma_registers(each))
    if found.kind is Kind.HOLD:
        fence = found.unit is Unit.MEMORY
        return replace(found, latency=gpu.fence_latency if fence else gpu.reconverge_latency)
    if found.kind is Kind.SHARED_ACCESS and not found.latency:
        return replace(found, latency=gpu.shared_latency)
    if found.kind is Kind.WGMMA_WAIT:
        return Cost(Unit.CONTROL, kind=Kind.WGMMA_WAIT, number=pending(each))
    if Unit.FMA <= found.unit <= Unit.XU: found = replace(found, registers=count_registers(each))
    if found.unit is Unit.FMA: return replace(found, busy=gpu.fp32_cycles)
    return found


def count_registers(each: SASSInstruction) -> int:
    """Returns how many registers an instruction of arithmetic reads: all it names but the first operand."""
    first, _, others = each.operands.partition(",")
    result = _REGISTER.match(first.strip()) or "RZ" in first
    return len(_REGISTER.findall(others if result else each.operands))


def pending(each: SASSInstruction) -> int:
    """How many groups a wait leaves under way."""
    last = each.operands.rpartition(",")[2].strip()
    return int(last, 16) if last.startswith("0x") else 0


def _wgmma(each: SASSInstruction, gpu: GPUFigures) -> Cost:
    found = _SHAPE.search(each.modifiers)
    n = int(found[1]) if found else 256
    operands = [part.strip() for part in each.operands.split(",")]
    of_registers = len(operands) > 1 and not operands[1].startswith("gdesc")
    shared = 32 * n + (0 if of_registers else 2048)
    serving = math.ceil(shared / gpu.shared_bytes_per_cycle)
    cycles = max(n // 2, serving) + 1
    return Cost(Unit.TENSOR, 2, 6, Kind.WGMMA, cycles, serving, number=int("gsb0" in each.operands))


def _element_bits(each: SASSInstruction) -> int:
    return 8 if each.opcode in ("IMMA", "QMMA") else 32 if "TF32" in each.modifiers else 16


def _mma_cycles(each: SASSInstruction, gpu: GPUFigures) -> int:
    """Returns the cycles of a scheduler's quarter of the tensor cores."""
    return max(1, round(each.tensor_flops / 2 * _element_bits(each) / 16 / gpu.mma_macs))


def _mma_registers(each: SASSInstruction) -> int:
    """Returns the registers of operands and sums, which are read and written."""
    m, n, k = each.tensor_shape
    sums = 2 * m * n * (16 if ".F16" in each.modifiers and ".F32" not in each.modifiers else 32)
    return ((m + n) * k * _element_bits(each) + sums) // 1024
