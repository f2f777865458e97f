"""cvt, mov, addresses and other instructions that only move data, to ops of convert.c and move.c.

Protocol: a conversion has destination and source type in `more`, by their places in `TYPES`, the rounding in
`vector`, and the bytes of the destination register in `width`: registers wider than a type hold it extended.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_operate import (
    ROUNDINGS,
    check_width,
    dest,
    flags_of,
    instruction_of,
    kind_of,
    only,
    operate,
    source,
)
from tinygrad_nv.ptx.emulator.lowering import (
    GRID_WORKSPACE,
    SPACES,
    SPECIALS,
    UNUSED,
    WIDTHS,
    FunctionLowering,
    lowers,
    special_number,
)
from tinygrad_nv.ptx.syntax import Immediate, Instruction, Operand, Register, Sink, Symbol, Vector

TYPES = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", "tf32", "e4m3",
         "e5m2")  # convert.c: enum Type
INTEGERS = TYPES[:8]
PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
SMALL = ("e4m3x2", "e5m2x2")
TO_INTEGER = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
SATFINITE, INTEGRAL = 64, 128  # convert.c
# without detours: (to, from) → handler, when nothing but .rn is asked for
DIRECT = {("f32", "bf16"): "cvt_f32_bf16", ("f32", "f16"): "cvt_f32_f16", ("bf16", "f32"): "cvt_bf16_f32",
          ("f16", "f32"): "cvt_f16_f32", ("f32", "s32"): "cvt_f32_s32", ("f32", "u32"): "cvt_f32_u32"}
# class of eviction priorities in the upper word of a cache policy (with the fraction's sixteenths above it)
POLICIES = {"L2::evict_unchanged": 0x100, "L2::evict_first": 0x120, "L2::evict_last": 0x140,
            "L2::evict_normal": 0x160}
MOVED = ("pred", "b16", "b32", "b64", "b128", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32",
         "f64", "f16x2", "bf16x2")
PACKED_TYPES = ("s16", "u16", "s8", "u8", "s4", "u4", "s2", "u2")
VECTORS = ((2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4))  # items, bytes of each


# **** cvt ****

@lowers("cvt")
def convert(low: FunctionLowering, instruction: Instruction) -> None:
    """`cvt{.rounding}{.ftz}{.sat}{.relu}{.satfinite}.to.from d, a{, b}`."""
    only(low, *ROUNDINGS, *TO_INTEGER, "ftz", "sat", "relu", "satfinite")
    to, kind = kind_of(low, *TYPES[:13], *PAIRS), kind_of(low, *TYPES[:12], "f16x2", *SMALL, at=1)
    flags = flags_of(low) | (SATFINITE if low.has("satfinite") else 0)
    if to in PAIRS: return convert_pair(low, to, kind, flags)
    if kind in PAIRS: raise low.fail(f".{kind} to .{to} does not exist")
    integral = low.one_of(*TO_INTEGER)
    mode = TO_INTEGER.get(integral, low.one_of(*ROUNDINGS, default="rz" if to in INTEGERS else "rn"))
    if (simple := direct(to, kind, instruction, flags, mode, integral)) is not None:
        operate(low, simple, (to, kind))
        return None
    how = ("cvt_integer" if to in INTEGERS and kind in INTEGERS else "cvt_to_integer" if to in INTEGERS
           else "cvt_from_integer" if kind in INTEGERS else "cvt_float")
    if integral and to not in INTEGERS: flags |= INTEGRAL
    d, a = instruction.operands
    low.emit(how, d=low.dest(d, to), a=low.source(a, kind), more=TYPES.index(to) | TYPES.index(kind) << 8,
             flags=flags, vector=ROUNDINGS.index(mode), wide=source_width(low, a, kind) == 8,
             width=WIDTHS[d.kind] if isinstance(d, Register) else WIDTHS[to])
    return None


def source_width(low: FunctionLowering, operand: Operand, kind: str) -> int:
    """Bytes of the place of a source, which may be wider than an integer type but not than a float's."""
    if kind not in INTEGERS: check_width(low, operand, kind)
    if isinstance(operand, Register) and operand.kind != "special": return low.width_of(operand)
    return WIDTHS[kind]


