"""The syntax tree of PTX text, made by parser.py: modules, functions, instructions and their operands.

Frozen where they are values; `PTXModule` and `PTXFunction` are filled while parsing and read only afterwards.
"""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Register:
    """A virtual register, `kind` its declared type ("special" for %tid and its like). `negated` stands for
    !%p."""
    name: str
    kind: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A constant: its value, and for hexadecimal floats the bits and width they were written with (0 for
    integers)."""
    value: int | float
    float_bits: int = 0


@dataclass(frozen=True)
class Symbol:
    """A variable's address plus `offset` bytes, or a label."""
    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; with `coordinates` it is the place in a tensor map."""
    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: Vector | None = None


@dataclass(frozen=True)
class Vector:
    """`{a, b, …}`."""
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`%p|%q`: two destinations."""
    first: Register | Sink
    second: Register | Sink


@dataclass(frozen=True)
class Sink:
    """`_`: a destination that is not read."""


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Sink


@dataclass(frozen=True)
class Instruction:
    """`@guard mnemonic.modifiers operands` at a line of the text."""
    mnemonic: str
    modifiers: tuple[str, ...]
    guard: Register | None
    negated: bool
    operands: tuple[Operand, ...]
    line: int

    @property
    def opcode(self) -> str:
        """Mnemonic and modifiers as written."""
        return ".".join((self.mnemonic, *self.modifiers))


@dataclass(frozen=True)
class Variable:
    """A variable or parameter of `nbytes` bytes (0: `name[]`, sized at launch); `offset` is a parameter's
    place."""
    name: str
    space: str
    kind: str
    align: int
    nbytes: int
    data: bytes
    line: int
    offset: int = 0


@dataclass
class PTXFunction:
    """An entry point, or a function that is called. `labels` are positions in `body`; `tables` the targets of
    brx.idx, by label; `results` what a call gives back."""
    name: str
    line: int
    parameters: dict[str, Variable] = field(default_factory=dict)
    parameter_bytes: int = 0
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    results: dict[str, Variable] = field(default_factory=dict)


@dataclass
class PTXModule:
    """A PTX module: `functions` are its entry points, `callees` those that are called."""
    version: tuple[int, int] = (0, 0)
    target: str = ""
    address_size: int = 64
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, PTXFunction] = field(default_factory=dict)
    callees: dict[str, PTXFunction] = field(default_factory=dict)
