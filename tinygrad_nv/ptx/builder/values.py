"""Operands of instructions of a kernel under construction: registers, shared memory, addresses, labels.

Protocol: a `Value` is a virtual register of one PTX type. Its operators emit an instruction into its kernel
and give a new register; `+=` and its kind write the register itself. Operands must have the same type (bits
go with anything of their width); `to` converts, and nothing is widened silently. Comparisons give predicates,
which `&`, `|`, `^` and `~` combine and which `Kernel.if_` takes. A `MemoryOperand` is an address in brackets.

Of division of integers by a constant ptxas has no short way for it, not even for powers of two,
and makes each `div` and `rem` about 15 instructions with a reciprocal; here it is shifts, or a product
(Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Union

from tinygrad_nv.ptx.isa.operands import family, width

Number = Union["Value", int, float]
BITS = 32


class Emitter(Protocol):
    """Operations that values need of a kernel."""

    def emit(self, opcode: str, *operands: Any, guard: Value | None = None) -> None:
        """Appends an instruction."""

    def reg(self, kind: str, value: Number | None = None, name: str = "") -> Value:
        """A new register."""

    def fail(self, found: str, expected: str = "", fix: str = "") -> NoReturn:
        """Raises a PTXError that names the writer's line."""


@dataclass(frozen=True, eq=False)
class Value:
    """A register; `negated` predicates are written with `!`. `fixed` ones, as %tid.x, must not be written."""
    kernel: Emitter
    name: str
    kind: str
    negated: bool = False
    fixed: bool = False

    def __init__(self, kernel: Emitter, name: str, kind: str, negated: bool = False,
                 fixed: bool = False) -> None:
        # kernels have thousands of registers: a frozen class's own __init__ takes three times as long
        self.__dict__.update(kernel=kernel, name=name, kind=kind, negated=negated, fixed=fixed)

    @property
    def table_type(self) -> tuple[str, bool]:
        """Type that the instruction table looks at, and whether the value is negated."""
        return self.kind, self.negated

    # **** arithmetic: integers wrap, floats round to nearest ****

    def __add__(self, other: Number) -> Value: return self._binary("add", other)
    def __radd__(self, other: Number) -> Value: return self._binary("add", other)
    def __sub__(self, other: Number) -> Value: return self._binary("sub", other)
    def __rsub__(self, other: Number) -> Value: return self._lift(other)._binary("sub", self)
    def __mul__(self, other: Number) -> Value: return self._binary(self._multiply(), other)
    def __rmul__(self, other: Number) -> Value: return self._binary(self._multiply(), other)
    def __floordiv__(self, other: Number) -> Value: return self._integer("div", other)
    def __mod__(self, other: Number) -> Value: return self._integer("rem", other)
    def __truediv__(self, other: Number) -> Value: return self._floating("div.rn", other)
    def __neg__(self) -> Value: return self._new("neg", self)
    def __iadd__(self, other: Number) -> Value: return self._in_place("add", other)
    def __isub__(self, other: Number) -> Value: return self._in_place("sub", other)
    def __imul__(self, other: Number) -> Value: return self._in_place(self._multiply(), other)

    # **** bits and predicates ****

    def __and__(self, other: Number) -> Value: return self._bits("and", other)
    def __or__(self, other: Number) -> Value: return self._bits("or", other)
    def __xor__(self, other: Number) -> Value: return self._bits("xor", other)
    def __iand__(self, other: Number) -> Value: return self._in_place("and", other, bits=True)
    def __ior__(self, other: Number) -> Value: return self._in_place("or", other, bits=True)
    def __ixor__(self, other: Number) -> Value: return self._in_place("xor", other, bits=True)

    def __invert__(self) -> Value:
        if self.kind == "pred": return Value(self.kernel, self.name, "pred", not self.negated, self.fixed)
        made = self.kernel.reg(self.kind)
        self.kernel.emit(f"not.b{width(self.kind)}", made, self)
        return made

    def __lshift__(self, count: Number) -> Value: return self._shift(f"shl.b{width(self.kind)}", count)
    def __rshift__(self, count: Number) -> Value: return self._shift(f"shr.{self._type()}", count)

    # **** comparisons ****

    def __lt__(self, other: Number) -> Value: return self._compare("lt", other)
    def __le__(self, other: Number) -> Value: return self._compare("le", other)
    def __gt__(self, other: Number) -> Value: return self._compare("gt", other)
    def __ge__(self, other: Number) -> Value: return self._compare("ge", other)
    def __eq__(self, other: Number) -> Value: return self._compare("eq", other)  # type: ignore[override]
    def __ne__(self, other: Number) -> Value: return self._compare("ne", other)  # type: ignore[override]
    def __hash__(self) -> int: return id(self)

    def __bool__(self) -> bool:
        self.kernel.fail(f"{self} has no value while the kernel is written", "a Python truth value",
                         "branch in the kernel: with k.if_(…), or k.select(…)")

    def __str__(self) -> str: return f"{'!' if self.negated else ''}{self.name}"

    # **** moves ****

    def set(self, value: Number) -> Value:
        """Writes the register."""
        self.writable()
        self.kernel.emit(f"mov.{self.kind}", self, self._check_type(value))
        return self

    def to(self, kind: str) -> Value:
        """Converted to another integer or float type: integers extend by their own sign, floats to integers
        round towards zero, to narrower floats to nearest."""
        source, made = self._type(), self.kernel.reg(kind)
        rounding, groups = "", (family(source), family(kind))
        if groups == ("f", "i"): rounding = ".rzi"
        elif groups == ("i", "f") or (groups == ("f", "f") and width(kind) < width(source)): rounding = ".rn"
        target = "u" + kind[1:] if kind[0] == "b" and kind[1:].isdigit() else kind
        self.kernel.emit(f"cvt{rounding}.{target}.{source}", made, self)
        return made

    def at(self, offset: int = 0, coordinates: Sequence[Number] = ()) -> MemoryOperand:
        """The place at this address plus `offset` bytes; with `coordinates`, innermost first, in a tensor
        map."""
        return MemoryOperand(self, offset, tuple(coordinates))

    def writable(self) -> None:
        """Raises where the register must keep its value."""
        if self.fixed:
            self.kernel.fail(f"{self} must not be written", "a register of your own",
                             "copy it: k.reg(kind, value)")

    # **** how operators emit ****

    def _type(self) -> str:
        """The type for arithmetic: bits count as unsigned."""
        return "u" + self.kind[1:] if self.kind in ("b16", "b32", "b64") else self.kind

    def _multiply(self) -> str: return "mul.lo" if family(self._type()) == "i" else "mul"

    def _lift(self, other: Number) -> Value:
        return other if isinstance(other, Value) else self.kernel.reg(self.kind, other)

    def _check_type(self, other: Number) -> Number:
        """The other operand, of the same type or bits of the width."""
        if not isinstance(other, Value): return other
        same = other.kind == self.kind or (width(other.kind) == width(self.kind)
                                           and "b" in (family(other.kind), family(self.kind)))
        if same: return other
        self.kernel.fail(f"{self} is .{self.kind}, {other} is .{other.kind}", "operands of one type",
                         f'convert: value.to("{self.kind}")')

    def _new(self, opcode: str, *operands: Number) -> Value:
        made = self.kernel.reg(self.kind)
        self.kernel.emit(f"{opcode}.{self._type()}", made, *operands)
        return made

    def _binary(self, opcode: str, other: Number) -> Value:
        return self._new(opcode, self, self._check_type(other))

    def _integer(self, opcode: str, other: Number) -> Value:
        kind = self._type()
        if family(kind) != "i": self.kernel.fail(f"{self} is .{self.kind}", "an integer", "use /")
        if not isinstance(other, int) or not divisible(kind, other): return self._binary(opcode, other)
        if opcode == "div": return self._quotient(other)
        if kind[0] == "u" and power_of_two(other): return self & other - 1
        return self - self._quotient(other) * other

    def _quotient(self, divisor: int) -> Value:
        """By a constant, without a division; rounded towards zero."""
        if power_of_two(divisor):
            shift = divisor.bit_length() - 1
            if self.kind[0] != "s" or not shift: return self >> shift
            # a shift rounds down: a negative number has to be up to divisor - 1 more
            return (self + ((self >> width(self.kind) - 1) & divisor - 1)) >> shift
        factor, shift = multiplier(divisor)
        high = self._new("mul.hi", self, factor & 0xFFFFFFFF)
        if factor >> 32: return (((self - high) >> 1) + high) >> shift - 1
        return high >> shift if shift else high

    def _floating(self, opcode: str, other: Number) -> Value:
        if family(self.kind) != "f":
            self.kernel.fail(f"{self} is .{self.kind}", "f32 or f64", "use // for integers")
        return self._binary(opcode, other)

    def _bits(self, opcode: str, other: Number) -> Value:
        if family(self.kind) == "f":
            self.kernel.fail(f"{self} is .{self.kind}", "an integer or a predicate", "move it to b32 first")
        made = self.kernel.reg(self.kind)
        self.kernel.emit(f"{opcode}.{self._bit_type()}", made, self, self._check_type(other))
        return made

    def _bit_type(self) -> str: return "pred" if self.kind == "pred" else f"b{width(self.kind)}"

    def _shift(self, opcode: str, count: Number) -> Value:
        made = self.kernel.reg(self.kind)
        self.kernel.emit(opcode, made, self, count)
        return made

    def _compare(self, relation: str, other: Number) -> Value:
        made = self.kernel.reg("pred")
        self.kernel.emit(f"setp.{relation}.{self._type()}", made, self, self._check_type(other))
        return made

    def _in_place(self, opcode: str, other: Number, bits: bool = False) -> Value:
        self.writable()
        kind = self._bit_type() if bits else self._type()
        self.kernel.emit(f"{opcode}.{kind}", self, self, self._check_type(other))
        return self


