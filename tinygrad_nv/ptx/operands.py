"""Instructions of PTX text, and the names their operands stand for.

Protocol: `OperandParser.instruction` reads one statement up to its semicolon, in the scopes that the parser
opened; names declared in a block in braces are unique outside it (`name@2`). Argument lists of calls are
vectors.

`OperandParser.line_instruction` does the same for an instruction on one line, as nearly all are, and looks
its operands up by their text: three times as fast. It leaves what is unusual, and every error, to
`instruction`.
"""
from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinygrad_nv.ptx.expressions import Constants, is_constant, wrap
from tinygrad_nv.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from tinygrad_nv.ptx.tokens import Token, TokenReader

OPCODE = re.compile(r"[a-z][a-z0-9_]*(?:(?:\.|::)[a-zA-Z0-9_]+)*")
# a whole instruction on one line, without comment, string or label: guard, opcode, operands
LINE = re.compile(r"""(?:@(!?)(%[\w$]+)[ \t]+)?""" + f"({OPCODE.pattern})" \
    + r"""(?:[ \t]++([^;:\n"/@]*+))?;""")
# an operand and the comma behind it: a vector, an address, or what has neither
ADDRESS = re.compile(r"\[(%[\w$]+)(?:\+(0|[1-9][0-9]{0,17}))?\]")
NUMBER = re.compile(r"0|[1-9][0-9]*")
PIECE = re.compile(r"[ \t]*+(\{[^{}]*\}|\[[^][{}]*(?:\{[^{}]*\}[^][{}]*)?\]|[^][{},]*[^][{}, \t])"
                   r"[ \t]*(?:,|$)")
# comments and strings are matched so as to be passed over
LABEL = re.compile(r"""//[^\n]*|"[^"\n]*"|[{}]|(?<![\w$%.:])([$_a-zA-Z][\w$]*)\s*:(?!:)""")


@dataclass
class Scope:
    """Names declared between two braces, and what they are called outside; `suffix` makes them unique.
    `operands` are those read here, by text and whether they are branch targets, until more is declared."""
    suffix: str = ""
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)  # %r<301>: prefix → type, count
    labels: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    operands: dict[tuple[str, bool], Operand] = field(default_factory=dict)


@functools.lru_cache(4096)
def _words(opcode: str) -> tuple[str, tuple[str, ...]]:
    """Mnemonic and modifiers."""
    mnemonic, *modifiers = opcode.split(".")
    return mnemonic, tuple(modifiers)


