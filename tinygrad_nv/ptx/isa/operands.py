"""Operands of an instruction form: which ones are allowed, whether a given operand is, and a sample.

A slot is written, in the tables, as

  T U V W    register or constant of the form's 1st, 2nd, … type; wT is T at twice the width; b32, u64, …
  =T         destination;  =T_ may be `_`;  =T/pred may be, =T|pred must be, a pair `d|p` with a predicate
  >T         registers may be wider than the type, as ld, st and cvt allow
  4:T n:T    a vector; n is the .vN of the opcode; acc is a wgmma accumulator of N columns
  pred on    a predicate, perhaps negated, or a constant, of on 0 or 1
  [a] [g] [s] [map]   address in the space the opcode names, global, shared, and a place in a tensor map
  #0..7 #4|8 #24..256/8   constant: a range, a list, a range with a step;  u32#0..15 that or a register:
             id, threads, bytes;  sign is #-1|1
  reg bits   a register of 32 bits, no constant; 32 bits; neither is a float
  count parity  of arrivals at an mbarrier, of its phase
  hint mask  present exactly when .L2::cache_hint, .multicast::cluster is;  offsets of im2col
  any label table _ A   source of mov, place in the code, .branchtargets, sink, wgmma's A
  x? x@90    may be left out; needs, as the tables write them

Types: a register fits when it has the width and is bits, or of the same family (integers of either sign).
"""
from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tinygrad_nv.ptx.parser import WIDTHS
from tinygrad_nv.ptx.syntax import Address, Immediate, Operand, Pair, Register, Sink, Symbol, Vector

SLOT = re.compile(r"(?P<dest>=?)(?:(?P<count>\d+|n|acc):)?(?P<wide>>?)(?P<name>\[?\w*\]?)"
                  r"(?P<values>#[-\d./|]+)?(?P<pair>[/|]pred)?(?P<optional>\??)(?:@(?P<need>[\da:.]+))?")
PACKED = {"f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "tf32": 32, "bf16": 16, "e4m3x2": 16,
          "e5m2x2": 16}
ALIASES = {"id": "u32#0..15", "threads": "u32#32..1024/32", "bytes": "u32#16..1048560/16", "sign": "#-1|1",
           "DESC": "b64", "hint": "b64", "mask": "b16", "reg": "b32", "bits": "b32", "=bits": "=b32",
           "=bits/pred": "=b32/pred",
           "count": "b32#1..1048575", "parity": "b32#0..1"}
NO_FLOATS = ("mask", "count", "parity", "reg", "bits", "=bits", "=bits/pred")
PRESENT = {"hint": "L2::cache_hint", "mask": "multicast::cluster"}
SPACES32 = ("shared", "shared::cta", "shared::cluster", "local", "param", "const")


Need = tuple[tuple[tuple[int, str], tuple[int, int]], ...]  # ((90, "a"), (8, 0)): from sm_90a, .version 8.0


def rank(arch: str) -> tuple[int, str]:
    """sm_90a → (90, "a"), in the order of capability."""
    found = re.fullmatch(r"(?:sm_)?(\d+)(a?)", arch)
    assert found is not None, arch
    return int(found.group(1)), found.group(2)


@functools.cache
def need(text: str) -> Need:
    """`89:8.1 90`: targets and the lowest .version of each."""
    out = []
    for each in text.split():
        arch, _, version = each.partition(":")
        major, minor = map(int, (version or "0.0").split("."))
        out.append((rank(arch), (major, minor)))
    return tuple(out)


@dataclass(frozen=True)
class OperandSlot:
    """A place for an operand. `values` are the constants allowed, None for any; `when` is the modifier it
    comes with."""
    name: str
    text: str
    dest: bool = False
    wide: bool = False
    count: str = ""
    pair: str = ""
    sink: bool = False
    optional: bool = False
    values: tuple[tuple[int, int, int], ...] | None = None
    when: str = ""
    need: Need = ()


@dataclass(frozen=True)
class Use:
    """The opcode a slot stands in: its types, the N of .vN, a shape or a dimension, and its modifiers."""
    types: tuple[str, ...]
    count: int
    modifiers: tuple[str, ...]


