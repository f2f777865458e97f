"""PTX text to a `PTXModule`: any PTX, ours, Triton's or nvcc's.

Protocol: `parse(text)` gives the module's targets, variables and functions. A function's body is flat: blocks
in braces are scopes for registers and labels, so names declared inside one are made unique (`name@2`), and
instructions and labels are what is left. Labels become positions in the instruction list. Instructions keep
their opcode as a mnemonic and a tuple of modifiers, whose order after the mnemonic means nothing in PTX, and
operands as the small classes of `syntax.py`.

Not interpreted: debug directives (.loc, .file, .section), linking (.visible, .weak) and pragmas. A
construct that is not known is a `PTXError` with line and text.
"""
from __future__ import annotations

import functools
import math
import re

from tinygrad_nv import collection
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.expressions import Constants, is_constant
from tinygrad_nv.ptx.operands import OperandParser, Scope
from tinygrad_nv.ptx.syntax import PTXFunction, PTXModule, Register, Variable
from tinygrad_nv.ptx.tokens import SPACE, Token, shorten

WIDTHS = {"pred": 1, "tf32": 32, "f16x2": 32, "bf16x2": 32, "bf16": 16, "b128": 128,
          **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
          **{f"f{bits}": bits for bits in (16, 32, 64)}}
LINKAGE = {".visible", ".extern", ".weak", ".common"}
SPACES = {".global", ".const", ".shared", ".local", ".param"}
MOST_VARIABLE_BYTES = 256 << 20  # limit: bytes of a variable in PTX
MOST_ALIGNMENT = 1 << 16         # limit: alignment of a variable in PTX, in bytes
MOST_INSTRUCTIONS = 1 << 17        # limit: instructions of a PTX function; the largest have 30,000
MOST_MODULE_INSTRUCTIONS = 1 << 18  # limit: instructions of all functions of a PTX text
IGNORED_LINES = {".loc", ".file", ".section"}


@functools.lru_cache(8)  # of some MB each
@collection.pause()
def parse(text: str) -> PTXModule:
    """The module of a PTX text; equal texts share it. Raises `PTXError` at the first line it does not
    understand."""
    return Parser(text).module()


