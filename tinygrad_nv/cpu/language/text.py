"""Lines of C while they are written: names, braces, loops, arrays on the stack.

Protocol: `memo` has what was computed within the innermost braces, `written_inside` the values that have an
array there alone: behind the braces they have the form again that they had before.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tinygrad.dtype import DType

from tinygrad_nv.cpu.language.views import View, array, vector
from tinygrad_nv.tile.language.ir import Op, Value

Form = str | View | Op
UNROLLED = 4         # vectors of a row


class Text:
    """Lines, of which `stack_bytes` are arrays. `lanes` of a vector; `dots`: a dot may read an array."""

    def __init__(self, lanes: int, dots: bool) -> None:
        self.lanes, self.dots = lanes, dots
        self.lines: list[str] = []
        self.forms: dict[Value, Form] = {}
        self.stack_bytes = self.count = 0
        self.memo: dict[Any, str] = {}
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

    def variable(self, text: str, dtype: DType) -> str:
        """A C variable of a vector."""
        name = self.name()
        self.line(f"const {vector(dtype)} {name} = {text};")
        return name

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> View:
        """An array for a tile."""
        view, declared, nbytes = array(self.name("t"), dtype, shape, self.lanes, self.dots)
        self.stack_bytes += nbytes
        self.line(declared)
        return view

    @contextlib.contextmanager
    def loops(self, shape: Sequence[int]) -> Iterator[tuple[list[str], str]]:
        """Loops over outer indices and over vectors of the last axis: their variables."""
        with self.outer_loops(shape[:-1]) as outer:
            column = self.name("j")
            if shape[-1] <= self.lanes:
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
            for extent in shape:
                names.append(name := self.name("i"))
                stack.enter_context(self.braces(f"for (s64 {name} = 0; {name} < {extent}; {name}++)"))
            yield names