@functools.cache
def slot(text: str) -> OperandSlot:
    """A slot from its text."""
    stem = re.split(r"[?@]", text)[0]
    found = SLOT.fullmatch(ALIASES.get(stem, stem) + text[len(stem):])
    assert found is not None, text
    name, sink = found["name"], found["name"].endswith("_") and found["name"] != "_"
    words = (found["values"] or "")[1:]
    values = tuple(_range(each) for each in words.split("|")) if words else None
    return OperandSlot(name.rstrip("_") or ("_" if name else "#"), text, bool(found["dest"]),
                       bool(found["wide"]),
                found["count"] or "", (found["pair"] or "")[:1], sink, bool(found["optional"]), values,
                PRESENT.get(stem, ""), need(found["need"] or ""))


def _range(text: str) -> tuple[int, int, int]:
    bounds, _, step = text.partition("/")
    low, _, high = bounds.partition("..")
    return int(low), int(high or low), int(step or 1)


# **** types ****

def type_of(slot: OperandSlot, use: Use) -> str:
    """The PTX type that a value slot has in an opcode."""
    if slot.name in ("T", "U", "V", "W"): return use.types["TUVW".index(slot.name)]
    if slot.name == "wT": return f"{use.types[0][0]}{2 * int(use.types[0][1:])}"
    return slot.name


def count_of(slot: OperandSlot, use: Use) -> int:
    """Registers of a vector slot; 0 for a scalar."""
    if slot.count == "n": return use.count if use.count > 1 else 0
    if slot.count == "acc": return use.count // (4 if type_of(slot, use) == "f16" else 2)
    return int(slot.count or 0)


def width(kind: str) -> int:
    """Bits of a register of a type; predicates have 1."""
    return PACKED.get(kind) or WIDTHS[kind]


def family(kind: str) -> str:
    """"b", "i" of integers, "f", "f16" or "pred"."""
    if kind == "pred": return "pred"
    if kind in ("f16", "f16x2"): return "f16"
    if kind in PACKED: return "i" if "16x2" in kind and kind[0] in "us" else "packed"
    return {"b": "b", "u": "i", "s": "i", "f": "f"}[kind[0]]


def fits(declared: str, wanted: str, wide: bool = False) -> bool:
    """Whether ptxas takes a register declared so where an operand of the type is wanted."""
    if "pred" in (declared, wanted): return declared == wanted
    have, want = width(declared), width(wanted)
    if have != want and not (wide and have > want and family(declared) != "f"): return False
    if family(declared) == "b" or family(wanted) == "b": return family(wanted) != "packed" or have == want
    if declared == "f16x2" and family(wanted) == "i": return True
    return family(declared) == family(wanted)


def takes_no_float(slot: OperandSlot) -> bool:
    """Tells whether no float's register will do: for a mask, a count, a state or a descriptor."""
    return slot.name == "b64" or re.split(r"[?@]", slot.text)[0] in NO_FLOATS


DESCRIPTOR = OperandSlot("b64", "DESC")


# **** checks: each gives what is wrong, or "" ****

def problem(slot: OperandSlot, operand: Operand, use: Use) -> str:
    """Returns what is wrong with an operand in a slot, \"\" if nothing."""
    if slot.name.startswith("["): return _address(slot, operand, use)
    if slot.name in ("label", "table"): return "" if isinstance(operand, Symbol) else "a label is expected"
    if slot.name == "_": return "" if isinstance(operand, Sink) else "the sink _ is expected"
    if slot.name == "any": return _check_mov(slot, operand, use)
    if slot.name == "offsets" and not isinstance(operand, Vector): return "im2col offsets {…} are expected"
    if slot.name == "offsets": return _vector(operand, "u16", use.count - 2, use)
    if slot.name == "A" and isinstance(operand, Vector): return _vector(operand, "b32", 4, use)
    if slot.name == "A": return _value(DESCRIPTOR, operand, "b64")
    if slot.name == "on" and isinstance(operand, Immediate) and operand.value not in (0, 1):
        return "not 0 or 1"
    if slot.name == "on": return _value(slot, operand, "pred")
    if slot.pair and isinstance(operand, Pair): return _pair(slot, operand, use)
    if slot.pair == "|": return "a pair d|p is expected"
    if slot.text == "reg" and not isinstance(operand, Register): return "a register of .b32 is expected"
    if slot.name == "#": return _constant(slot, operand)
    if count := count_of(slot, use): return _vector(operand, type_of(slot, use), count, use, slot)
    if isinstance(operand, Vector) and len(operand.items) == 1 and slot.count: operand = operand.items[0]
    return _value(slot, operand, type_of(slot, use))


