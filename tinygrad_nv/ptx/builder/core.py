"""A kernel's declarations and its checked instructions, the base of control flow and all else.

Protocol: every instruction goes through `Core.emit`. Each is checked against `isa/` as it is written, and
what is wrong is a `PTXError` with the file and line of the innermost caller outside these modules.
Instructions keep their operands as Python objects until the text is made, since the names of shared memory
depend on how much there is of it.
"""
from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx import isa, syntax
from tinygrad_nv.ptx.builder.values import (
    Barriers,
    Label,
    MemoryOperand,
    Number,
    PairOperand,
    Shared,
    SinkOperand,
    Value,
)

PREFIXES = {"pred": "p", "b16": "h", "u16": "hu", "s16": "hs", "f16": "hf", "b32": "r", "u32": "u",
            "s32": "s", "f32": "f", "b64": "rd", "u64": "ud", "s64": "sd", "f64": "fd", "b128": "q"}
STATIC_SMEM_BYTES = 48 << 10
SMEM_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10,
              "sm_90": 227 << 10, "sm_90a": 227 << 10}
OWN_FILES = tuple(os.path.join(os.path.dirname(__file__), f"{part}.py")
                  for part in ("__init__", "core", "flow", "hopper", "values"))


@dataclass(eq=False)
class CodeBlock:
    """Lines of text and, for instructions, their operands: names of shared memory are known only at the
    end."""
    lines: list[tuple[str, tuple[Any, ...]] | str | CodeBlock] = field(default_factory=list)


@dataclass(frozen=True)
class Dimensions:
    """%tid and its like: `x`, `y`, `z` are u32 values, read once, at the kernel's beginning."""
    kernel: Core
    name: str

    def __getattr__(self, axis: str) -> Value:
        if axis not in ("x", "y", "z"): raise AttributeError(axis)
        return self.kernel.special(f"{self.name}.{axis}")


