"""PTX text to a `Module`: any PTX, ours, Triton's or nvcc's.

Protocol: `parse(text)` gives the module's targets, variables and entry functions. A function's body is
flat: blocks in braces are scopes for registers and labels, so names declared inside one are made unique
(`name@2`), and instructions and labels are what is left. Labels become positions in the instruction list.
Instructions keep their opcode as a mnemonic and a tuple of modifiers, whose order after the mnemonic means
nothing in PTX, and operands as the small classes of `syntax.py`.

Not interpreted: debug directives (.loc, .file, .section), linking (.visible, .weak) and pragmas. A
construct that is not known is a `PTXError` with line and text.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tinygrad_nv.ptx.expressions import Constants, is_constant
from tinygrad_nv.ptx.syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)
from tinygrad_nv.ptx.tokens import SPACE, Cursor, Token

OPCODE = re.compile(r"[a-z][a-z0-9_]*(?:(?:\.|::)[a-zA-Z0-9_]+)*")
WIDTHS = {"pred": 1, "tf32": 32, "f16x2": 32, "bf16x2": 32, "bf16": 16, "b128": 128,
          **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
          **{f"f{bits}": bits for bits in (16, 32, 64)}}
# comments and strings are matched so as to be passed over
LABEL = re.compile(r"""//[^\n]*|"[^"\n]*"|[{}]|(?<![\w$%.:])([$_a-zA-Z][\w$]*)\s*:(?!:)""")
LINKAGE = {".visible", ".extern", ".weak", ".common"}
SPACES = {".global", ".const", ".shared", ".local", ".param"}
IGNORED_LINES = {".loc", ".file", ".section"}


@dataclass
class Scope:
    """Names declared between two braces, and what they are called outside; `suffix` makes them unique."""
    suffix: str = ""
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[str, int]] = field(default_factory=dict)  # %r<301>: prefix → type, count
    labels: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> Module:
    """The module of a PTX text. Raises `PTXError` at the first line it does not understand."""
    return Parser(text).module()