def direct(to: str, kind: str, instruction: Instruction, flags: int, mode: str, integral: str) -> str | None:
    """The handler of a conversion that needs nothing special, if there is one: all registers are as wide as
    their types."""
    d, a = instruction.operands
    if flags or integral or not isinstance(d, Register) or WIDTHS[d.kind] != WIDTHS[to]: return None
    if isinstance(a, Register) and a.kind != "special" and WIDTHS[a.kind] != WIDTHS[kind]: return None
    if (to, kind) in DIRECT: return DIRECT[to, kind] if mode == "rn" else None
    if to not in INTEGERS or kind not in INTEGERS: return None
    if (WIDTHS[to], WIDTHS[kind]) == (8, 4): return "widen_s32" if kind == "s32" else "widen_u32"
    if WIDTHS[to] == WIDTHS[kind] == 4: return "mov_b32"
    if WIDTHS[to] == WIDTHS[kind] == 8: return "mov_b64"
    if (WIDTHS[to], WIDTHS[kind]) == (2, 4): return "mov_b16"
    return None


def convert_pair(low: FunctionLowering, to: str, kind: str, flags: int) -> None:
    """Conversions to two values in a word: from two f32, or from two others."""
    mode = ROUNDINGS.index(low.one_of(*ROUNDINGS, default="rn"))
    fields = {"more": TYPES.index(PAIRS[to]) | TYPES.index(PAIRS.get(kind, kind)) << 8, "flags": flags,
              "vector": mode}
    if kind == "f32":
        fast = to in SMALL or (not flags and not mode)
        operate(low, f"cvt_{to}_f32" if fast else "cvt_pair", (to, kind, kind), **fields)
    elif to in SMALL and kind == "f16x2": operate(low, f"cvt_{to}_f16x2", (to, kind), **fields)
    elif to == "f16x2" and kind in SMALL: operate(low, "cvt_f16x2_f8x2", (to, kind), **fields)
    else: raise low.fail(f".{kind} to .{to} does not exist before sm_100")


@lowers("cvt.pack")
def convert_pack(low: FunctionLowering, instruction: Instruction) -> None:
    """`cvt.pack.sat.to.s32 d, a, b` for 16 bits, `cvt.pack.sat.to.s32.b32 d, a, b, c` for fewer."""
    words = [word for word in instruction.modifiers if word not in ("pack", "sat")]
    if words[0] not in PACKED_TYPES or words[1:] not in (["s32"], ["s32", "b32"]):
        raise low.fail("unknown types", "cvt.pack.sat.{s16,u16,s8,u8,s4,u4,s2,u2}.s32{.b32}")
    if (len(words) == 3) == words[0].endswith("16"): raise low.fail("a third source is for 8 bits or fewer")
    operate(low, "cvt_pack", ("b32", "s32", "s32", "b32")[:len(words) + 1], width=int(words[0][1:]),
            flags=int(words[0][0] == "s"))


# **** mov ****

@lowers("mov")
def move(low: FunctionLowering, instruction: Instruction) -> None:
    """`mov.type d, a`: registers, constants, special registers, addresses, vectors packed and unpacked."""
    only(low)
    kind = kind_of(low, *MOVED)
    to, a = instruction.operands
    if isinstance(to, Vector): return unpack(low, to, a, kind)
    d = dest(low, to, kind)
    if isinstance(a, Vector): return pack(low, d, a, kind)
    if isinstance(a, Symbol): return low.symbol_address(a, d, WIDTHS[kind] == 8)
    if isinstance(a, Register) and a.kind == "special" and a.name[1:] not in {*GRID_WORKSPACE, *UNUSED}:
        return move_special(low, d, a.name[1:], kind)
    name = {0: "mov_pred", 8: "mov_b64", 16: "mov_b128"}.get(WIDTHS[kind], "mov_b32")
    low.emit(name, d=d, a=source(low, a, kind))
    return None


