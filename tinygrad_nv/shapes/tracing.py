"""One run of a function on tensors without values: what its variables are line by line, and where it fails.

Protocol. `run(fn, args, kwargs)` calls the function and follows its lines. tinygrad is lazy, so that only the
graph is built; `realize` does nothing meanwhile, and what reads values is refused. After each line the shapes
of what was assigned are asked for: tinygrad finds out about operands that cannot be broadcast only then. A
`Failure` has the line and the text of the expression, and its operands with where each is from: the variable
that it is, or that it was made of by reshapes, permutes, expands and casts.

What lies in tinygrad's folder or in this package's is not the user's: a failure belongs to the last line
outside.
"""
from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import tinygrad
from tinygrad import Tensor

from tinygrad_nv.errors import NVError, ShapeError
from tinygrad_nv.shapes.valueless import without_values

LIBRARIES = tuple(f"{Path(file).parent}/" for file in (str(tinygrad.__file__), Path(__file__).parent))
NO_TEXT = "an expression"    # where the source is not there
VIEWS = {"RESHAPE", "PERMUTE", "EXPAND", "CAST", "CONTIGUOUS", "PAD", "SHRINK", "FLIP"}


@dataclass(frozen=True)
class Assigned:
    """A variable as a line left it. `line` is 0 for an argument."""
    line: int
    name: str
    value: Tensor
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class Operand:
    """Operand of an expression that fails: its text, and the variable that it comes from."""
    text: str
    shape: tuple[Any, ...]
    origin: Assigned | None
    outside: bool = False       # a variable of the module, or an attribute
    computed: bool = False      # from the variable, not by moving its elements alone


@dataclass(frozen=True)
class Failure:
    """Failure of an expression: `where` is a file and a line."""
    file: str
    line: int
    text: str
    reason: str
    operands: tuple[Operand, ...]
    error: BaseException


@dataclass
class Run:
    """The variables in the order of their assignment, the result, the failure if there was one."""
    assigned: list[Assigned] = field(default_factory=list)
    result: Any = None
    failure: Failure | None = None
    last: int = 0       # the last line that ran, and how many did
    lines: int = 0


def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """Calls a function on tensors without values."""
    follower = _Follower(getattr(fn, "__func__", fn).__code__)
    before = sys.gettrace()
    with without_values(lambda _: True, _refusal):
        sys.settrace(follower.enter)
        try: follower.run.result = fn(*args, **kwargs)
        except (Exception, _Fails) as error:
            sys.settrace(before)
            if follower.run.failure is None: follower.run.failure = follower.explain(error)
        finally: sys.settrace(before)
    return follower.run


def tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The Tensors in a value, with the words that reach them."""
    if isinstance(value, Tensor): yield name, value
    elif isinstance(value, dict):
        for key, each in value.items(): yield from tensors(f"{name}[{key!r}]", each)
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        for i, each in enumerate(value):
            yield from tensors(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", each)
    else:
        for part in ("K", "V"):     # of a cache
            with contextlib.suppress(Exception):    # of one that may not be read any more
                if isinstance(each := getattr(value, part, None), Tensor): yield f"{name}.{part}", each


class _Fails(BaseException):
    """A shape that tinygrad cannot say, found behind a line. No `except Exception` of the function's takes
    it."""


class _Follower:
    """The lines of one function; nested and other functions are not followed."""

    def __init__(self, code: CodeType) -> None:
        self.code, self.run = code, Run()
        self.seen: dict[str, tuple[Tensor, Any]] = {}
        self.busy = False

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not self.code or self.busy: return None
        self.busy = True
        self._note(frame, 0)
        return self.follow

    def follow(self, frame: FrameType, event: str, given: Any) -> Any:
        if event == "exception": return self.follow
        if self.run.last: self._note(frame, self.run.last)
        if event == "line": self.run.last, self.run.lines = frame.f_lineno, self.run.lines + 1
        if event == "return":
            self.busy = False
            for name, each in tensors("return", given): self._add(frame, frame.f_lineno, name, each)
        return self.follow

    def _note(self, frame: FrameType, line: int) -> None:
        """Notes what is new among the variables."""
        for variable, value in frame.f_locals.items():
            for name, tensor in tensors(variable, value):
                now = tensor, tensor.uop
                before = self.seen.get(name, (None, None))
                if before[0] is now[0] and before[1] is now[1]: continue
                self.seen[name] = now
                self._add(frame, line, name, tensor)

    def _add(self, frame: FrameType, line: int, name: str, tensor: Tensor) -> None:
        try: shape = tensor.shape
        except Exception as error:
            if self.run.failure is None: self.run.failure = self._behind(frame, line, tensor, error)
            raise _Fails from error
        self.run.assigned.append(Assigned(line, name, tensor, shape))

    # **** failures ****

    def explain(self, error: BaseException) -> Failure:
        """The failure of an expression, by the frames that it passed through."""
        frames = list[TracebackType]()
        step = error.__traceback__
        while step is not None:
            frames.append(step)
            step = step.tb_next
        files = [each.tb_frame.f_code.co_filename for each in frames]
        own = [i for i, file in enumerate(files) if not file.startswith(LIBRARIES)]
        if not own: return Failure("", 0, "", _reason(error), (), error)
        at = frames[own[-1]]
        file, text = at.tb_frame.f_code.co_filename, _segment(at)
        inside = [each.tb_frame for each in frames[own[-1] + 1:]]
        operands = self._operands(at.tb_frame, text, inside)
        return Failure(file, at.tb_lineno, text, _reason(error), tuple(operands), error)

    def _operands(self, frame: FrameType, text: str, inside: list[FrameType]) -> list[Operand]:
        """The tensors that the first function of tinygrad's was called with."""
        found = dict[int, Tensor]()
        for each in inside[:1]:
            given = [t for name, value in each.f_locals.items() for _, t in tensors(name, value)]
            found.update({id(tensor): tensor for tensor in given})
        words = _words(frame, text)
        shaped = [tensor.uop for tensor in found.values() if _shape(tensor.uop) is not None]
        return [self._operand(node, words) for node in shaped]

    def _operand(self, node: Any, words: dict[str, Tensor]) -> Operand:
        own = next((text for text, one in words.items() if one.uop is node), "")
        origin, computed = self._origin(node)
        exact = origin is not None and origin.value.uop is node
        if exact and origin is not None: own = own if own in words and "." in own else origin.name
        return Operand(own, node.shape, origin, bool(own) and not exact, computed)

    def _origin(self, node: Any) -> tuple[Assigned | None, bool]:
        """The nearest variable that a node is made of; whether by more than views."""
        by = {id(each.value.uop): each for each in self.run.assigned}
        front, seen, computed = [node], set[int](), False
        while front:
            if (found := next((by[id(each)] for each in front if id(each) in by), None)) is not None:
                return found, computed
            computed = computed or any(each.op.name not in VIEWS for each in front)
            seen.update(map(id, front))
            front = [src for each in front for src in each.src if id(src) not in seen]
        return None, computed

    def _behind(self, frame: FrameType, line: int, tensor: Tensor, error: Exception) -> Failure:
        """The failure of a line whose shapes tinygrad was asked for behind it: the first node without one."""
        node = next(node for node in tensor.uop.toposort() if not _has_shape(node))
        file = frame.f_code.co_filename
        text = linecache.getline(file, line).strip() or NO_TEXT
        words = _words(frame, _expression(text))
        operands = tuple(self._operand(each, words) for each in node.src)
        return Failure(file, line, text, _reason(error), operands, error)


