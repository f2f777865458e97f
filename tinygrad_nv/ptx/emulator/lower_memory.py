"""ld, st, their kin, and hints to caches. Handlers: csrc/access.c."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lowering import SPACES, WIDTHS, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Address, Immediate, Instruction, Operand, Register, Sink, Vector

SIGNED, STRONG, ACQUIRE, RELEASE, SYSTEM = 1, 2, 4, 8, 16
NONCOHERENT = 256
SCOPES = {"sys": SYSTEM, "cta": 64, "cluster": 128}
ORDERS = {"volatile": STRONG | SYSTEM, "mmio": STRONG | SYSTEM, "relaxed": STRONG,
          "acquire": STRONG | ACQUIRE, "release": STRONG | RELEASE, "acq_rel": STRONG | ACQUIRE | RELEASE}


def order_flags(low: FunctionLowering) -> int:
    """STRONG, ACQUIRE, RELEASE and the scope as the modifiers say."""
    return ORDERS.get(low.one_of(*ORDERS), 0) | scope_flag(low)


def scope_flag(low: FunctionLowering) -> int:
    """The scope that an instruction names, that of the GPU without one."""
    return SCOPES.get(low.one_of(*SCOPES), 0)


def memory_space(low: FunctionLowering) -> int:
    """The state space; .param::entry and .param::func are .param."""
    return SPACES["param"] if low.one_of("param::entry", "param::func") else low.space()


def element(low: FunctionLowering) -> tuple[str, int]:
    """Type and bytes of an element in memory."""
    kind = low.types()[-1]
    return kind, WIDTHS[kind]


def items_of(low: FunctionLowering, operand: Operand) -> tuple[Operand, ...]:
    """The operands of a vector, as many as .v2, .v4 or .v8 says; or the one operand."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    wanted = int(low.one_of("v2", "v4", "v8", default="v1")[1:])
    if len(items) != wanted: raise low.fail(f"{len(items)} registers", f"{wanted}, as the opcode says")
    return items


def register_bytes(low: FunctionLowering, items: tuple[Operand, ...], least: int) -> int:
    """Bytes of the registers of a vector, which are all of a size: 2 (and less), 4, 8 or 16, but `least` for
    immediates."""
    sizes = {max(WIDTHS[i.kind], 2) for i in items if isinstance(i, Register) and i.kind != "special"}
    if len(sizes) > 1: raise low.fail("registers of different sizes", "registers of one size")
    size = max(sizes, default=max(least, 4))
    if size < least or 0 in (WIDTHS.get(i.kind, 4) for i in items if isinstance(i, Register)):
        raise low.fail(f"a register of {size} bytes for a type of {least}", f"at least {8 * least} bits")
    return size


def destinations(low: FunctionLowering, items: tuple[Operand, ...]) -> tuple[int, ...]:
    """Places of destinations, -1 for `_`."""
    return tuple(-1 if isinstance(item, Sink) else low.dest(item) for item in items)


def places(low: FunctionLowering, where: dict[str, int | bool]) -> tuple[int, ...]:
    """The address register of an op, when it has one."""
    return (int(where["a"]),) if int(where["a"]) >= 0 else ()


@lowers("ld", "ldu")
def load(low: FunctionLowering, instruction: Instruction) -> None:
    """`ld{.order}{.space}{.hints}{.vec}.type d, [a]{, policy};`."""
    kind, width = element(low)
    items = items_of(low, instruction.operands[0])
    where = low.address(instruction.operands[1])
    space = memory_space(low)
    out = destinations(low, items)
    flags = order_flags(low) | (SIGNED if kind.startswith("s") else 0) | (NONCOHERENT if low.has("nc") else 0)
    handler = "ld_param" if space == SPACES["param"] and where["a"] == -1 else "ld"
    low.emit(handler, list=out, space=space, width=width, vector=len(items), flags=flags, **where,
             more=register_bytes(low, items, width), reads=places(low, where),
             writes=tuple(place for place in out if place >= 0))


@lowers("st")
def store(low: FunctionLowering, instruction: Instruction) -> None:
    """`st{.order}{.space}{.hints}{.vec}.type [a], b{, policy};`."""
    kind, width = element(low)
    items = items_of(low, instruction.operands[1])
    size = register_bytes(low, items, width)
    # special registers and immediates get places of the size of the registers beside them
    values = tuple(low.source(item, kind if size < 8 or width >= 8 else "b64") for item in items)
    where = low.address(instruction.operands[0])
    low.emit("st", list=values, space=memory_space(low), width=width, vector=len(items), more=size,
             flags=order_flags(low), reads=(*places(low, where), *values), **where)


@lowers("prefetch", "prefetchu")
def prefetch(low: FunctionLowering, instruction: Instruction) -> None:
    """`prefetch.space.level [a];`: a hint, which may be wrong."""
    if not isinstance(instruction.operands[0], Address): raise low.fail("an address in brackets is expected")
    low.emit("nop")


@lowers("applypriority")
def apply_priority(low: FunctionLowering, instruction: Instruction) -> None:
    """`applypriority{.global}.L2::evict_normal [a], 128;`: a hint."""
    check_line(low, instruction)
    low.emit("nop")


@lowers("discard")
def discard(low: FunctionLowering, instruction: Instruction) -> None:
    """`discard{.global}.L2 [a], 128;`."""
    check_line(low, instruction)
    low.emit("discard", space=low.space(), **low.address(instruction.operands[0]))


def check_line(low: FunctionLowering, instruction: Instruction) -> None:
    """Raises `PTXError` for instructions that do not work on lines of 128 bytes."""
    size = instruction.operands[1]
    if not isinstance(size, Immediate) or size.value != 128: raise low.fail("a size that is not 128", "128")
