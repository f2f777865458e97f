"""PTX instructions to the emulator's `Op`s: the registry of lowerings, and the state they share.

Protocol: a lowering is a function `(low, instruction) -> None`, registered for the fixed leading words of an
opcode with `@lowers("mbarrier.init")`; the longest registered prefix wins. It asks `low` for the places of
operands in the register file (`low.source`, `low.dest`, `low.sources`), and emits ops (`low.emit`), whose
handler is the C function `op_<name>` of csrc/. Which constants an operand may be, the table of instructions
says (`isa.check`, after the lowering); what is in a register is looked at in C. Registers are u32[32] (32
bits and less, zero-extended), u64[32], two u64[32] for 128 bits, or one u32 mask for a predicate; immediates
get places of their own, filled when a warp starts.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    PTXFunction,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)

SHARED_BASE = 0x400  # shared address of a CTA's first variable: below lies what the system keeps
SPACES = {"generic": 0, "global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "local": 4,
          "const": 5, "param": 6}
WIDTHS = {"pred": 0, "b128": 16, "f16x2": 4, "bf16x2": 4, "tf32": 4, "bf16": 2, "e4m3x2": 2, "e5m2x2": 2,
          "s16x2": 4, "u16x2": 4, "e4m3": 1, "e5m2": 1,
          **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
          **{f"f{bits}": bits // 8 for bits in (16, 32, 64)}}
SPECIALS = ("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "laneid", "warpid", "clusterid.x",
            "clusterid.y", "clusterid.z", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z",
            "cluster_ctarank", "smid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt",
            "lanemask_ge", "shared_origin")
# where a grid's barrier is, which cooperative groups take from the driver: a variable that no module
# declares, its address in two registers
WORKSPACE, WORKSPACE_BYTES = "grid workspace", 8
GRID_WORKSPACE = {"envreg1": 32, "envreg2": 0}
Lower = Callable[["FunctionLowering", Instruction], None]
REGISTRY: dict[str, Lower] = {}


def lowers(*keys: str) -> Callable[[Lower], Lower]:
    """Registers a lowering for opcodes that begin with one of `keys`."""
    def register(function: Lower) -> Lower:
        for key in keys:
            assert key not in REGISTRY, f"two lowerings for {key}"
            REGISTRY[key] = function
        return function
    return register


def lowering_of(instruction: Instruction) -> Lower | None:
    """The lowering whose key is the longest prefix of the opcode, or whose words it has in another order."""
    words = (instruction.mnemonic, *instruction.modifiers)
    for length in range(len(words), 0, -1):
        if (found := REGISTRY.get(".".join(words[:length]))) is not None: return found
    fit = [key for key in REGISTRY if key.split(".")[0] == words[0] and set(key.split(".")) <= set(words)]
    return REGISTRY[max(fit, key=lambda key: key.count("."))] if fit else None


@dataclass(slots=True)
class OpRecord:
    """An `Op` of core.h before it is packed; fields as there."""
    handler: str
    d: int = -1
    a: int = -1
    b: int = -1
    c: int = -1
    e: int = -1
    imm: int = 0
    list: tuple[int, ...] = ()       # places, or numbers below 1 << 24
    target: str | int = -1   # a label, or a position
    flags: int = 0
    aligned: bool = False
    space: int = 0
    wide: bool = False
    width: int = 0
    vector: int = 1
    more: int = 0
    guard: int = -1
    guard_negated: bool = False
    line: int = 0
    source: int = 0          # number of the PTX instruction
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    join: int = -1
    labels: tuple[str, ...] = ()     # brx.idx: becomes `list`
    counts: bool = False             # the last op of its instruction


@dataclass
class FunctionLowering:
    """State that lowerings of one function share. Offsets are bytes in a warp's register file."""
    function: PTXFunction
    target: str                      # "sm_90a"
    addresses: dict[str, int]        # module variables in global and constant space → address
    shared: dict[str, int]           # shared variables → offset from the start of shared memory
    local: dict[str, int]            # local variables → offset in a thread's local memory
    variables: dict[str, Variable]   # all of them by name
    constants: bytearray = field(default_factory=bytearray)
    known: dict[tuple[int, bytes], int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)
    register_bytes: int = 0          # relative to the end of the constants until all are known
    ops: list[OpRecord] = field(default_factory=list)
    current: Instruction | None = None
    source_number: int = 0

    # **** places ****

    def constant(self, value: int | float, width: int) -> int:
        """The place of a constant in all lanes; `width` 4 or 8 bytes (an int, or bits already), 0: a
        predicate."""
        bits = int(value) & ((1 << 8 * max(width, 4)) - 1)
        if width == 0: bits = 0xffffffff if value else 0
        data = bits.to_bytes(max(width, 4), "little") * (1 if width == 0 else 32)
        key = (width, data[:8])
        if key not in self.known:
            self.known[key] = len(self.constants)
            self.constants += data.ljust(-(-len(data) // 64) * 64, b"\0")
        return self.known[key]

    def register(self, name: str, kind: str) -> int:
        """The place of a virtual register, made at first use. Marked as relative to the constants' end by
        being above 1 << 24 until `program.py` has seen all constants."""
        if name not in self.registers:
            size = {8: 256, 16: 512}.get(WIDTHS[kind], 128)
            self.registers[name] = (1 << 24) + self.register_bytes
            self.register_bytes += size
        return self.registers[name]

    def scratch(self, kind: str = "b32") -> int:
        """A place of one's own, for results between ops and for sinks."""
        return self.register(f"scratch {len(self.registers)}", kind)

    def special(self, name: str) -> int:
        """The place of a special register such as tid.x that stays what it is."""
        return self.register("%" + name, "b32")

    # **** operands ****

    def width_of(self, operand: Operand) -> int:
        """Bytes of the place of a register: 4, 8 or 16, or 0 for a predicate; 4 for anything else."""
        if not isinstance(operand, Register) or operand.kind == "special": return 4
        width = WIDTHS[operand.kind]
        return width if width in (0, 8, 16) else 4

    def source(self, operand: Operand, kind: str) -> int:
        """The place of a source of type `kind` ("s32", "f64", "pred", …): a register, or a constant made for
        an immediate (floats become bits of `kind`)."""
        if isinstance(operand, Register):
            if operand.kind == "special": return self.special_source(operand, kind)
            if operand.negated: return self.negate(operand)
            return self.register(operand.name, operand.kind)
        if isinstance(operand, Immediate):
            return self.constant(immediate_bits(operand, kind), {0: 0, 8: 8}.get(WIDTHS[kind], 4))
        if isinstance(operand, Symbol): return self.symbol_source(operand, kind)
        raise self.fail(f"a register or a constant of type .{kind} is expected")

    def negate(self, operand: Register) -> int:
        """Returns !%p as a place."""
        out = self.scratch("pred")
        self.emit("not_pred", d=out, a=self.register(operand.name, "pred"))
        return out

    def special_source(self, operand: Register, kind: str) -> int:
        """A special register read as a source. 64-bit readers get it widened."""
        name = operand.name.removeprefix("%")
        if name in SPECIALS: place = self.special(name)
        elif name in UNUSED: return self.constant(0, WIDTHS[kind])
        elif name in GRID_WORKSPACE:
            return self.constant(self.addresses[WORKSPACE] >> GRID_WORKSPACE[name] & 0xffffffff, WIDTHS[kind])
        else:
            place = self.scratch("b64" if WIDTHS[kind] == 8 else "b32")
            self.emit("special", d=place, more=special_number(name, self), flags=int(WIDTHS[kind] == 8))
            return place
        if WIDTHS[kind] != 8: return place
        wide = self.scratch("b64")
        self.emit("widen_u32", d=wide, a=place)
        return wide

    def symbol_source(self, operand: Symbol, kind: str) -> int:
        """The address of a variable as a source: in its state space, not generic."""
        place = self.scratch("b64" if WIDTHS[kind] == 8 else "b32")
        self.symbol_address(operand, place, WIDTHS[kind] == 8)
        return place

    def symbol_address(self, operand: Symbol, place: int, wide: bool) -> None:
        """Emits the address of a variable into `place`."""
        space, value = self.symbol(operand)
        self.emit("symbol_wide" if wide else "symbol", d=place, imm=value, space=space)

    def symbol(self, operand: Symbol) -> tuple[int, int]:
        """State space and address of a variable (shared: without the CTA's rank)."""
        name = operand.name
        if name in self.shared: return SPACES["shared"], self.shared[name] + operand.offset
        if name in self.local: return SPACES["local"], self.local[name] + operand.offset
        if name in self.function.parameters:
            return SPACES["param"], self.function.parameters[name].offset + operand.offset
        if name in self.addresses: return SPACES["global"], self.addresses[name] + operand.offset
        raise self.fail(f"{name} is not declared")

    def dest(self, operand: Operand, kind: str = "b32") -> int:
        """The place of a destination; a scratch place of type `kind` for a sink."""
        if isinstance(operand, Register) and operand.kind != "special":
            return self.register(operand.name, operand.kind)
        if isinstance(operand, Sink): return self.scratch(kind)
        raise self.fail("a register is expected as destination")

    def sources(self, operand: Operand, kind: str) -> tuple[int, ...]:
        """The places of a vector's items, or of one operand."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return tuple(self.source(item, kind) for item in items)

    def dests(self, operand: Operand, kind: str = "b32") -> tuple[int, ...]:
        """The places of a vector of destinations, or of one."""
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return tuple(self.dest(item, kind) for item in items)

    def address(self, operand: Operand) -> dict[str, int | bool]:
        """Fields `a`, `imm`, `wide` of an op that addresses memory. A symbol's space decides nothing here:
        shared symbols carry the CTA's rank only through a register, so they are moved into one first."""
        if not isinstance(operand, Address): raise self.fail("an address in brackets is expected")
        base = operand.base
        if isinstance(base, Register):
            if base.kind == "special": raise self.fail(f"{base.name} as an address")
            return {"a": self.register(base.name, base.kind), "imm": operand.offset,
                    "wide": WIDTHS[base.kind] == 8}
        if isinstance(base, Immediate):
            return {"a": -1, "imm": int(base.value) + operand.offset, "wide": True}
        space, value = self.symbol(base)
        if space != SPACES["shared"]: return {"a": -1, "imm": value + operand.offset, "wide": True}
        # the rank's bits alone: one place serves all symbols
        return {"a": self.special("shared_origin"), "imm": value + operand.offset, "wide": False}

    # **** ops ****

    def emit(self, handler: str, **fields: object) -> OpRecord:
        """Appends an op for the current instruction, with its guard. Registers read and written are taken
        from `a b c e` and `d`, and may be given as `reads=` / `writes=` (needed for lists)."""
        assert self.current is not None
        record = OpRecord(handler, **fields)  # type: ignore[arg-type]
        if self.current.guard is not None:
            record.guard = self.register(self.current.guard.name, "pred")
            record.guard_negated = self.current.negated
        record.line, record.source = self.current.line, self.source_number
        self.ops.append(record)
        return record

    def fail(self, found: str, expected: str = "", fix: str = "") -> PTXError:
        """An error at the current instruction."""
        assert self.current is not None
        return PTXError(f"PTX line {self.current.line}: {self.current.opcode}: {found}", self.current.line,
                        expected, fix)

    def has(self, modifier: str) -> bool:
        """Whether the current instruction has a modifier."""
        assert self.current is not None
        return modifier in self.current.modifiers

    def types(self) -> list[str]:
        """The types among the current instruction's modifiers, in order."""
        assert self.current is not None
        return [m for m in self.current.modifiers if m in WIDTHS]

    def one_of(self, *modifiers: str, default: str = "") -> str:
        """Returns the one of `modifiers` that the current instruction has."""
        assert self.current is not None
        return next((m for m in self.current.modifiers if m in modifiers), default)

    def space(self) -> int:
        """The state space of the current instruction (generic when it names none). PTX writes shared as
        .shared, .shared::cta or .shared::cluster."""
        assert self.current is not None
        return next((SPACES[m] for m in self.current.modifiers if m in SPACES), 0)


def immediate_bits(operand: Immediate, kind: str) -> int:
    """An immediate as bits of a type: floats are rounded to it, integers cut to it."""
    width = WIDTHS[kind]
    form = {"f64": "<d", "f32": "<f", "tf32": "<f", "f16": "<e"}.get(kind)
    if form is not None and isinstance(operand.value, float):
        return int.from_bytes(struct.pack(form, operand.value), "little")
    if isinstance(operand.value, float):  # 0f… where bits are meant: mov.b32, and.b32
        form = "<f" if operand.float_bits == 32 or width == 4 else "<d"
        return int.from_bytes(struct.pack(form, operand.value), "little")
    if width == 0: return int(bool(operand.value))
    return int(operand.value) & ((1 << 8 * width) - 1)


READ_AT_RUN = ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi", "ntid.x",
               "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z", "nclusterid.x", "nclusterid.y",
               "nclusterid.z", "cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z", "cluster_nctarank",
               "nwarpid", "nsmid", "gridid", "is_explicit_cluster", "total_smem_size", "dynamic_smem_size",
               "aggr_smem_size", "reserved_smem_offset_begin", "reserved_smem_offset_end",
               "reserved_smem_offset_cap", "lanemask_unused")
# the fourth element of each vector reads as zero
UNUSED = frozenset(f"{name[:-1]}w" for name in (*SPECIALS, *READ_AT_RUN) if name.endswith(".x"))


def special_number(name: str, low: FunctionLowering) -> int:
    """The number op_special knows a special register by."""
    if name not in READ_AT_RUN:
        raise low.fail(f"%{name} is not declared, and no special register that is emulated")
    return READ_AT_RUN.index(name)