def of_tinygrad(error: BaseException) -> bool:
    """Whether an error was raised in tinygrad, of operands that it cannot take."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None: step = step.tb_next
    at_home = step is not None and step.tb_frame.f_code.co_filename.startswith(LIBRARIES[0])
    return at_home and isinstance(error, RuntimeError | ValueError | IndexError | AssertionError)


def _has_shape(node: Any) -> bool:
    try: return node._shape is not ...
    except Exception: return False


def _shape(node: Any) -> tuple[Any, ...] | None:
    try: return node._shape
    except Exception: return None


def _reason(error: BaseException) -> str:
    if isinstance(error, NVError):
        return f"{error.found}; expected: {error.expected}" if error.expected else error.found
    step = error.__traceback__
    while step is not None and step.tb_next is not None: step = step.tb_next
    name = step.tb_frame.f_code.co_name if step is not None else ""
    if not str(error): return f"{name} refuses these operands"
    text = str(error).splitlines()[0]
    return text if of_tinygrad(error) else f"{type(error).__name__}: {text}"


def _segment(at: TracebackType) -> str:
    """The text of the expression that a frame was in."""
    code, file = at.tb_frame.f_code, at.tb_frame.f_code.co_filename
    line, last, start, end = list(code.co_positions())[at.tb_lasti // 2]
    if line is None or last is None or start is None or end is None: return NO_TEXT
    lines = [linecache.getline(file, each) for each in range(line, last + 1)]
    lines = [each.encode()[:end].decode() if i == len(lines) - 1 else each for i, each in enumerate(lines)]
    lines[0] = lines[0].encode()[start:].decode()
    return " ".join(each.strip() for each in lines).strip() or NO_TEXT


def _expression(text: str) -> str:
    """The right side of a statement of one line."""
    with contextlib.suppress(SyntaxError):
        tree = ast.parse(text).body[0]
        if isinstance(value := getattr(tree, "value", None), ast.expr): return ast.unparse(value)
    return text


def _words(frame: FrameType, text: str) -> dict[str, Tensor]:
    """Names and attributes in an expression that are Tensors, by their texts."""
    found = dict[str, Tensor]()
    with contextlib.suppress(SyntaxError):
        for node in ast.walk(ast.parse(text.strip(), mode="eval")):
            if isinstance(node, ast.Name | ast.Attribute):
                value = _read(frame, node)
                if isinstance(value, Tensor): found[ast.unparse(node)] = value
    return found


def _read(frame: FrameType, node: ast.AST) -> Any:
    """The value of a name, or of attributes of one that are stored in objects."""
    if isinstance(node, ast.Name): return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute): return None
    owner = _read(frame, node.value)
    return None if isinstance(owner, Tensor) else getattr(owner, "__dict__", {}).get(node.attr)


def _refusal() -> ShapeError:
    return ShapeError("a value is read, and shapes are evaluated without values",
                      "shapes that follow from shapes", "take what reads it out of the function")