def _pair(slot: OperandSlot, operand: Pair, use: Use) -> str:
    second = operand.second
    if isinstance(second, Register) and second.kind != "pred": return "p of d|p must be a predicate"
    if isinstance(operand.first, Sink) and slot.name == "pred": return ""  # setp's two are alike
    return _value(slot, operand.first, type_of(slot, use))


def _value(slot: OperandSlot, operand: Operand, kind: str) -> str:
    if isinstance(operand, Sink): return "" if slot.sink else "the sink _ is not allowed here"
    if isinstance(operand, Register):
        if operand.negated and (kind != "pred" or slot.dest): return f"{operand.name} must not be negated"
        if operand.kind == "special" and (slot.dest or not slot.wide or not fits("u32", kind)):
            return f"{operand.name} must be moved to a register first"
        given = "u32" if operand.kind == "special" else operand.kind
        if fits(given, kind, slot.wide) and not (takes_no_float(slot) and family(given) not in ("b", "i")):
            return ""
        return f"{operand.name} is .{operand.kind}, .{kind} is expected"
    if slot.dest: return "a destination must be a register"
    if isinstance(operand, Immediate): return _immediate(slot, operand, kind)
    if isinstance(operand, Symbol): return f"{operand.name} is an address, .{kind} is expected: move it first"
    return f"a register or constant of .{kind} is expected"


def _immediate(slot: OperandSlot, operand: Immediate, kind: str) -> str:
    """Constants: floats for floats, integers for integers (ptxas cuts them to the width), none for halves."""
    value, group = operand.value, family(kind)
    if group == "pred" and isinstance(value, int): return ""
    if group in ("f16", "pred") or kind in PACKED:
        return f"a constant cannot be .{kind}: move its bits to a register"
    if group == "f" and isinstance(value, int): return f"{value} is an integer, .{kind} needs {value}.0"
    if group == "f": return ""
    if isinstance(value, float):
        bits = group == "b" and (operand.float_bits or 64) == width(kind) and not takes_no_float(slot)
        return "" if bits else f"{value} is no integer, .{kind} is expected"
    return _constant(slot, operand) if slot.values is not None else ""


def cut(slot: OperandSlot, operand: Operand, use: Use) -> str:
    """Returns which integer a type cannot hold, so that ptxas takes other bits; \"\" if it can."""
    if slot.count or not isinstance(operand, Immediate) or isinstance(operand.value, float): return ""
    kind = type_of(slot, use)
    if kind not in WIDTHS or family(kind) not in ("b", "i"): return ""
    fitting = -(1 << width(kind) - 1) <= operand.value < 1 << width(kind)
    return "" if fitting else f"{operand.value} does not fit in .{kind}"


def _constant(slot: OperandSlot, operand: Operand) -> str:
    if not isinstance(operand, Immediate) or isinstance(operand.value, float):
        return "a constant integer is expected"
    assert slot.values is not None
    value = operand.value
    if any(low <= value <= high and (value - low) % step == 0 for low, high, step in slot.values): return ""
    return f"{value} is not one of {describe_constants(slot)}"


def describe_constants(slot: OperandSlot) -> str:
    """Returns the constants of a slot, in words."""
    assert slot.values is not None
    def words(low: int, high: int, step: int) -> str:
        return f"{low}" if low == high else f"{low}..{high}" + (f" in steps of {step}" if step > 1 else "")
    return ", ".join(words(*bounds) for bounds in slot.values)


