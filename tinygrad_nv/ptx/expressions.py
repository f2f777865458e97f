"""Constant expressions of PTX: C's operators on 64-bit integers, and floats by their digits or their bits.

Protocol: `Constants(tokens)` reads from a `TokenReader`, by precedence climbing.
Integers are signed 64-bit unless written with U or too large for that (PTX ISA, Integer Constant Expression
Evaluation); they wrap, and shifts of negative numbers are arithmetic.
"""
from __future__ import annotations

import operator
import struct
from collections.abc import Callable

from tinygrad_nv.ptx.syntax import Immediate
from tinygrad_nv.ptx.tokens import Token, TokenReader, shorten

LEVELS = ("?", "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %")
PRECEDENCE = {operator: level for level, operators in enumerate(LEVELS) for operator in operators.split()}
UNSIGNED = ("|", "^", "&", "/", "%", ">>")  # may give what only an unsigned 64-bit integer holds
FLOATS: dict[str, Callable[[float, float], float | bool]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne}


def quotient(x: int, y: int) -> int:
    """C's division: towards zero."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


INTEGERS: dict[str, Callable[[int, int], int]] = {
    "||": lambda x, y: int(bool(x or y)), "&&": lambda x, y: int(bool(x and y)), "|": operator.or_,
    "^": operator.xor, "&": operator.and_, "==": lambda x, y: int(x == y), "!=": lambda x, y: int(x != y),
    "<": lambda x, y: int(x < y), "<=": lambda x, y: int(x <= y), ">": lambda x, y: int(x > y),
    ">=": lambda x, y: int(x >= y), "<<": lambda x, y: x << (y & 63), ">>": lambda x, y: x >> (y & 63),
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": quotient,
    "%": lambda x, y: x - quotient(x, y) * y}
NAMED = {"WARP_SZ": 32}


def is_constant(text: str) -> bool:
    """Whether a token can begin a constant."""
    return text in NAMED or text[:1].isdigit() or text in ("-", "+", "~", "!", "(")


def wrap(value: int) -> int:
    """An integer as PTX keeps it: signed 64-bit, or unsigned above that."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


class Constants:
    """Evaluates the constant expression that comes next."""

    def __init__(self, tokens: TokenReader) -> None:
        self.tokens, self.depth = tokens, 0

    def value(self) -> int | float:
        """Its value."""
        return self.immediate().value

    def immediate(self) -> Immediate:
        """Its value, with the bits of a hexadecimal float."""
        return self.binary(0)

    def bytes_of(self, item: int, kind: str) -> bytes:
        """Its value as an initialiser of `item` bytes."""
        made = self.immediate()
        if kind.startswith(("f", "bf")):
            if made.float_bits == 32 and item == 4: return struct.pack("<f", made.value)
            try: return struct.pack({2: "<e", 4: "<f", 8: "<d"}[item], float(made.value))
            except (KeyError, OverflowError):
                raise self.tokens.fail(f"{shorten(str(made.value))} as an initial value of .{kind}") from None
        return (self.whole(made) & ((1 << 8 * item) - 1)).to_bytes(item, "little")

    def binary(self, least: int) -> Immediate:
        """An expression whose operators bind at least as tightly as `least`."""
        self.depth = self.tokens.inside(self.depth)
        left = self.unary()
        while (sign := self.tokens.peek().text) in PRECEDENCE and PRECEDENCE[sign] >= least:
            self.tokens.next()
            if sign == "?":
                yes = self.binary(0)
                if not self.tokens.take(":"): raise self.tokens.fail("':' expected in a constant expression")
                no = self.binary(0)
                left = yes if left.value else no
            else: left = self.apply(sign, left, self.binary(PRECEDENCE[sign] + 1))
        self.depth -= 1
        return left

    def unary(self) -> Immediate:
        """A sign, a complement, a cast, parentheses, or a number."""
        self.depth = self.tokens.inside(self.depth)
        made = self.prefix(self.tokens.next())
        self.depth -= 1
        return made

    def prefix(self, token: Token) -> Immediate:
        """Returns the constant that a token begins."""
        if token.text == "(": return self.parenthesis()
        if token.text == "-":
            made = self.unary()
            if not made.float_bits and isinstance(made.value, int): return Immediate(wrap(-made.value))
            return Immediate(-made.value, made.float_bits)
        if token.text == "+": return self.unary()
        if token.text == "~": return Immediate(wrap(~self.whole(self.unary())))
        if token.text == "!": return Immediate(int(not self.unary().value))
        if token.text in NAMED: return Immediate(NAMED[token.text])
        if token.kind == "int": return Immediate(self.integer(token.text))
        if token.kind == "float": return self.number(token.text)
        raise self.tokens.fail(f"a constant is expected, {token.text!r} found", token.line)

    def parenthesis(self) -> Immediate:
        """`(expression)`, or the casts (.s64) and (.u64)."""
        if (cast := self.tokens.peek().text) in (".s64", ".u64"):
            self.tokens.next()
            if not self.tokens.take(")"): raise self.tokens.fail("')' expected after a cast")
            value = self.whole(self.unary())
            return Immediate(wrap(value) if cast == ".s64" else value & ((1 << 64) - 1))
        made = self.binary(0)
        if not self.tokens.take(")"): raise self.tokens.fail("')' expected in a constant expression")
        return made

    def whole(self, made: Immediate) -> int:
        """An integer, or a float cut to one. Raises `PTXError` for NaN and infinity."""
        try: return int(made.value)
        except (OverflowError, ValueError): raise self.tokens.fail(f"{made.value} as an integer") from None

    def integer(self, text: str) -> int:
        """Decimal, hexadecimal, octal (leading 0) or binary."""
        digits = text.rstrip("U")
        octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
        try: return int(digits, 8 if octal else 0)
        except ValueError: raise self.tokens.fail(f"{text} is not a number") from None

    def number(self, text: str) -> Immediate:
        """`0f3F800000`, `0d3FF0000000000000` or `1.5`."""
        if text[1] in "fF": return Immediate(struct.unpack(">f", bytes.fromhex(text[2:]))[0], 32)
        if text[1] in "dD": return Immediate(struct.unpack(">d", bytes.fromhex(text[2:]))[0], 64)
        return Immediate(float(text), 64)

    def apply(self, sign: str, a: Immediate, b: Immediate) -> Immediate:
        """`a sign b`, of integers or of floats."""
        x, y = a.value, b.value
        if sign in ("/", "%") and y == 0: raise self.tokens.fail("division by zero in a constant expression")
        if isinstance(x, int) and isinstance(y, int):
            made = INTEGERS[sign](x, y)
            unsigned = x >= 0 and y >= 0 and made < 1 << 64 and sign in UNSIGNED
            return Immediate(made if unsigned else wrap(made))
        if sign not in FLOATS: raise self.tokens.fail(f"{sign} of floats in a constant expression")
        try: result = FLOATS[sign](x, y)
        except OverflowError: raise self.tokens.fail("an integer that no float holds") from None
        return Immediate(int(result)) if isinstance(result, bool) else Immediate(result, 64)
