"""Words of PTX text, and a cursor over them.

Protocol: `TokenReader.peek` and `next` give tokens, comments and blanks skipped; `fail` makes the error for a
line. Opcodes are no tokens (`mma.sync.aligned.m16n8k16` would be many), so a parser reads them from `text`
at `at`, after setting `ahead` to None.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from tinygrad_nv.errors import PTXError

TOKEN = re.compile(r"""
    (?P<string>"(?:[^"\\]++|\\.)*+")
  | (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
  | (?P<int>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<name>(?:%[$_a-zA-Z]|[$_a-zA-Z])[\w$]*(?:\.[xyzw](?![\w.]))?)
  | (?P<directive>\.[a-zA-Z_][\w]*)
  | (?P<scope>::)
  | (?P<op><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^~!?:<>=(){}\[\],;@])
""", re.X | re.A)
MOST_BYTES = 8 << 20        # limit: characters of a PTX text; the largest kernels have 3 MB
MOST_DIGITS = 400           # limit: characters of a number in PTX
MOST_DEPTH = 100            # limit: braces, parentheses and signs in each other, in PTX
SHOWN = 200                 # characters of a line in an error
SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.S)


def shorten(text: str) -> str:
    """The text, or its first `SHOWN` characters."""
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


@dataclass(frozen=True)
class Token:
    """A word of the text: its kind (a group of `TOKEN`), itself, where it begins, and its line."""
    kind: str
    text: str
    at: int
    line: int


class TokenReader:
    """A place in the text, and at most one token read ahead."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_BYTES:
            raise PTXError(f"a PTX text of {len(text)} characters", 0, f"at most {MOST_BYTES}",
                           "leave out comments and debug sections, or split the module")
        self.text, self.at, self.line = text, 0, 1
        self.ahead: Token | None = None

    def fail(self, what: str, line: int | None = None) -> PTXError:
        """An error at a line, with the line."""
        number = self.line if line is None else line
        begin = 0
        for _ in range(number - 1): begin = self.text.find("\n", begin) + 1 or begin
        words = shorten(self.text[begin:begin + SHOWN + 1].lstrip().partition("\n")[0].rstrip())
        return PTXError(f"PTX line {number}: {shorten(what)}\n    {words}", number)

    def skip_space(self) -> None:
        """Moves past blanks and comments, counting lines."""
        if (space := SPACE.match(self.text, self.at)) is not None:
            self.line += self.text.count("\n", self.at, space.end())
            self.at = space.end()

    def peek(self) -> Token:
        """The next token, kind "end" at the end."""
        if self.ahead is None:
            self.skip_space()
            if self.at >= len(self.text): self.ahead = Token("end", "", self.at, self.line)
            elif (found := TOKEN.match(self.text, self.at)) is None:
                raise self.fail(f"unexpected {self.text[self.at]!r}")
            else: self.ahead = Token(str(found.lastgroup), found.group(), self.at, self.line)
        return self.ahead

    def next(self) -> Token:
        """Takes the next token."""
        token = self.peek()
        if len(token.text) > MOST_DIGITS and token.kind in ("int", "float"):
            raise self.fail(f"a number of {len(token.text)} characters, more than {MOST_DIGITS}", token.line)
        self.at, self.ahead = token.at + len(token.text), None
        return token

    def take(self, text: str) -> bool:
        """Takes the next token if it is `text`."""
        if self.peek().text != text: return False
        self.next()
        return True

    def expect(self, text: str) -> Token:
        """Takes the next token, which must be `text`."""
        token = self.next()
        if token.text != text: raise self.fail(f"{text!r} expected, {token.text!r} found", token.line)
        return token

    def inside(self, depth: int) -> int:
        """One level deeper than `depth`. Raises `PTXError` where that is too deep."""
        if depth >= MOST_DEPTH: raise self.fail(f"nested more than {MOST_DEPTH} deep")
        return depth + 1

    def skip_line(self) -> None:
        """Moves past the rest of the line: debug directives end there, without a semicolon."""
        self.ahead = None
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end