def _vector(operand: Operand, kind: str, count: int, use: Use, slot: OperandSlot | None = None) -> str:
    """`count` operands in braces; one may also stand alone, except in a fragment."""
    slot = slot or OperandSlot(kind, kind)
    if count == 1 and slot.count != "1" and not isinstance(operand, Vector):
        return _value(slot, operand, kind)
    if not isinstance(operand, Vector): return f"a vector of {count} .{kind} is expected"
    if len(operand.items) != count: return f"{len(operand.items)} elements, {count} are expected"
    loaded = slot.dest and slot.count == "n"
    return next((wrong for item in operand.items if not (loaded and isinstance(item, Sink))
                 and (wrong := _value(slot, item, _fragment(kind, slot)))), "")


def _fragment(kind: str, slot: OperandSlot) -> str:
    """Halves of a wgmma accumulator come in pairs."""
    return "b32" if slot.count == "acc" and kind == "f16" else kind


def _check_mov(slot: OperandSlot, operand: Operand, use: Use) -> str:
    """mov, cvta and mapa take registers, special ones too, symbols and constants; mov packs and unpacks."""
    kind = use.types[-1]
    special = isinstance(operand, Register) and operand.kind == "special"
    if slot.dest and (special or isinstance(operand, Immediate | Symbol)):
        return "a destination must be a register"
    if isinstance(operand, Vector) and len(use.modifiers) > 1: return "braces are for mov alone"
    if isinstance(operand, Symbol): return ""
    if isinstance(operand, Vector):
        bits = sum(width(item.kind) for item in operand.items if isinstance(item, Register))
        whole = all(isinstance(item, Register) for item in operand.items)
        return f"{bits} bits in braces, .{kind} is expected" if whole and bits != width(kind) else ""
    if special and len(use.modifiers) == 1: return ""
    return _value(OperandSlot("T", kind), operand, kind)


def _address(slot: OperandSlot, operand: Operand, use: Use) -> str:
    if not isinstance(operand, Address): return "an address in brackets is expected"
    if slot.name == "[map]":
        if operand.coordinates is None: return "a tensor map and coordinates [map, {…}] are expected"
        if len(operand.coordinates.items) != use.count:
            return f"{len(operand.coordinates.items)} coordinates, {use.count} are expected"
        wrong = _vector(operand.coordinates, "s32", use.count, use)
        if wrong: return wrong
    elif operand.coordinates is not None: return "coordinates belong to tensor maps only"
    base = operand.base
    if isinstance(base, Immediate) and "local" not in use.modifiers:
        return "an address must be in a register, or a variable's"
    if not isinstance(base, Register): return ""
    short = slot.name != "[g]" and any(m in SPACES32 for m in use.modifiers)
    if base.kind == "special" or family(base.kind) not in ("b", "i"): return f"{base.name} is no address"
    if width(base.kind) == 64 or (short and width(base.kind) == 32): return ""
    return f"{base.name} is .{base.kind}, an address of {'32 or ' if short else ''}64 bits is expected"


# **** samples ****

def sample(slot: OperandSlot, use: Use, position: int) -> str:
    """An operand that fits, in the registers of `REGISTERS`."""
    if slot.name == "[map]": return f"[%b64_1, {_list_registers('s32', use.count)}]"
    if slot.name.startswith("["): return "[%b64_1]"
    if slot.name in ("label", "table"): return slot.name.upper()
    if slot.name == "_": return "_"
    if slot.name == "any": return f"%{_register(use.types[-1])}_{position}"
    if slot.name == "offsets": return _list_registers("u16", use.count - 2)
    if slot.name == "A": return "%b64_2"
    if slot.name == "on": return "%pred_1"
    if slot.values is not None: return str(slot.values[0][0])
    kind = type_of(slot, use)
    if count := count_of(slot, use):
        return _list_registers(_fragment(kind, slot), count, 16 if slot.dest else 0)
    return f"%{_register(kind)}_{position}" + ("|%pred_2" if slot.pair == "|" else "")


REGISTERS = "".join(f".reg .{kind} %{kind}_<160>;\n" for kind in
                    ("pred", "b8", "b16", "b32", "b64", "b128", "f16", "f32", "f64", "s16", "s32", "s64",
                     "u8", "s8", "u16", "u32", "u64"))


def _register(kind: str) -> str:
    """The declared type used in samples for a type: bits where there is no register type."""
    return f"b{width(kind)}" if kind in PACKED else kind


def _list_registers(kind: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%{_register(kind)}_{first + i}" for i in range(count)) + "}"