class Parser(Cursor):
    """Opcodes are read from the text, all else from tokens."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.out = Module()
        self.scopes: list[Scope] = []
        self.elements: dict[str, int] = {}  # bytes of an element of each variable
        self.unique = 0

    # **** module ****

    def module(self) -> Module:
        """Everything up to the end of the text."""
        while (token := self.next()).kind != "end":
            if token.text in IGNORED_LINES: self.skip_debug(token.text)
            elif token.text == ".version": self.out.version = self.version()
            elif token.text == ".target": self.out.target = self.target()
            elif token.text == ".address_size": self.out.address_size = int(self.next().text)
            elif token.text in LINKAGE: continue
            elif token.text in (".entry", ".func"): self.function(token.text == ".entry")
            elif token.text in SPACES: self.variable(token.text[1:], self.out.variables)
            elif token.text in (".pragma", ".alias"): self.skip_to_semicolon()
            else: raise self.fail(f"unexpected {token.text!r} at module level", token.line)
        if self.out.version == (0, 0): raise self.fail("no .version directive", 1)
        return self.out

    def version(self) -> tuple[int, int]:
        """`.version 8.7`."""
        major, _, minor = self.next().text.partition(".")
        return int(major), int(minor or 0)

    def target(self) -> str:
        """`.target sm_90a, texmode_independent`: the architecture."""
        name = self.next().text
        while self.take(","): self.next()
        return name

    def skip_debug(self, directive: str) -> None:
        """.section has a block; .loc and .file end with the line."""
        if directive != ".section": return self.skip_line()
        while self.next().text != "{": pass
        depth = 1
        while depth: depth += {"{": 1, "}": -1}.get(self.skip_word(), 0)
        return None

    def skip_word(self) -> str:
        """The next brace or other word of debug data, whose syntax is the debugger's."""
        self.ahead = None
        self.skip_space()
        if self.at >= len(self.text): raise self.fail("a block is not closed")
        word = re.compile(r"[{}]|[^\s{}]+").match(self.text, self.at)
        assert word is not None
        self.at = word.end()
        return word.group()

    def skip_to_semicolon(self) -> None:
        """Moves past a directive that means nothing here."""
        while self.next().text != ";":
            if self.peek().kind == "end": raise self.fail("a directive is not closed")

    def variable(self, space: str, into: dict[str, Variable]) -> None:
        """`.align 16 .b8 name[256], other = {…};` after its state space."""
        align, kind, vector = 0, "", 1
        while (token := self.next()).kind == "directive":
            if token.text == ".align": align = int(self.constant())
            elif token.text in (".v2", ".v4"): vector = int(token.text[2])
            elif token.text == ".ptr": pass
            elif token.text[1:] in WIDTHS: kind = token.text[1:]
            elif token.text not in (*LINKAGE, *SPACES, ".attribute", ".managed"):
                raise self.fail(f"unknown directive {token.text} of a variable", token.line)
        while True:
            name, size = token.text, max(WIDTHS[kind] // 8, 1) * vector
            extents = self.extents()
            count = 1
            for extent in extents: count *= extent
            data = self.initialiser(max(WIDTHS[kind] // 8, 1), kind) if self.take("=") else b""
            unsized = extents == [0] and not data
            if extents == [0]: count = len(data) // size
            nbytes, unique = 0 if unsized else size * count, self.declare_variable(name)
            into[unique] = Variable(unique, space, kind, align or size, nbytes, data, token.line)
            self.elements[unique] = size
            if not self.take(","): break
            token = self.next()
        self.expect(";")

    def extents(self) -> list[int]:
        """`[4][8]`; `[]` is [0]."""
        out = []
        while self.take("["):
            if self.take("]"):
                out.append(0)
                continue
            out.append(int(self.constant()))
            self.expect("]")
        return out

    def initialiser(self, item: int, kind: str) -> bytes:
        """Bytes of `{1, 2, {3}}`, a number, or a string. Addresses of other variables are not constant
        here."""
        if self.take("{"):
            data = b""
            while not self.take("}"):
                data += self.initialiser(item, kind)
                self.take(",")
            return data
        if self.peek().kind == "string":
            return self.next().text[1:-1].encode().decode("unicode_escape").encode("latin-1")
        if not is_constant(self.peek().text): raise self.fail("the address of a variable as initial value")
        return Constants(self).bytes_of(item, kind)

    # **** functions ****

    def function(self, entry: bool) -> None:
        """`.entry name(params) directives { body }`, or a declaration ended by a semicolon."""
        if not entry and self.peek().text == "(": self.skip_parentheses()
        name = self.next()
        out = Function(name.text, name.line)
        self.scopes = [Scope()]
        if self.take("("):
            while not self.take(")"):
                self.parameter(out)
                self.take(",")
        while (token := self.next()).text != "{":
            if token.text == ";": return
            self.directive(token, out)
        if not entry: raise self.fail(f"function {name.text}: only .entry functions are run", name.line)
        self.body(out)
        self.out.functions[out.name] = out

    def skip_parentheses(self) -> None:
        """Moves past a return parameter list."""
        while self.next().text != ")": pass

    def parameter(self, out: Function) -> None:
        """`.param .align 64 .b8 name[128]` or `.param .u64 .ptr .global .align 16 name`."""
        self.expect(".param")
        kind, align = "", 0
        while (token := self.next()).kind == "directive":
            if token.text == ".align":
                value = int(self.constant())
                if not kind: align = value  # after .ptr it is the pointee's
            elif token.text[1:] in WIDTHS: kind = token.text[1:]
        size = WIDTHS[kind] // 8
        for extent in self.extents(): size *= extent
        align = align or WIDTHS[kind] // 8
        offset = -(-out.parameter_bytes // align) * align
        out.parameters[token.text] = Variable(token.text, "param", kind, align, size, b"", token.line, offset)
        out.parameter_bytes = offset + size

    def directive(self, token: Token, out: Function) -> None:
        """`.reqntid 128, 1, 1` and its kind."""
        if token.kind != "directive": raise self.fail(f"unexpected {token.text!r} before a body", token.line)
        values = []
        while self.peek().kind in ("int", "string"):
            word = self.next()
            values.append(int(word.text.rstrip("U"), 0) if word.kind == "int" else 0)
            if not self.take(","): break
        if token.text == ".pragma": self.take(";")
        out.directives[token.text[1:]] = tuple(values)

    def body(self, out: Function) -> None:
        """Statements up to the closing brace."""
        pending: list[tuple[str, int]] = []
        depth = 1
        self.declare_labels()
        while depth:
            token = self.peek()
            if token.kind == "end": raise self.fail(f"function {out.name} is not closed")
            if token.text == "{":
                self.next()
                self.unique += 1
                self.scopes.append(Scope(f"@{self.unique}"))
                self.declare_labels()
                depth += 1
            elif token.text == "}":
                self.next()
                depth -= 1
                if depth: self.scopes.pop()
            else: self.statement(out, pending)
        for label, position in pending: out.labels[label] = position

    def statement(self, out: Function, labels: list[tuple[str, int]]) -> None:
        """A directive, a label or an instruction."""
        token = self.peek()
        if token.text in IGNORED_LINES:
            self.next()
            self.skip_debug(token.text)
        elif token.text == ".reg": self.register_declaration()
        elif token.text in SPACES:
            self.next()
            self.variable(token.text[1:], out.variables)
        elif token.text == ".branchtargets": self.branch_targets(out, labels[-1][0] if labels else "")
        elif token.text in (".pragma", ".callprototype"): self.skip_to_semicolon()
        elif token.kind == "directive" and token.text in LINKAGE: self.next()
        elif token.kind == "name" and self.is_label():
            self.next()
            self.expect(":")
            labels.append((self.label(token.text), len(out.body)))
        else: out.body.append(self.instruction())

    def branch_targets(self, out: Function, name: str) -> None:
        """`.branchtargets a, b, c;` after its label: where brx.idx may go."""
        self.next()
        targets = [self.label(self.next().text)]
        while self.take(","): targets.append(self.label(self.next().text))
        self.expect(";")
        out.tables[name] = tuple(targets)

    def is_label(self) -> bool:
        """Whether the name ahead is followed by a colon (and not by ::)."""
        token = self.peek()
        rest = SPACE.match(self.text, end := token.at + len(token.text))
        at = rest.end() if rest else end
        return self.text[at:at + 1] == ":" and self.text[at:at + 2] != "::"

    # **** names ****

    def declare_labels(self) -> None:
        """Finds the labels of the block that begins here, since branches may come before them."""
        depth = 0
        for found in LABEL.finditer(self.text, self.at):
            if found.group() == "{": depth += 1
            elif found.group() == "}":
                depth -= 1
                if depth < 0: return
            elif depth == 0 and (name := found.group(1)):
                self.scopes[-1].labels[name] = name + self.scopes[-1].suffix

    def label(self, name: str) -> str:
        """The unique name of a label seen from here."""
        for scope in reversed(self.scopes):
            if name in scope.labels: return scope.labels[name]
        raise self.fail(f"label {name} is not defined")

    def declare_variable(self, name: str) -> str:
        """Enters a variable in the scope that declares it."""
        if not self.scopes: return name
        self.scopes[-1].variables[name] = name + self.scopes[-1].suffix
        return self.scopes[-1].variables[name]

    def renamed(self, name: str) -> str:
        """The unique name of a variable seen from here."""
        return next((s.variables[name] for s in reversed(self.scopes) if name in s.variables), name)

    def register_declaration(self) -> None:
        """`.reg .b32 %r<301>, %x;`."""
        self.expect(".reg")
        kind, vector = self.next().text[1:], ""
        if kind in ("v2", "v4"): vector, kind = kind, self.next().text[1:]
        if kind not in WIDTHS or vector: raise self.fail(f"unknown register type .{vector or kind}")
        while True:
            name = self.next().text
            if self.take("<"):
                self.scopes[-1].ranges[name] = (kind, int(self.next().text))
                self.expect(">")
            else: self.scopes[-1].registers[name] = Register(name + self.scopes[-1].suffix, kind)
            if not self.take(","): break
        self.expect(";")

    def register(self, name: str) -> Register | None:
        """The register of a name seen from here."""
        stem = name.rstrip("0123456789")
        for scope in reversed(self.scopes):
            if name in scope.registers: return scope.registers[name]
            if stem in scope.ranges and stem != name and int(name[len(stem):]) < scope.ranges[stem][1]:
                scope.registers[name] = Register(name + scope.suffix, scope.ranges[stem][0])
                return scope.registers[name]
        return None

    # **** instructions ****

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
        mnemonic, *modifiers = found.group().split(".")
        operands = tuple(self.operands(mnemonic))
        # the line that lacks it, not the one where something else was found
        if not self.take(";"): raise self.fail(f"';' expected, {self.peek().text!r} found", line)
        return Instruction(mnemonic, tuple(modifiers), guard, negated, operands, line)

    def operands(self, mnemonic: str) -> Iterator[Operand]:
        """Operands up to the semicolon."""
        if self.peek().text == ";": return
        while True:
            yield self.operand(mnemonic in ("bra", "brx"))
            if not self.take(","): return

    def operand(self, target: bool = False) -> Operand:
        """One operand; `target` says that a bare name is a label."""
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
            return self.named(token, target)
        return Constants(self).immediate()

    def named(self, token: Token, target: bool) -> Operand:
        """A register (perhaps `%p|%q`), a special register, a label, or a variable with an offset."""
        if target and not token.text.startswith("%"): return Symbol(self.label(token.text))
        if (found := self.register(token.text)) is not None:
            return self.after_bar(found) if self.take("|") else found
        if token.text.startswith("%"): return Register(token.text, "special")
        name = self.renamed(token.text)
        return Symbol(name, self.index(name) + self.offset())

    def index(self, name: str) -> int:
        """The bytes that `[3]` after a variable's name stands for; 0 for nothing."""
        if name not in self.elements or not self.take("["): return 0
        before = int(self.constant()) * self.elements[name]
        self.expect("]")
        return before

    def after_bar(self, first: Register | Sink) -> Pair:
        """The second destination of `%p|%q`."""
        second = self.operand()
        if not isinstance(second, Register | Sink): raise self.fail("a predicate is expected after |")
        return Pair(first, second)

    def vector(self) -> Vector:
        """`{a, b, c, d}`."""
        self.expect("{")
        items: list[Operand] = []
        while not self.take("}"):
            items.append(self.operand())
            self.take(",")
        return Vector(tuple(items))

    def offset(self) -> int:
        """`+ 16`, `+-4`, or nothing."""
        return int(self.constant()) if self.take("+") else 0

    def address(self) -> Address:
        """`[%rd1 + 16]`, `[symbol]`, `[64]`, `[%tmap, {%x, %y}]`."""
        self.expect("[")
        token = self.peek()
        base: Register | Symbol | Immediate
        if token.kind == "name" and not is_constant(token.text):
            made = self.named(self.next(), False)
            if not isinstance(made, Register | Symbol): raise self.fail("an address is expected", token.line)
            base = made
        else: base = Constants(self).immediate()
        offset = self.offset()
        coordinates = self.vector() if self.take(",") else None
        self.expect("]")
        return Address(base, offset, coordinates)

    def constant(self) -> int | float:
        """A constant expression."""
        return Constants(self).value()