class OperandParser(TokenReader):
    """Scopes, and what is read in them. Opcodes are read from the text, all else from tokens."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.scopes: list[Scope] = []
        self.labels_of: dict[int, list[str]] = {}  # by where a block of the function begins
        self.depth = 0                      # of the operand that is being read
        self.elements: dict[str, int] = {}  # bytes of an element of each variable

    # **** names ****

    def declare_labels(self) -> None:
        """The labels of the block that begins here, since branches may come before them."""
        scope = self.scopes[-1]
        scope.operands.clear()
        scope.labels |= {name: name + scope.suffix for name in self.labels_of.get(self.at, ())}

    def find_labels(self) -> None:
        """Finds the labels of the function whose body begins here, of each block by its place."""
        self.labels_of, open_ = {}, [self.at]
        for found in LABEL.finditer(self.text, self.at):
            if found.group() == "{": open_.append(found.end())
            elif found.group() == "}":
                open_.pop()
                if not open_: return
            elif name := found.group(1): self.labels_of.setdefault(open_[-1], []).append(name)

    def label(self, name: str) -> str:
        """The unique name of a label seen from here."""
        for scope in reversed(self.scopes):
            if name in scope.labels: return scope.labels[name]
        raise self.fail(f"label {name} is not defined")

    def visible_label(self, name: str) -> Symbol | None:
        """The label of a name, where one is seen from here."""
        found = next((scope.labels[name] for scope in reversed(self.scopes) if name in scope.labels), None)
        return Symbol(found) if found is not None else None

    def declare_variable(self, name: str) -> str:
        """Enters a variable in the scope that declares it."""
        if not self.scopes: return name
        self.scopes[-1].operands.clear()
        self.scopes[-1].variables[name] = name + self.scopes[-1].suffix
        return self.scopes[-1].variables[name]

    def unique_name(self, name: str) -> str:
        """Returns the unique name of a variable seen from here."""
        return next((s.variables[name] for s in reversed(self.scopes) if name in s.variables), name)

    def register(self, name: str) -> Register | None:
        """The register of a name seen from here."""
        stem = name.rstrip("0123456789")
        if len(name) - len(stem) > 10: stem = name  # no register has such a number
        for scope in reversed(self.scopes):
            if name in scope.registers: return scope.registers[name]
            if stem in scope.ranges and stem != name and int(name[len(stem):]) < scope.ranges[stem][1]:
                scope.registers[name] = Register(name + scope.suffix, scope.ranges[stem][0])
                return scope.registers[name]
        return None

    # **** instructions ****

    def line_instruction(self) -> Instruction | None:
        """The instruction that begins here, if it is one of those on a line; else None: nothing is read."""
        if (found := LINE.match(self.text, self.at)) is None: return None
        negation, guard, opcode, rest = found.groups()
        mnemonic, modifiers = _words(opcode)
        predicate = self.register(guard) if guard else None
        if mnemonic == "call" or (guard and predicate is None): return None
        begin, line = self.at, self.line
        operands = self.pieces(rest, found.start(4), mnemonic in ("bra", "brx")) if rest else []
        self.ahead = None
        if operands is None:
            self.at = begin
            return None
        self.at = found.end()
        return Instruction(mnemonic, modifiers, predicate, bool(negation), tuple(operands), line)

    def pieces(self, text: str, start: int, target: bool) -> list[Operand] | None:
        """The operands of a text between commas, which begins at `start`; None where it is not just that."""
        known, made, at = self.scopes[-1].operands, list[Operand](), 0
        while at < len(text):
            if (piece := PIECE.match(text, at)) is None: return None
            key = piece.group(1), target
            operand = known.get(key)
            if operand is None and target: operand = self.visible_label(key[0])
            if operand is None and (operand := self.common(key[0])) is None:
                self.at, self.ahead = start + piece.start(1), None
                operand = self.operand(target)
                if self.peek().at < start + piece.end(1) or self.peek().text not in (",", ";"): return None
            known[key] = operand
            made.append(operand)
            at = piece.end()
        return None if text[at - 1] == "," else made

    def common(self, text: str) -> Operand | None:
        """A declared register, an address in one, a vector of them, or a decimal number; None of all else."""
        if text[0] == "%": return self.register(text)
        if len(text) <= 20 and NUMBER.fullmatch(text): return Immediate(int(text))
        if text[0] == "{":
            items = [self.register(item.strip()) for item in text[1:-1].split(",")]
            found = tuple(item for item in items if item is not None)
            return Vector(found) if len(found) == len(items) else None
        if (address := ADDRESS.fullmatch(text)) is None or (base := self.register(address[1])) is None:
            return None
        return Address(base, int(address[2] or 0))

    def instruction(self) -> Instruction:
        """`@!%p opcode.modifiers operands;`."""
        guard, negated = None, False
        if self.take("@"):
            negated = self.take("!")
            token = self.next()
            guard = self.register(token.text)
            if guard is None: raise self.fail(f"guard {token.text} is not declared", token.line)
        self.ahead = None
        self.skip_space()
        if (found := OPCODE.match(self.text, self.at)) is None: raise self.fail("an instruction is expected")
        line, self.at = self.line, found.end()
        mnemonic, modifiers = _words(found.group())
        operands = tuple(self.operands(mnemonic))
        # the line that lacks it, not the one where something else was found
        if not self.take(";"): raise self.fail(f"';' expected, {self.peek().text!r} found", line)
        return Instruction(mnemonic, modifiers, guard, negated, operands, line)

    def operands(self, mnemonic: str) -> Iterator[Operand]:
        """Operands up to the semicolon."""
        if self.peek().text == ";": return
        while True:
            if mnemonic == "call" and self.peek().text == "(": yield self.vector("(", ")")
            else: yield self.operand(mnemonic in ("bra", "brx"))
            if not self.take(","): return

    def operand(self, target: bool = False) -> Operand:
        """One operand; `target` says that a bare name is a label."""
        self.depth = self.inside(self.depth)
        made = self.any_operand(target)
        self.depth -= 1
        return made

    def any_operand(self, target: bool) -> Operand:
        """Parses an operand by the token that begins it."""
        token = self.peek()
        if token.text == "{": return self.vector()
        if token.text == "[": return self.address()
        if token.text == "_":
            self.next()
            return self.after_bar(Sink()) if self.take("|") else Sink()
        if token.text == "!" and self.text[token.at + 1:].lstrip()[:1] == "%":
            self.next()
            made = self.operand()
            if not isinstance(made, Register): raise self.fail("! needs a predicate")
            return Register(made.name, made.kind, negated=True)
        if token.kind == "name" and not is_constant(token.text):
            self.next()
            return self.parse_named(token, target)
        return Constants(self).immediate()

    def parse_named(self, token: Token, target: bool) -> Operand:
        """Parses a register (perhaps `%p|%q`), a special register, a label, or a variable with an offset."""
        if target and not token.text.startswith("%"): return Symbol(self.label(token.text))
        if (found := self.register(token.text)) is not None:
            return self.after_bar(found) if self.take("|") else found
        if token.text.startswith("%"): return Register(token.text, "special")
        name = self.unique_name(token.text)
        return Symbol(name, self.index(name) + self.offset())

    def index(self, name: str) -> int:
        """The bytes that `[3]` after a variable's name stands for; 0 for nothing."""
        if name not in self.elements or not self.take("["): return 0
        before = self.whole() * self.elements[name]
        self.expect("]")
        return before

    def after_bar(self, first: Register | Sink) -> Pair:
        """The second destination of `%p|%q`."""
        second = self.operand()
        if not isinstance(second, Register | Sink): raise self.fail("a predicate is expected after |")
        return Pair(first, second)

    def vector(self, opening: str = "{", closing: str = "}") -> Vector:
        """`{a, b, c, d}`, or the arguments of a call."""
        self.expect(opening)
        items: list[Operand] = []
        while not self.take(closing):
            items.append(self.operand())
            self.take(",")
        return Vector(tuple(items))

    def offset(self) -> int:
        """`+ 16`, `+-4`, or nothing."""
        return self.whole() if self.take("+") else 0

    def address(self) -> Address:
        """`[%rd1 + 16]`, `[symbol]`, `[64]`, `[%tmap, {%x, %y}]`."""
        self.expect("[")
        token = self.peek()
        base: Register | Symbol | Immediate
        if token.kind == "name" and not is_constant(token.text):
            made = self.parse_named(self.next(), False)
            if not isinstance(made, Register | Symbol): raise self.fail("an address is expected", token.line)
            base = made
        else: base = Constants(self).immediate()
        offset = self.offset()
        coordinates = self.vector() if self.take(",") else None
        self.expect("]")
        return Address(base, offset, coordinates)

    def whole(self) -> int:
        """A constant expression as an integer of 64 bits."""
        made = Constants(self)
        return wrap(made.whole(made.immediate()))

    def constant(self) -> int | float:
        """A constant expression."""
        return Constants(self).value()
