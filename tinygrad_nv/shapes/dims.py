"""Dimensions with names: polynomials of symbols with whole coefficients, and quotients of such.

Protocol. `parse("3H*D_h")` is a `Dim`. Equal polynomials are equal Dims, whatever the order they are written
in: "H*D_h*3" is the same. A Dim has `symbols`; `value(sizes)` is its number where all of them are known, and
`solve(number, sizes)` the one symbol that is not. A quotient "D//2" rounds down, as Python's does, and is
never solved for D: two values of D give the same.

    dim  := term (("+" | "-") term)*
    term := factor (("*" | "//") factor | name)*        3H is 3 * H
    factor := number | name | "(" dim ")" | "-" factor
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from tinygrad_nv.errors import ShapeError

TOKEN = re.compile(r"\s*(\d+|[^\W\d]\w*|//|[-+*()])")
WRITTEN = '"B", "S+1", "3H*D_h", "D//2", a whole number, or "..." for leading dimensions'


@dataclass(frozen=True)
class Quotient:
    """`over // under`, rounded down."""
    over: Dim
    under: Dim

    def value(self, sizes: Mapping[str, int]) -> int | None:
        """Its number; None where a name is not known, or the divisor is 0."""
        over, under = self.over.value(sizes), self.under.value(sizes)
        return None if over is None or not under else over // under

    def __str__(self) -> str:
        over, under = str(self.over), str(self.under)
        plain = len(self.over.terms) == 1 and "//" not in over and not over.startswith("-")
        return f"{over if plain else f'({over})'}//{under if under.isalnum() else f'({under})'}"


Atom = str | Quotient
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Dim:
    """A sum: `terms` are products of atoms with their coefficients, none of them 0, in the order of their
    names."""
    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of(terms: Iterable[tuple[Monomial, int]]) -> Dim:
        """The sum of terms in any order."""
        sums: dict[Monomial, int] = {}
        for atoms, number in terms:
            key = tuple(sorted(atoms, key=str))
            sums[key] = sums.get(key, 0) + number
        kept = ((atoms, number) for atoms, number in sums.items() if number)
        return Dim(tuple(sorted(kept, key=lambda term: (-len(term[0]), *map(str, term[0])))))

    @staticmethod
    def number(value: int) -> Dim:
        """A constant."""
        return Dim.of([((), value)])

    @staticmethod
    def symbol(name: str) -> Dim:
        """A name alone."""
        return Dim.of([((name,), 1)])

    @cached_property
    def name(self) -> str | None:
        """The name that it is, if it is one alone."""
        if len(self.terms) != 1 or self.terms[0][1] != 1 or len(self.terms[0][0]) != 1: return None
        atom = self.terms[0][0][0]
        return atom if isinstance(atom, str) else None

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names in it, in the order of terms."""
        found = dict[str, None]()
        for atoms, _ in self.terms:
            for atom in atoms:
                names = (atom,) if isinstance(atom, str) else (*atom.over.symbols, *atom.under.symbols)
                found.update(dict.fromkeys(names))
        return tuple(found)

    @property
    def constant(self) -> int | None:
        """The number that it is, if it has no symbol."""
        if not self.terms: return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def __add__(self, other: Dim) -> Dim: return Dim.of((*self.terms, *other.terms))

    def __sub__(self, other: Dim) -> Dim: return self + other * Dim.number(-1)

    def __mul__(self, other: Dim) -> Dim:
        return Dim.of(((*a, *b), m * n) for a, m in self.terms for b, n in other.terms)

    def __floordiv__(self, other: Dim) -> Dim:
        if other.constant == 0: raise ZeroDivisionError
        if self.constant is not None and other.constant is not None:
            return Dim.number(self.constant // other.constant)
        if (exact := _exact(self, other)) is not None: return exact
        return Dim.of([((Quotient(self, other),), 1)])

    def substitute(self, sizes: Mapping[str, int]) -> Dim:
        """Returns the dimension with numbers in the place of names that are known. Raises
        ZeroDivisionError."""
        total = Dim(())
        for atoms, number in self.terms:
            product = Dim.number(number)
            for atom in atoms: product = product * _substitute(atom, sizes)
            total = total + product
        return total

    def value(self, sizes: Mapping[str, int]) -> int | None:
        """Its number; None where a name is not known, or a divisor is 0."""
        total = 0
        for atoms, number in self.terms:
            for atom in atoms:
                size = sizes.get(atom) if isinstance(atom, str) else atom.value(sizes)
                if size is None: return None
                number *= size
            total += number
        return total

    def solve(self, number: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
        """Returns the one name that is not known, and its size where this dimension is `number`; None where
        that does not follow. Raises `ArithmeticError` where no size gives `number`."""
        if self.name is not None:   # most of them
            if number < 0: raise ArithmeticError
            return None if self.name in sizes else (self.name, number)
        left = self.substitute(sizes)
        if len(left.symbols) != 1: return None
        name, = left.symbols
        powers = {len(atoms): each for atoms, each in left.terms}
        if any(atom != name for atoms, _ in left.terms for atom in atoms): return None
        rest = number - powers.pop(0, 0)
        if len(powers) != 1: return None
        (degree, factor), = powers.items()
        if rest % factor or rest // factor < 0: raise ArithmeticError
        root = round((rest // factor) ** (1 / degree))
        if root ** degree != rest // factor: raise ArithmeticError
        return name, root

    def __str__(self) -> str: return self.to_text()

    def to_text(self, order: Callable[[str], int] | None = None) -> str:
        """Returns the dimension as it would be written, names of a product in an order."""
        out = ""
        for atoms, number in self.terms:
            size = abs(number)
            names = [str(each) if isinstance(each, str) or len(atoms) == number == 1 else f"({each})"
                     for each in atoms]
            if order: names.sort(key=order)
            glued = bool(names) and not names[0].startswith("(")
            head = "" if size == 1 and names else str(size) if glued or not names else f"{size}*"
            sign = "-" if number < 0 else "+" if out else ""
            out += f"{sign}{head}{'*'.join(names)}"
        return out or "0"


def _substitute(atom: Atom, sizes: Mapping[str, int]) -> Dim:
    if isinstance(atom, str): return Dim.number(sizes[atom]) if atom in sizes else Dim.symbol(atom)
    return atom.over.substitute(sizes) // atom.under.substitute(sizes)


def _exact(over: Dim, under: Dim) -> Dim | None:
    """over / under where a single term divides every term of `over`."""
    if len(under.terms) != 1: return None
    (atoms, number), = under.terms
    terms = list[tuple[Monomial, int]]()
    for own, size in over.terms:
        left = list(own)
        for atom in atoms:
            if atom not in left: return None
            left.remove(atom)
        if size % number: return None
        terms.append((tuple(left), size // number))
    return Dim.of(terms)


# **** reading ****

def parse(text: str) -> Dim:
    """The dimension that a text states. Raises `ShapeError`."""
    reader = _Reader(text)
    try: made = reader.sum()
    except ZeroDivisionError: raise reader.refusal("a division by 0") from None
    if reader.peek() is not None: raise reader.refusal(f"{reader.peek()!r} where it should end")
    return made


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.tokens, self.glued = list[str](), list[bool]()     # glued: without a space before it
        place = 0
        while place < len(text.rstrip()):
            if (found := TOKEN.match(text, place)) is None:
                raise self.refusal(f"{text[place:].strip()[:1]!r}" + " (// divides)" * (text[place] == "/"))
            self.tokens.append(found[1])
            self.glued.append(found.start(1) == place)
            place = found.end()

    def refusal(self, what: str) -> ShapeError:
        return ShapeError(f"the dimension {self.text!r} has {what}", WRITTEN, "one dimension for each string")

    def peek(self) -> str | None: return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        if (token := self.peek()) is None: raise self.refusal("no end" if self.tokens else "nothing in it")
        self.at += 1
        return token

    def sum(self) -> Dim:
        total = self.product()
        while self.peek() in ("+", "-"):
            total = total + self.product() if self.take() == "+" else total - self.product()
        return total

    def product(self) -> Dim:
        total = self.factor()
        while (token := self.peek()) is not None:
            if token in ("*", "//"):
                self.take()
                total = total * self.factor() if token == "*" else total // self.factor()
            elif self.tokens[self.at - 1].isdigit() and self.glued[self.at] and \
                    (token.isidentifier() or token == "("):
                total = total * self.factor()
            else: break
        return total

    def factor(self) -> Dim:
        token = self.take()
        if token.isdigit(): return Dim.number(int(token))
        if token.isidentifier(): return Dim.symbol(token)
        if token == "-": return self.factor() * Dim.number(-1)
        if token != "(": raise self.refusal(f"{token!r} where a name or a number should be")
        inner = self.sum()
        if self.take() != ")": raise self.refusal("a parenthesis that is not closed")
        return inner
