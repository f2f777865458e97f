"""Columns that are computed together: values of one loop, elements in turn, computations that are left out.

Protocol: `write_together` writes several values of one shape in one loop over vectors, all of a place before
any. In such a loop vectors of neighbouring columns are emitted beside each other (`beside`): what two of them
are made of, as `interleave` is of one vector of each operand, is computed once, and a `where_needed` has one
branch for all.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.language.emitter import Emitter
from tinygrad_nv.cpu.language.text import UNROLLED
from tinygrad_nv.cpu.language.views import View, vector
from tinygrad_nv.tile.language.ir import Op, Value

PAIR = 2


class Columns(Emitter):
    """Emits values of neighbouring columns. `beside`: those of a loop, in turn; `half`: where operands of an
    interleave are for each pair of them."""
    beside: tuple[str, ...] = ()
    half: tuple[str, ...] = ()

    def write_together(self, moved: Sequence[tuple[View, Value]]) -> None:
        """Writes values to arrays of one shape."""
        *rest, size = moved[0][0].shape
        with self.outer_loops(rest) as outer:
            step = PAIR * self.lanes
            if size <= UNROLLED * self.lanes:
                with self.braces(""): self._write_columns(moved, outer, 0, range(0, size, self.lanes))
                return
            column, count = self.name("j"), PAIR if size % step == 0 else 1
            with self.braces(f"for (s64 {column} = 0; {column} < {size}; {column} += {count * self.lanes})"):
                self._write_columns(moved, outer, column, range(0, count * self.lanes, self.lanes))

    def _write_columns(self, moved: Sequence[tuple[View, Value]], outer: Sequence[str], first: str | int,
                       places: range) -> None:
        self.beside = tuple(f"({first} + {at})" if first else str(at) for at in places)
        self.half = tuple(f"({first} / 2 + {at})" if first else str(at) for at in places[:len(places) // 2])
        made = [[self.vector(value, outer, column) for column in self.beside] for _, value in moved]
        for (target, _), vectors in zip(moved, made, strict=True):
            for column, each in zip(self.beside, vectors, strict=True):
                self.line(target.write(outer, column, each))
        self.beside = self.half = ()

    def is_interleaved(self, value: Value) -> bool:
        """Whether a value's vectors are made in pairs."""
        form = self.forms[value]
        return isinstance(form, Op) and form.name == "interleave"

    def each_column(self, half: str, size: int) -> Iterator[str]:
        """The columns of both vectors that are made of those at `half`, of rows of `size`: where the second
        is beyond the end, inside of a branch."""
        self.half, self.beside = (half,), (f"(2 * ({half}))", f"(2 * ({half}) + W)")
        yield self.beside[0]
        if size // PAIR % self.lanes == 0: yield self.beside[1]
        else:
            known = self.memo
            with self.braces(f"if ({self.beside[1]} < {size})"):
                self.memo = dict(known)
                yield self.beside[1]
        self.half = self.beside = ()

    def place(self, op: Op) -> None:
        if op.name == "where_needed": self._give_forms(op)
        super().place(op)

    def _give_forms(self, op: Op) -> None:
        """Gives the values of a computation their forms: all of them are computed where they are used."""
        for inner in op.regions[0].ops:
            if inner.name == "constant": getattr(self, "do_constant")(inner)  # noqa: B009
            elif not inner.result.shape: self.place(inner)
            else: self.forms[inner.result] = inner

    def _lazy_interleave(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        kind, pair = vector(op.result.dtype), f"(({column}) / 2)"
        if uniform:
            one, other = (self.vector(each, outer, pair, True) for each in op.operands)
            return f"({column}) & 1 ? {other} : {one}"
        number, at = 0, pair
        if column in self.beside:
            number = self.beside.index(column)
            if number // PAIR < len(self.half): at = self.half[number // PAIR]
        a, b = (self.vector(each, outer, at) for each in op.operands)
        return f"({kind}){'highs' if at != pair and number % PAIR else 'lows'}_((vi){a}, (vi){b})"

    def _lazy_deinterleave(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        source, odd = op.operands[0], op.attributes["odd"]
        if uniform: return self.vector(source, outer, f"(2 * ({column}) + {odd})", True)
        if op.result.shape[-1] % self.lanes: self.view(source)     # whose rows have room for a vector more
        pair = [self.vector(source, outer, f"(2 * ({column}){more})") for more in ("", " + W")]
        places = map(str, range(odd, PAIR * self.lanes, PAIR))
        return f"__builtin_shufflevector({', '.join([*pair, *places])})"

    def _lazy_where_needed(self, op: Op, outer: Sequence[str], column: str, uniform: bool) -> str:
        result, (test, other) = op.result, op.operands
        choose = "pick" if dtypes.is_float(result.dtype) else "pick_i"
        columns = self.beside if column in self.beside else (column,)
        tests = [self.vector(test, outer, each, uniform) for each in columns]
        names = [self.name() for _ in columns]
        for name, each in zip(names, columns, strict=True):
            self.line(f"{vector(result.dtype)} {name} = {self.vector(other, outer, each, uniform)};")
        known = self.memo
        with self.braces(f"if (any_({' | '.join(tests)}))"):
            self.memo = dict(known)     # what is computed ahead of a branch is there in it
            made = [self.vector(op.regions[0].yields[0], outer, each, uniform) for each in columns]
            for name, holds, each in zip(names, tests, made, strict=True):
                self.line(f"{name} = {choose}({holds}, {each}, {name});")
        self.memo.update({(result, tuple(outer), each, uniform): name
                          for each, name in zip(columns, names, strict=True)})
        return names[columns.index(column)]