def move_special(low: FunctionLowering, d: int, name: str, kind: str) -> None:
    """A special register, cut or widened to the type."""
    wide = WIDTHS[kind] == 8
    if kind == "pred":
        low.emit("special", d=(number := low.scratch("b32")), more=special_number(name, low))
        low.emit("setp_u32", d=d, a=number, b=low.constant(0, 4), more=1)
    elif name not in SPECIALS: low.emit("special", d=d, more=special_number(name, low), flags=int(wide))
    else:
        handler = "widen_u32" if wide else "mov_b16" if WIDTHS[kind] == 2 else "mov_b32"
        low.emit(handler, d=d, a=low.special(name))


def pack(low: FunctionLowering, d: int, items: Vector, kind: str) -> None:
    """`mov.b64 d, {a, b}`: the first item is the lowest."""
    count, size = len(items.items), WIDTHS[kind] // max(len(items.items), 1)
    if (count, size) not in VECTORS: raise low.fail(f"{count} items in a .{kind}")
    part = f"b{8 * size}"
    places = {name: source(low, item, part) for name, item in zip("abce", items.items, strict=False)}
    low.emit(f"pack_{count}x{8 * size}", d=d, **places)


def unpack(low: FunctionLowering, items: Vector, operand: Operand, kind: str) -> None:
    """`mov.b64 {d, e}, a`."""
    count, total = len(items.items), WIDTHS[kind]
    size = total // max(count, 1)
    if (count, size) not in VECTORS: raise low.fail(f"{count} items in a .{kind}")
    a, part = source(low, operand, kind), f"b{8 * size}"
    named = [(i, dest(low, item, part)) for i, item in enumerate(items.items) if not isinstance(item, Sink)]
    if len(named) == count == 2 and size in (2, 4):
        d, e = named[0][1], named[1][1]
        low.emit(f"unpack_2x{8 * size}", d=d, e=e, a=a, reads=(a,), writes=(d, e))
        return
    handler = {8: "extract_b64", 16: "extract_b128"}.get(total, "extract_b32")
    for i, place in named: low.emit(handler, d=place, a=a, imm=8 * size * i, width=size)


# **** addresses and the rest ****

@lowers("cvta")
def generic_address(low: FunctionLowering, instruction: Instruction) -> None:
    """`cvta{.to}.space.u64 d, a`."""
    only(low, "to", *SPACES)
    kind_of(low, "u64", "s64", "b64")
    operate(low, "cvta", ("u64", "u64"), space=low.space(), flags=int(low.has("to")))


@lowers("isspacep")
def is_in_space(low: FunctionLowering, instruction: Instruction) -> None:
    """`isspacep.space p, a`: whether a generic address is in the space."""
    only(low, *SPACES, "param::entry", "param::func")
    space = low.space() or SPACES["param"]
    operate(low, "isspacep", ("pred", "u64"), space=space)


@lowers("createpolicy")
def create_policy(low: FunctionLowering, instruction: Instruction) -> None:
    """`createpolicy.fractional`, `.range` and `.cvt.L2`: a cache policy as a 64-bit number. Caches are not
    emulated, so that a range is taken for all of it."""
    if low.has("cvt"):
        operate(low, "mov_b64", ("b64", "b64"))  # the property is the policy
        return
    primary = low.one_of(*POLICIES)
    secondary = next((word for word in instruction.modifiers[::-1] if word in POLICIES), primary)
    if not primary: raise low.fail("the priority is missing", ", ".join(f".{name}" for name in POLICIES))
    to, *rest = instruction.operands
    value: Operand = rest[0] if low.has("fractional") and rest else Immediate(1.0)
    if isinstance(value, Immediate) and not 0 < value.value <= 1: raise low.fail("a fraction not in (0, 1]")
    both = primary == "L2::evict_last" and secondary == "L2::evict_first"
    low.emit("createpolicy", d=dest(low, to, "b64"), a=source(low, value, "f32"),
             imm=0x150 if both else POLICIES[primary])


@lowers("nanosleep")
def sleep(low: FunctionLowering, instruction: Instruction) -> None:
    """`nanosleep.u32 t`: other warps go first."""
    source(low, instruction_of(low).operands[0], "u32")
    low.emit("nanosleep")
