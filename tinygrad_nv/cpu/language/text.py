"""Lines of C while they are written: names, braces, loops, arrays on the stack.

Protocol: `memo` has what was computed within the innermost braces, `written_inside` the values that have an
array there alone: behind the braces they have the form again that they had before. Where `strip` is not None
arrays are of a strip's rows, and loops over the first axis of a tile go through these (strips.py).
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType

from tinygrad_nv.cpu.language.hidden import Hidden
from tinygrad_nv.cpu.language.strips import Strips
from tinygrad_nv.cpu.language.views import View, array, vector
from tinygrad_nv.tile.language.ir import Op, Value

Form = str | View | Op
UNROLLED = 4         # vectors of a row


@dataclass(frozen=True)
class Outside:
    """Lines ahead of a loop: all values that it makes, and those that have an array in the braces around
    it."""
    lines: list[str]
    made: set[Value]
    written_inside: list[tuple[Value, Form]]


class Text:
    """Lines, of which `stack_bytes` are arrays. `lanes` of a vector; `dots`: a dot may read an array."""

    def __init__(self, lanes: int, dots: bool) -> None:
        self.lanes, self.dots = lanes, dots
        self.lines: list[str] = []
        self.forms: dict[Value, Form] = {}
        self.stack_bytes = self.count = 0
        self.memo: dict[Any, str] = {}
        self.strip: Strips | None = None
        self.hidden: Hidden | None = None    # columns of the strip from `low` up to `high`, in C
        self.low = self.high = ""
        self.outside: Outside | None = None
        self.written_inside: list[tuple[Value, Form]] = []   # values that the innermost braces have as arrays

    def name(self, prefix: str = "x") -> str:
        """A new name."""
        self.count += 1
        return f"{prefix}{self.count}"

    def line(self, text: str) -> None:
        """Appends a line."""
        self.lines.append(text)

    @contextlib.contextmanager
    def braces(self, head: str) -> Iterator[None]:
        """Lines inside the block are inside of `head { }`."""
        outer, before = self.memo, self.written_inside
        self.memo, self.written_inside = {}, []
        self.line(f"{head} {{")
        try: yield
        finally:
            self.line("}")
            self.forms.update(self.written_inside)   # their arrays end here
            self.memo, self.written_inside = outer, before

    @contextlib.contextmanager
    def ahead(self, value: Value) -> Iterator[None]:
        """Lines inside the block, which read a value, come ahead of the innermost loop where that does not
        make it."""
        loop = self.outside
        if loop is None or value in loop.made:
            yield
            return
        before = self.lines, self.memo, self.written_inside
        self.lines, self.memo, self.written_inside = loop.lines, {}, loop.written_inside
        try:
            with self.in_strip(None): yield
        finally: self.lines, self.memo, self.written_inside = before

    def variable(self, text: str, dtype: DType) -> str:
        """A C variable of a vector."""
        name = self.name()
        self.line(f"const {vector(dtype)} {name} = {text};")
        return name

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> View:
        """An array for a tile."""
        strip = self._strip_of(shape)
        held = (strip.count, *shape[1:]) if strip else tuple(shape)
        view, declared, nbytes = array(self.name("t"), dtype, held, self.lanes, self.dots)
        self.stack_bytes += nbytes
        self.line(declared)
        return replace(view, shape=tuple(shape), first=strip.row) if strip else view

    def _strip_of(self, shape: Sequence[int]) -> Strips | None:
        """The strip whose rows a tile has."""
        return self.strip if self.strip and shape[0] == self.strip.rows else None

    @contextlib.contextmanager
    def in_strip(self, strip: Strips | None) -> Iterator[None]:
        """Lines inside the block are of a strip, or, of None, of whole tiles."""
        before, self.strip = self.strip, strip
        try: yield
        finally: self.strip = before

    def is_limited(self, value: Value) -> bool:
        """Whether some columns of a value are not there."""
        return self.strip is not None and self.hidden is not None and value in self.hidden.values

    @contextlib.contextmanager
    def loops(self, shape: Sequence[int], limited: bool = False) -> Iterator[tuple[list[str], str]]:
        """Loops over outer indices and over vectors of the last axis, of the columns that a strip has where
        it is `limited`: their variables."""
        with self.outer_loops(shape[:-1]) as outer:
            column = self.name("j")
            if len(shape) == 1 and (strip := self._strip_of(shape)):
                with self.braces(f"for (s64 {column} = {strip.row}; {column} < {strip.end}; {column} += W)"):
                    yield outer, column
            elif limited:
                with self.braces(f"for (s64 {column} = {self.low}; {column} < {self.high}; {column} += W)"):
                    yield outer, column
            elif shape[-1] <= self.lanes:
                with self.braces(""): yield outer, "0"
            else:
                # the end of a short row is known where the loop is unrolled
                if shape[-1] % self.lanes and shape[-1] < UNROLLED * self.lanes:
                    self.line('_Pragma("clang loop unroll(full)")')
                head = f"for (s64 {column} = 0; {column} < {shape[-1]}; {column} += W)"
                with self.braces(head): yield outer, column

    @contextlib.contextmanager
    def outer_loops(self, shape: Sequence[int]) -> Iterator[list[str]]:
        """Loops over all indices of some axes."""
        with contextlib.ExitStack() as stack:
            names = []
            for axis, extent in enumerate(shape):
                names.append(name := self.name("i"))
                strip = self._strip_of(shape) if axis == 0 else None
                first, end = (strip.row, strip.end) if strip else ("0", extent)
                stack.enter_context(self.braces(f"for (s64 {name} = {first}; {name} < {end}; {name}++)"))
            yield names
