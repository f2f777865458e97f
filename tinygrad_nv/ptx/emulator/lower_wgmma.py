"""wgmma: shapes, operands and flags of asynchronous matmuls. Handlers: csrc/wgmma.c."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_async import count_of
from tinygrad_nv.ptx.emulator.lower_tensor import (
    BITS,
    ELEMENTS,
    RESULTS,
    SATURATE,
    SELECTOR,
    SPARSE,
    pack_shape,
    registers,
    selector,
    shape,
)
from tinygrad_nv.ptx.emulator.lowering import FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Immediate, Instruction, Operand, Register, Vector

NEGATE_A, NEGATE_B, MN_A, MN_B = 1 << 8, 1 << 9, 1 << 10, 1 << 11


def constant(low: FunctionLowering, operand: Operand, what: str, allowed: tuple[int, ...]) -> int:
    """An immediate that must be one of `allowed`."""
    if not isinstance(operand, Immediate) or int(operand.value) not in allowed:
        raise low.fail(f"{what} must be a constant", " or ".join(map(str, allowed)))
    return int(operand.value)


def descriptor(low: FunctionLowering, operand: Operand, what: str) -> int:
    """The place of a 64-bit matrix descriptor."""
    if low.width_of(operand) != 8 and not isinstance(operand, Immediate):
        raise low.fail(f"{what} is no 64-bit descriptor", "a .b64 register")
    return low.source(operand, "b64")


def tail_flags(low: FunctionLowering, tail: tuple[Operand, ...], element: str, from_registers: bool) -> int:
    """The immediates after scale-d: scale-a, scale-b, then trans-a (not for registers) and trans-b."""
    if element in ("s8", "u8", "b1"): wanted = 0
    elif BITS[element] == 16: wanted = 3 if from_registers else 4
    else: wanted = 2
    if len(tail) != wanted: raise low.fail(f"{len(tail)} operands after scale-d", str(wanted))
    if not wanted: return 0
    flags = NEGATE_A * (constant(low, tail[0], "scale-a", (-1, 1)) < 0)
    flags |= NEGATE_B * (constant(low, tail[1], "scale-b", (-1, 1)) < 0)
    for operand, flag in zip(tail[2:], (MN_B,) if from_registers else (MN_A, MN_B), strict=False):
        flags |= flag * constant(low, operand, "transposition", (0, 1))
    return flags


@lowers("wgmma.mma_async")
def mma_async(low: FunctionLowering, instruction: Instruction) -> None:
    """`wgmma.mma_async{.sp}.sync.aligned.SHAPE.D.A.B d, a, b-desc{, meta, sel}, scale-d{, …};`."""
    m, n, k = shape(low)
    d, a, b = (x for x in instruction.modifiers if x in ELEMENTS or x in RESULTS)
    sparse = low.has("sp")
    out, left, right, *tail = instruction.operands
    places = registers(low, out, n // (4 if d == "f16" else 2), "b32", "D", written=True)
    from_registers = isinstance(left, Vector)
    flags = RESULTS[d] | SATURATE * low.has("satfinite")
    fields = {"b": descriptor(low, right, "B")}
    if from_registers: places += registers(low, left, 4, "b32", "A")
    else: fields["a"] = descriptor(low, left, "A")
    if sparse:
        fields["e"] = low.source(tail.pop(0), "b32")
        flags |= SPARSE | selector(low, tail.pop(0), 1 if BITS[a] >= 16 else 0) << SELECTOR
    if not tail: raise low.fail("no scale-d", "a predicate, 0 or 1")
    scale = tail.pop(0)
    if not (isinstance(scale, Register) and scale.kind == "pred"): constant(low, scale, "scale-d", (0, 1))
    fields["c"] = low.source(scale, "pred")
    flags |= tail_flags(low, tuple(tail), a, from_registers)
    # D and A's registers are in no list of reads and writes: those are for ordinary accesses
    low.emit("wgmma", more=pack_shape(m, n, k), width=ELEMENTS[a], vector=ELEMENTS[b], flags=flags,
             list=places,
             **fields)


@lowers("wgmma.fence")
def fence(low: FunctionLowering, instruction: Instruction) -> None:
    """`wgmma.fence.sync.aligned;`."""
    low.emit("wgmma_fence")


@lowers("wgmma.commit_group")
def commit_group(low: FunctionLowering, instruction: Instruction) -> None:
    """`wgmma.commit_group.sync.aligned;`."""
    low.emit("wgmma_commit")


@lowers("wgmma.wait_group")
def wait_group(low: FunctionLowering, instruction: Instruction) -> None:
    """`wgmma.wait_group.sync.aligned N;`. N has no limit; ptxas makes 7 of more than 7."""
    low.emit("wgmma_wait", imm=count_of(low, instruction.operands[0]))