@dataclass(frozen=True)
class MemoryOperand:
    """`[base + offset]`, and in a tensor map `[base, {coordinates}]`."""
    base: Value | Shared
    offset: int = 0
    coordinates: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Shared:
    """`nbytes` of shared memory, `start` bytes after the kernel's first."""
    kernel: Emitter
    name: str
    nbytes: int
    align: int
    start: int

    def at(self, offset: int = 0) -> MemoryOperand:
        """The place `offset` bytes after its beginning."""
        if not 0 <= offset < self.nbytes:
            self.kernel.fail(f"offset {offset} of {self.name}, which has {self.nbytes} bytes",
                             f"0..{self.nbytes - 1}", "correct the offset, or make it larger")
        return MemoryOperand(self, offset)

    def address(self, offset: Number = 0) -> Value:
        """A u32 register with its address plus `offset` bytes."""
        made = self.kernel.reg("u32")
        self.kernel.emit("mov.u32", made, self)
        return made if isinstance(offset, int) and offset == 0 else made + offset


@dataclass(frozen=True)
class Barriers(Shared):
    """mbarriers side by side, 8 bytes each; `barriers[i]` takes a constant or a u32 register."""

    def __getitem__(self, index: Value | int) -> MemoryOperand:
        if isinstance(index, int): return self.at(8 * index)
        return self.address(index * 8).at()


class SinkOperand:
    """`_`: a result that no instruction reads. Its only instance is `SINK`."""


SINK = SinkOperand()


@dataclass(frozen=True)
class PairOperand:
    """`d|p`: a result and a predicate."""
    first: Value | SinkOperand
    second: Value


@dataclass(frozen=True)
class Label:
    """A place in the code."""
    name: str


def power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, …"""
    return number > 0 and number & number - 1 == 0


def divisible(kind: str, divisor: int) -> bool:
    """Whether a register of this type (u32, s32, …) can be divided by it without a division."""
    return (kind == "u32" and divisor > 0) or power_of_two(divisor)


def multiplier(divisor: int) -> tuple[int, int]:
    """m and s, so that floor(n · m / 2^(32 + s)) is floor(n / divisor) for every n below 2^32; the smallest s
    for which m has 32 bits, else m of 33."""
    most = (divisor - 1).bit_length()
    for shift in range(most + 1):
        made = -(-(1 << BITS + shift) // divisor)
        error = made * divisor - (1 << BITS + shift)
        if error <= 1 << shift and made < 1 << BITS: return made, shift
    return -(-(1 << BITS + most) // divisor), most