class Core:
    """A kernel under construction: parameters, registers, shared memory, instructions."""

    def __init__(self, name: str, arch: str = "sm_90a", threads: int | tuple[int, ...] = 128, *,
                 min_ctas: int = 0, max_registers: int = 0, cluster: tuple[int, ...] = (),
                 version: tuple[int, int] = (8, 7)) -> None:
        self.name, self.arch, self.version = name, arch, version
        self.threads = threads if isinstance(threads, tuple) else (threads,)
        self.min_ctas, self.max_registers, self.cluster = min_ctas, max_registers, cluster
        self.parameters: list[str] = []
        self.registers: dict[str, int] = {}
        self.named: dict[str, str] = {}
        self.tiles: list[Shared] = []
        self.specials: dict[str, Value] = {}
        self.head, self.body = CodeBlock(), CodeBlock()
        self.current = self.body
        self.labels = 0
        self.checked = CHECKED.setdefault((arch, version), {})
        self.open_if: tuple[CodeBlock, int, Label] | None = None
        self.loops: list[Label] = []
        self._check_head()

    def _check_head(self) -> None:
        count = 1
        for extent in self.threads: count *= extent
        if self.arch not in isa.ARCH_VERSIONS:
            self.fail(f"unknown architecture {self.arch}", ", ".join(isa.ARCH_VERSIONS), "choose one of them")
        if not 1 <= count <= 1024:
            self.fail(f"{count} threads in a block", "1 to 1024", "make the block smaller")
        if self.cluster and self.arch < "sm_90":
            self.fail(f"clusters need sm_90, the target is {self.arch}", "no cluster", "leave it out")
        if self.version < isa.ARCH_VERSIONS[self.arch]:
            self.fail(f".version {self.version[0]}.{self.version[1]} does not have {self.arch}",
                      f"{isa.ARCH_VERSIONS[self.arch]} or later", "raise version")

    # **** errors ****

    def _writer(self) -> tuple[str, int]:
        """File and line of the innermost caller outside the builder."""
        frame = sys._getframe(1)
        while frame.f_back is not None and (frame.f_code.co_filename in OWN_FILES
                                            or frame.f_code.co_filename.endswith("contextlib.py")):
            frame = frame.f_back
        return frame.f_code.co_filename, frame.f_lineno

    def fail(self, found: str, expected: str = "", fix: str = "") -> NoReturn:
        """Raises a `PTXError` that names the writer's file and line."""
        file, line = self._writer()
        raise PTXError(f"{os.path.basename(file)}:{line}: {found}", line, expected, fix)

    # **** parameters, registers, memory ****

    def param(self, name: str, kind: str) -> Value:
        """A parameter's value, in a register of its name."""
        self._declare_parameter(name, f".param .{kind} {name}", kind)
        made = self._own(kind, name)
        self._at_head(f"ld.param.{kind}", made, Label(name))
        return made

    def pointer(self, name: str, align: int = 16) -> Value:
        """A parameter that points to global memory aligned to `align` bytes, as a u64 global address."""
        self._declare_parameter(name, f".param .u64 .ptr .global .align {align} {name}", "u64")
        made = self._own("u64", name)
        self._at_head("ld.param.u64", made, Label(name))
        self._at_head("cvta.to.global.u64", made, made)
        return made

    def late_pointer(self, name: str, align: int = 16) -> Label:
        """A parameter as of `pointer` that takes no register: `ld.param.u64` reads it where it is used."""
        self._declare_parameter(name, f".param .u64 .ptr .global .align {align} {name}", "u64")
        return Label(name)

    def tensor_map(self, name: str) -> Value:
        """A tensor map passed by value: its generic address, as u64."""
        if self.arch < "sm_90": self.fail(f"tensor maps need sm_90, the target is {self.arch}")
        self._declare_parameter(name, f".param .align 64 .b8 {name}[128]", "b8")
        made = self._own("u64", name)
        self._at_head("mov.b64", made, Label(name))
        self._at_head("cvta.param.u64", made, made)
        return made

    def _declare_parameter(self, name: str, text: str, kind: str) -> None:
        if kind in ("pred", "b128") or kind not in ("b8", "u8", "s8", *PREFIXES):
            self.fail(f"a parameter of type {kind}", "an integer or float type", "pass it as bits")
        if self._is_parameter(name): self.fail(f"two parameters {name}", "names that differ", "rename one")
        if any(tile.name == name for tile in self.tiles):
            self.fail(f"a parameter and a tile {name}", "names that differ", "rename one")
        self.parameters.append(text)

    def _is_parameter(self, name: str) -> bool:
        return any(text.split()[-1] in (name, f"{name}[128]") for text in self.parameters)

    def _own(self, kind: str, name: str) -> Value:
        """A fixed register of a name."""
        made = self.reg(kind, name=name)
        return Value(self, made.name, kind, fixed=True)

    def reg(self, kind: str, value: Number | None = None, name: str = "") -> Value:
        """A new register of a PTX type, set to `value` if there is one; `name` for the reader of the text."""
        if kind not in PREFIXES: self.fail(f"no registers of type {kind}", ", ".join(PREFIXES), "use bits")
        if name:
            while name in self.named or name in PREFIXES.values(): name += "_"
            self.named[name] = kind
        else:
            number = self.registers.get(kind, 0)
            self.registers[kind] = number + 1
            name = f"{PREFIXES[kind]}{number}"
        made = Value(self, f"%{name}", kind)
        return made if value is None else made.set(value)

    def regs(self, kind: str, count: int, value: Number | None = None) -> list[Value]:
        """New registers side by side."""
        return [self.reg(kind, value) for _ in range(count)]

    def special(self, name: str) -> Value:
        """A special register (`laneid`, `tid.x`, `cluster_ctarank`), read once at the kernel's beginning."""
        if name not in self.specials:
            kind = "u64" if name.endswith("64") else "u32"
            # never the special register's own name, which would hide it
            made = self._own(kind, name.replace(".", "_") if "." in name else f"{name}_")
            self._at_head(f"mov.{kind}", made, Label(f"%{name}"))
            self.specials[name] = made
        return self.specials[name]

    @property
    def tid(self) -> Dimensions:
        """The thread in its block."""
        return Dimensions(self, "tid")

    @property
    def ntid(self) -> Dimensions:
        """Threads of a block."""
        return Dimensions(self, "ntid")

    @property
    def ctaid(self) -> Dimensions:
        """The block in the grid."""
        return Dimensions(self, "ctaid")

    @property
    def nctaid(self) -> Dimensions:
        """Blocks of the grid."""
        return Dimensions(self, "nctaid")

    def shared(self, name: str, nbytes: int, align: int = 16) -> Shared:
        """`nbytes` of shared memory at a multiple of `align` (1024 for tiles with 128-byte swizzle)."""
        return self._reserve(Shared(self, name, nbytes, align, -(-self.smem_bytes // align) * align))

    def mbarriers(self, name: str, count: int = 1) -> Barriers:
        """`count` mbarriers, to be initialised with `mbarrier_init`."""
        made = Barriers(self, name, 8 * count, 8, -(-self.smem_bytes // 8) * 8)
        self._reserve(made)
        return made

    def _reserve(self, made: Shared) -> Shared:
        if made.nbytes <= 0:
            self.fail(f"{made.name} of {made.nbytes} bytes", "at least 1 byte", "give it a size")
        if made.align & (made.align - 1) or made.align <= 0:
            self.fail(f"alignment {made.align} of {made.name}", "a power of two", "round it up")
        if any(tile.name == made.name for tile in self.tiles):
            self.fail(f"two tiles {made.name}", "names that differ", "rename one")
        # in a function the nearer name counts: ld.param would read shared memory
        if self._is_parameter(made.name):
            self.fail(f"a parameter and a tile {made.name}", "names that differ", "rename one")
        if made.start + made.nbytes > SMEM_BYTES[self.arch]:
            self.fail(f"{made.name} ends at {made.start + made.nbytes} bytes of shared memory",
                      f"at most {SMEM_BYTES[self.arch]} on {self.arch}", "use smaller tiles or fewer stages")
        self.tiles.append(made)
        return made

    @property
    def smem_bytes(self) -> int:
        """Shared memory used so far."""
        return self.tiles[-1].start + self.tiles[-1].nbytes if self.tiles else 0

    @property
    def dynamic_smem(self) -> int:
        """Bytes of dynamic shared memory that a launch must give: 0 while static memory is enough."""
        return self.smem_bytes if self.smem_bytes > STATIC_SMEM_BYTES else 0

    # **** instructions ****

    def emit(self, opcode: str, *operands: Any, guard: Value | None = None) -> None:
        """Appends an instruction, checked against the table: `k.emit("popc.b32", d, a)`."""
        self._append(self.current, opcode, operands, guard)

    def _append(self, block: CodeBlock, opcode: str, operands: tuple[Any, ...], guard: Value | None) -> None:
        kinds = (opcode, _kind(guard), *map(_kind, operands))
        places = self.checked.get(kinds)
        if places is None: places = self.checked[kinds] = self._check(opcode, operands, guard)
        if self.current is not self.head:
            for place in places:
                written = operands[place]
                if type(written) is not Value: _check_writable(written)
                elif written.fixed: written.writable()
        self.open_if = None
        block.lines.append((f"@{guard} {opcode}" if guard is not None else opcode, operands))

    def _check(self, opcode: str, operands: tuple[Any, ...], guard: Value | None) -> tuple[int, ...]:
        """Checks an instruction against the table; the places of the operands it writes."""
        mnemonic, *modifiers = opcode.split(".")
        made = [self._operand(each, mnemonic) for each in operands]
        by = None if guard is None else syntax.Register(guard.name, guard.kind)
        instruction = syntax.Instruction(mnemonic, tuple(modifiers), by, False, tuple(made),
                                         self._writer()[1])
        try: form, slots = isa.check_instruction(instruction, self.arch, self.version)
        except PTXError as error:
            raise self._locate_error(error) from None
        if opcode.startswith(("cp.async.ca.", "cp.async.cg.")) and "L2::cache_hint" in modifiers:
            raise self._locate_error(PTXError(
                f"{opcode}: a copy with a cache policy, of which ptxas 12.9 and 13.0 make an illegal LDGSTS "
                "where the shared address is the sum of a register and a uniform register", instruction.line,
                "cp.async without .L2::cache_hint", "leave the policy out, or copy with cp.async.bulk"))
        use = form.use(instruction.modifiers)
        for slot, operand in zip(slots, instruction.operands, strict=True):
            if wrong := isa.cut(slot, operand, use):
                raise self._locate_error(PTXError(f"{opcode}: {wrong}", instruction.line,
                                                  isa.form_text(form)))
        return tuple(place for place, slot in enumerate(slots) if slot.dest)

    def _locate_error(self, error: PTXError) -> PTXError:
        """The error with the writer's file in place of a line of text."""
        file, line = self._writer()
        words = error.found.removeprefix(f"line {line}: ")
        return PTXError(f"{os.path.basename(file)}:{line}: {words}", line, error.expected, error.fix)

    def _at_head(self, opcode: str, *operands: Any) -> None:
        """An instruction at the kernel's beginning."""
        saved, self.current = self.current, self.head
        try: self._append(self.head, opcode, operands, None)
        finally: self.current = saved

    def _operand(self, value: Any, mnemonic: str) -> syntax.Operand:
        """An operand as the parser would give it."""
        if isinstance(value, Value): return syntax.Register(value.name, value.kind, value.negated)
        if isinstance(value, bool | int): return syntax.Immediate(int(value))
        if isinstance(value, float): return syntax.Immediate(value, 64)
        if isinstance(value, SinkOperand): return syntax.Sink()
        if isinstance(value, Shared): return syntax.Symbol(value.name)
        if isinstance(value, Label):
            if mnemonic == "ld": return syntax.Address(syntax.Symbol(value.name))
            if value.name[0] == "%": return syntax.Register(value.name, "special")
            return syntax.Symbol(value.name)
        if isinstance(value, list | tuple):
            return syntax.Vector(tuple(self._operand(each, mnemonic) for each in value))
        if isinstance(value, PairOperand): return self._pair(value)
        if isinstance(value, MemoryOperand): return self._place(value, mnemonic)
        self.fail(f"{value!r} is no operand", "a value, place, number, list, Pair, SINK or label",
                  "convert it")

    def _pair(self, value: PairOperand) -> syntax.Operand:
        second = syntax.Register(value.second.name, value.second.kind)
        if isinstance(value.first, SinkOperand): return syntax.Pair(syntax.Sink(), second)
        return syntax.Pair(syntax.Register(value.first.name, value.first.kind), second)

    def _place(self, value: MemoryOperand, mnemonic: str) -> syntax.Operand:
        if isinstance(value.base, Shared): base: Any = syntax.Symbol(value.base.name)
        else: base = syntax.Register(value.base.name, value.base.kind)
        items = tuple(self._operand(each, mnemonic) for each in value.coordinates)
        return syntax.Address(base, value.offset, syntax.Vector(items) if items else None)


# **** what was checked before ****

# instructions by `_kind`, for each architecture and version: a check takes 80 µs, this 2
CHECKED: dict[tuple[str, tuple[int, int]], dict[tuple[Any, ...], tuple[int, ...]]] = {}


def _kind(value: Any) -> Any:
    """Returns what the instruction table looks at in an operand: types, not names; the values of integers
    alone."""
    if type(value) is Value: return value.table_type
    if isinstance(value, int): return int(value)
    if isinstance(value, list | tuple): return tuple(map(_kind, value))
    if isinstance(value, MemoryOperand): return (MemoryOperand, _kind(value.base), *map(_kind,
                                                                                        value.coordinates))
    if isinstance(value, PairOperand): return (PairOperand, _kind(value.first), _kind(value.second))
    if isinstance(value, Label): return (Label, value.name[0])
    return type(value)


def _check_writable(operand: Any) -> None:
    """Raises `PTXError` for registers of a kernel's inputs, which are not written."""
    for each in operand if isinstance(operand, list | tuple) else [operand]:
        if isinstance(each, Value): each.writable()
