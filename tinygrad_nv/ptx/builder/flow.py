"""Structured control flow of a kernel: if, else, loops, comments.

Protocol: context managers. What is written inside `with` is indented in the text; labels are `$endif_3`,
`$loop_1` and their kind. Branches are not marked uniform: ptxas finds out.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tinygrad_nv.ptx.builder.core import CodeBlock, Core
from tinygrad_nv.ptx.builder.values import Label, Number, Value


class Flow(Core):
    """Control flow over `Core`."""

    def comment(self, text: str) -> nullcontext[None]:
        """A comment; as `with k.comment("load A")` it heads the instructions inside."""
        self.current.lines.append(f"// {text}")
        return nullcontext()

    def _label(self, what: str) -> tuple[int, Label]:
        self.labels += 1
        return self.labels, Label(f"${what}_{self.labels}")

    def _mark(self, label: Label) -> None: self.current.lines.append(f"{label.name}:")

    @contextmanager
    def _indent(self) -> Iterator[None]:
        inner, outer = CodeBlock(), self.current
        outer.lines.append(inner)
        self.current = inner
        try: yield
        finally: self.current = outer

    def _predicate(self, value: Any) -> Value:
        if isinstance(value, Value) and value.kind == "pred": return value
        self.fail(f"{value} is no predicate", "a comparison of registers", "compare: a < b")

    @contextmanager
    def if_(self, predicate: Value) -> Iterator[None]:
        """Runs the block in threads whose predicate holds."""
        p = self._predicate(predicate)
        _, end = self._label("endif")
        self.emit("bra", end, guard=~p)
        with self._indent(): yield
        self._mark(end)
        self.open_if = (self.current, len(self.current.lines), end)

    @contextmanager
    def else_(self) -> Iterator[None]:
        """Runs the block in the other threads; directly after an `if_`."""
        if self.open_if is None or self.open_if[:2] != (self.current, len(self.current.lines)):
            self.fail("else_ without an if_ before it", "with k.if_(p): … directly above", "move it there")
        start, (_, end) = self.open_if[2], self._label("endelse")
        self.current.lines.pop()  # the label: the block above jumps past this one first
        self.emit("bra", end)
        self._mark(start)
        with self._indent(): yield
        self._mark(end)

    @contextmanager
    def loop(self, start: Number, stop: Number, step: Number = 1, kind: str = "",
             name: str = "") -> Iterator[Value]:
        """`for i in range(start, stop, step)` with a positive step; `i` has the type of `stop` or `start`, or
        is s32."""
        typed = next((v.kind for v in (stop, start) if isinstance(v, Value)), "s32")
        if isinstance(step, int) and step <= 0: self.fail(f"step {step}", "a positive step", "count upwards")
        i = self.reg(kind or typed, start, name)
        number, begin = self._label("loop")
        end = Label(f"$endloop_{number}")
        if not (isinstance(start, int) and isinstance(stop, int) and start < stop):
            self.emit("bra", end, guard=i >= stop)
        self._mark(begin)
        with self._inside(end): yield Value(self, i.name, i.kind, fixed=True)
        i += step
        self.emit("bra", begin, guard=i < stop)
        self._mark(end)

    @contextmanager
    def while_(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Runs the block while the condition, whose instructions are run before each round, holds."""
        number, begin = self._label("while")
        end = Label(f"$endwhile_{number}")
        self._mark(begin)
        self.emit("bra", end, guard=~self._predicate(condition()))
        with self._inside(end): yield
        self.emit("bra", begin)
        self._mark(end)

    @contextmanager
    def _inside(self, end: Label) -> Iterator[None]:
        self.loops.append(end)
        try:
            with self._indent(): yield
        finally: self.loops.pop()

    def nounroll(self) -> None:
        """Keeps ptxas from unrolling the innermost loop."""
        if not self.loops: self.fail("nounroll outside a loop", "a loop around it", "move it there")
        self.current.lines.append('.pragma "nounroll";')

    def break_(self, predicate: Value | None = None) -> None:
        """Leaves the innermost loop, where the predicate holds."""
        if not self.loops: self.fail("break_ outside a loop", "a loop around it", "use if_")
        self.emit("bra", self.loops[-1], guard=None if predicate is None else self._predicate(predicate))