class Parser(OperandParser):
    """Directives: modules, functions and what they declare."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.out = PTXModule()
        self.unique = self.instructions = 0

    # **** module ****

    def module(self) -> PTXModule:
        """Everything up to the end of the text."""
        while (token := self.next()).kind != "end":
            if token.text in IGNORED_LINES: self.skip_debug(token.text)
            elif token.text == ".version": self.out.version = self.version()
            elif token.text == ".target": self.out.target = self.target()
            elif token.text == ".address_size": self.out.address_size = self.size("an address size")
            elif token.text in LINKAGE: continue
            elif token.text in (".entry", ".func"): self.function(token.text == ".entry")
            elif token.text in SPACES: self.variable(token.text[1:], self.out.variables)
            elif token.text in (".pragma", ".alias"): self.skip_to_semicolon()
            else: raise self.fail(f"unexpected {token.text!r} at module level", token.line)
        if self.out.version == (0, 0): raise self.fail("no .version directive", 1)
        return self.out

    def version(self) -> tuple[int, int]:
        """`.version 8.7`."""
        token = self.next()
        if re.fullmatch(r"\d+\.\d+", token.text) is None:
            raise self.fail(f"a version such as 8.7 is expected, {token.text!r} found", token.line)
        major, _, minor = token.text.partition(".")
        return int(major), int(minor)

    def size(self, what: str) -> int:
        """A constant that counts something: not negative."""
        value = self.constant()
        if not isinstance(value, int) or not 0 <= value < 1 << 63: raise self.fail(f"{what} of {value}")
        return value

    def alignment(self) -> int:
        """Parses what follows .align: a power of two."""
        value = self.size("an alignment")
        if value == 0 or value & (value - 1): raise self.fail(f"an alignment of {value}, no power of two")
        if value > MOST_ALIGNMENT:
            raise self.fail(f"an alignment of {value} bytes; at most {MOST_ALIGNMENT} can be had")
        return value

    def target(self) -> str:
        """`.target sm_90a, texmode_independent`: the architecture."""
        name = self.next().text
        while self.take(","): self.next()
        return name

    def skip_debug(self, directive: str) -> None:
        """.section has a block; .loc and .file end with the line."""
        if directive != ".section": return self.skip_line()
        while self.next().text != "{":
            if self.peek().kind == "end": raise self.fail(".section has no block")
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
            if token.text == ".align": align = self.alignment()
            elif token.text in (".v2", ".v4"): vector = int(token.text[2])
            elif token.text == ".ptr": pass
            elif token.text == ".attribute": self.attribute()
            elif token.text[1:] in WIDTHS: kind = token.text[1:]
            elif token.text not in (*LINKAGE, *SPACES):
                raise self.fail(f"unknown directive {token.text} of a variable", token.line)
        self.check_declared(token, kind)
        while True:
            name, size = token.text, max(WIDTHS[kind] // 8, 1) * vector
            extents = self.extents()
            count = self.array_bytes(size, extents, name) // size
            data = self.initialiser(max(WIDTHS[kind] // 8, 1), kind) if self.take("=") else b""
            unsized = extents == [0] and not data
            if extents == [0]: count = len(data) // size
            if len(data) > size * count:
                raise self.fail(f"{len(data)} bytes for {name}, which has {size * count}")
            nbytes, unique = 0 if unsized else size * count, self.declare_variable(name)
            into[unique] = Variable(unique, space, kind, align or size, nbytes, data, token.line)
            self.elements[unique] = size
            if not self.take(","): break
            token = self.next()
        self.expect(";")

    def array_bytes(self, size: int, extents: list[int], name: str) -> int:
        """Returns the bytes of an array of elements of `size` bytes. Raises `PTXError` for more than can be
        had."""
        nbytes = math.prod((size, *extents))
        if nbytes > MOST_VARIABLE_BYTES:
            raise self.fail(f"{name} has {nbytes} bytes; a variable or parameter can have "
                            f"{MOST_VARIABLE_BYTES}")
        return nbytes

    def attribute(self) -> None:
        """`(.managed)`, or `(.unified(…))`, of which nothing follows here."""
        self.expect("(")
        depth = 1
        while depth:
            if (token := self.next()).kind == "end": raise self.fail("an attribute is not closed")
            depth += {"(": 1, ")": -1}.get(token.text, 0)

    def check_declared(self, token: Token, kind: str) -> None:
        """A declaration needs a type before its name."""
        if not kind: raise self.fail(f"{token.text or 'a variable'} is declared without a type", token.line)
        if token.kind != "name": raise self.fail(f"a name is expected, {token.text!r} found", token.line)

    def extents(self) -> list[int]:
        """`[4][8]`; `[]` is [0]."""
        out = []
        while self.take("["):
            if self.take("]"):
                out.append(0)
                continue
            out.append(self.size("an extent"))
            self.expect("]")
        return out

    def initialiser(self, item: int, kind: str) -> bytes:
        """Bytes of `{1, 2, {3}}`, a number, or a string. Addresses of other variables are not constant
        here."""
        if self.take("{"):
            self.depth = self.inside(self.depth)
            items = []
            while not self.take("}"):
                items.append(self.initialiser(item, kind))
                self.take(",")
            self.depth -= 1
            return b"".join(items)
        if self.peek().kind == "string":
            token = self.next()
            try: return token.text[1:-1].encode().decode("unicode_escape").encode("latin-1")
            except UnicodeError:
                raise self.fail("a string whose characters are no bytes", token.line) from None
        if not is_constant(self.peek().text): raise self.fail("the address of a variable as initial value")
        return Constants(self).bytes_of(item, kind)

    # **** functions ****

    def function(self, entry: bool) -> None:
        """`.entry name(params) directives { body }`, `.func (results) name (params) { body }`, or a
        declaration ended by a semicolon."""
        results: dict[str, Variable] = {}
        if not entry and self.take("("): self.parameters(results)
        name = self.next()
        out = PTXFunction(name.text, name.line, results=results)
        self.scopes = [Scope()]
        if self.take("("): out.parameter_bytes = self.parameters(out.parameters)
        while (token := self.next()).text != "{":
            if token.text == ";": return
            self.directive(token, out)
        for variable in (*results.values(), *out.parameters.values()):
            if variable.space != "reg": continue
            self.scopes[0].registers[variable.name] = Register(variable.name, variable.kind)
        self.body(out)
        (self.out.functions if entry else self.out.callees)[out.name] = out

    def parameters(self, into: dict[str, Variable]) -> int:
        """`.param .align 64 .b8 name[128]`, `.param .u64 .ptr .global .align 16 name` or `.reg .b32 %r`, up
        to the closing parenthesis; gives the bytes of all."""
        end = 0
        while not self.take(")"):
            space, kind, align = self.next().text[1:], "", 0
            if space not in ("param", "reg"): raise self.fail(f"parameters in state space .{space}")
            while (token := self.next()).kind == "directive":
                if token.text == ".align":
                    value = self.alignment()
                    if not kind: align = value  # after .ptr it is the pointee's
                elif token.text[1:] in WIDTHS: kind = token.text[1:]
            self.check_declared(token, kind)
            size = self.array_bytes(WIDTHS[kind] // 8, self.extents(), token.text)
            align = align or WIDTHS[kind] // 8
            offset = -(-end // max(align, 1)) * align
            into[token.text] = Variable(token.text, space, kind, align, size, b"", token.line, offset)
            end = offset + size
            self.take(",")
        return end

    def directive(self, token: Token, out: PTXFunction) -> None:
        """`.reqntid 128, 1, 1` and its kind."""
        if token.kind != "directive": raise self.fail(f"unexpected {token.text!r} before a body", token.line)
        values = []
        while self.peek().kind in ("int", "string"):
            word = self.next()
            values.append(Constants(self).integer(word.text) if word.kind == "int" else 0)
            if values[-1] >= 1 << 31: raise self.fail(f"{token.text} {values[-1]}; at most {(1 << 31) - 1}")
            if not self.take(","): break
        if token.text == ".pragma": self.take(";")
        extents = {".maxntid": 3, ".reqntid": 3, ".reqnctapercluster": 3, ".maxclusterrank": 1, ".maxnreg": 1,
                   ".minnctapersm": 1}
        if (most := extents.get(token.text)) and not (0 < len(values) <= most and min(values) > 0):
            raise self.fail(f"{token.text} with {len(values)} numbers: 1 to {most} from 1 on", token.line)
        out.directives[token.text[1:]] = tuple(values)

    def body(self, out: PTXFunction) -> None:
        """Statements up to the closing brace."""
        pending: list[tuple[str, int]] = []
        depth = 1
        self.find_labels()
        self.declare_labels()
        while depth:
            self.count_instructions(out)
            self.skip_space()
            if (made := self.line_instruction()) is not None:
                out.body.append(made)
                continue
            token = self.peek()
            if token.kind == "end": raise self.fail(f"function {out.name} is not closed")
            if token.text == "{":
                self.next()
                self.unique += 1
                self.scopes.append(Scope(f"@{self.unique}"))
                self.declare_labels()
                depth = self.inside(depth)
            elif token.text == "}":
                self.next()
                depth -= 1
                if depth: self.scopes.pop()
            else: self.statement(out, pending)
        self.instructions += len(out.body)
        for label, position in pending: out.labels[label] = position

    def count_instructions(self, out: PTXFunction) -> None:
        """Refuses a function that is too long before it is read to its end."""
        count = len(out.body)
        if count <= MOST_INSTRUCTIONS and self.instructions + count <= MOST_MODULE_INSTRUCTIONS: return
        raise PTXError(f"PTX line {self.line}: {count} instructions of function {shorten(out.name)}, "
                       f"{self.instructions + count} of all functions", self.line,
                       f"at most {MOST_INSTRUCTIONS} of one and {MOST_MODULE_INSTRUCTIONS} of all",
                       "use loops and calls, or split the module")

    def statement(self, out: PTXFunction, labels: list[tuple[str, int]]) -> None:
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

    def branch_targets(self, out: PTXFunction, name: str) -> None:
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

    def register_declaration(self) -> None:
        """`.reg .b32 %r<301>, %x;`."""
        self.expect(".reg")
        self.scopes[-1].operands.clear()
        kind, vector = self.next().text[1:], ""
        if kind in ("v2", "v4"): vector, kind = kind, self.next().text[1:]
        if kind not in WIDTHS or vector: raise self.fail(f"unknown register type .{vector or kind}")
        while True:
            name = self.next().text
            if self.take("<"):
                count = self.next()  # no expression: "<4>" has no comparison
                if count.kind != "int": raise self.fail(f"a number is expected, {count.text!r} found")
                self.scopes[-1].ranges[name] = (kind, Constants(self).integer(count.text))
                self.expect(">")
            else: self.scopes[-1].registers[name] = Register(name + self.scopes[-1].suffix, kind)
            if not self.take(","): break
        self.expect(";")
