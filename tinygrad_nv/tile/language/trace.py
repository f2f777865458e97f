"""Writes operations of the Tile IR as a user's function runs.

Protocol: `Trace` is the program being written; `current()` is that of this thread. `emit` appends an
operation to the innermost region and gives its results. Scalars that are known are folded, and an operation
that a region has computed already is not computed again. Every operation keeps the line of the user's
function that made it: the innermost frame of a file that the trace knows as the user's. Errors are
`LanguageError`s that begin with that line.
"""
from __future__ import annotations

import contextlib
import difflib
import itertools
import linecache
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import LanguageError, NVError, as_well
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.ir import Line, Op, Region, TensorParameter, TileType, Value
from tinygrad_nv.tile.operations import LANGUAGE_OPERATIONS

EFFECTS = {"load_block", "load", "store_block", "store", "atomic", "for", "while", "if", "barrier",
           "promise"}
_here = threading.local()
COMPUTED = (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int32,
            dtypes.uint32, dtypes.int16, dtypes.uint16, dtypes.int8, dtypes.uint8, dtypes.bool)


class Trace:
    """A program being written. `tensors` are those it may address, `files` those of the user's functions."""

    def __init__(self, tensors: Sequence[TensorParameter], files: set[str]) -> None:
        self.tensors = {each.name: each for each in tensors}
        self.files = files
        self.body = Region()
        self.regions = [self.body]
        self._known: list[dict[Any, Op]] = [{}]
        self._constants: dict[Value, Any] = {}
        self._makers: dict[Value, Op] = {}
        self._homes: dict[Value, Region] = {}
        self.returned: Line | None = None   # where the last function returned a value
        self.least: dict[Value, int] = {}   # of arguments of regions
        self.block: Any = None              # that of the innermost loop over blocks
        self.context: Any = None            # of a program that follows its result: context.py
        self.role: Any = None               # of `with tile.role(…)`: roles.py
        self.loops: list[Any] = []          # that are being written
        self.pipes: list[Any] = []
        self.choices: list[TensorParameter] = []
        self.released: set[Value] = set()   # tiles of stages that were given back

    def name_choice(self, parameter: TensorParameter) -> TensorParameter:
        """A choice (choices.py), which gets a name of its own."""
        taken = {*self.tensors, *(each.name for each in self.choices)}
        name = next(name for n in itertools.count() if (name := f"choice{n}") not in taken)
        self.choices.append(replace(parameter, name=name))
        return self.choices[-1]

    # **** operations ****

    def emit(self, name: str, operands: Sequence[Value] = (), types: Sequence[TileType] = (),
             attributes: Mapping[str, Any] | None = None,
             regions: Sequence[Region] = ()) -> tuple[Value, ...]:
        """Appends an operation; its results."""
        attributes = attributes or {}
        for each in operands: self._check_home(each)
        if name == "apply" and (folded := self._fold_constants(attributes["fn"], operands,
                                                               types[0])) is not None:
            return folded,
        key = (name, tuple(operands), tuple(types), tuple((k, _exact(v)) for k, v in attributes.items()))
        if name not in EFFECTS and not regions:
            for known in reversed(self._known):
                if key in known: return known[key].results
        op = Op(name, tuple(operands), tuple(map(Value, types)), attributes, tuple(regions), self.line())
        self.regions[-1].ops.append(op)
        if name not in EFFECTS: self._known[-1][key] = op
        for result in op.results: self._makers[result], self._homes[result] = op, self.regions[-1]
        if name == "constant": self._constants[op.results[0]] = attributes["value"]
        return op.results

    def _check_home(self, value: Value) -> None:
        """Raises for a value of a loop or branch that has ended: one of a list that a body appends to."""
        if self._homes[value] not in self.regions:
            fail(f"a tile ({value.type}) of a loop or branch, used outside of it",
                 "variables, and tuples of them, that the loop or branch assigns",
                 "assign it to a variable that has a value before")
        if value in self.released:
            fail(f"a tile ({value.type}) of a stage that has been released",
                 "pipe.release() behind its last use")

    def visible(self, value: Value) -> bool:
        """Whether a value can be used here."""
        return self._homes[value] in self.regions

    def constant(self, value: Any, dtype: DType) -> Value:
        """A scalar that is known."""
        if dtype == dtypes.bool: value = bool(value)
        elif dtypes.is_float(dtype): value = float(value)
        else: value = _wrap(int(value), dtype)
        return self.emit("constant", (), (TileType(dtype),), {"value": value})[0]

    def constant_of(self, value: Value) -> Any:
        """The number that a scalar is known to be; None where it is not."""
        return self._constants.get(value)

    def defining_op(self, value: Value) -> Op | None:
        """The operation that has made a value; None of arguments of regions."""
        return self._makers.get(value)

    def _fold_constants(self, fn: str, operands: Sequence[Value], to: TileType) -> Value | None:
        numbers = [self._constants.get(each) for each in operands]
        if any(each is None for each in numbers): return self._neutral(fn, operands, numbers)
        if (value := LANGUAGE_OPERATIONS[fn].value) is None: return None
        try: return self.constant(value(*numbers), to.dtype)
        except (ArithmeticError, ValueError): return None

    def _neutral(self, fn: str, operands: Sequence[Value], numbers: Sequence[Any]) -> Value | None:
        """x + 0, x * 1 and the like, of integers."""
        if len(operands) != 2 or dtypes.is_float(operands[0].dtype): return None
        left, right = operands
        if fn == "add" and numbers[0] == 0: return right
        if fn in ("add", "sub", "shift_left", "shift_right") and numbers[1] == 0: return left
        if fn == "mul" and numbers[0] == 1: return right
        return left if fn in ("mul", "quotient") and numbers[1] == 1 else None

    @contextlib.contextmanager
    def region(self, arguments: Sequence[TileType] = ()) -> Iterator[Region]:
        """Puts what is emitted inside the block into a region of its own."""
        made = Region(tuple(map(Value, arguments)))
        self._homes.update(dict.fromkeys(made.arguments, made))
        with self.inside(made): yield made

    @contextlib.contextmanager
    def inside(self, region: Region) -> Iterator[None]:
        """Appends what is emitted inside the block to a region."""
        self.regions.append(region)
        self._known.append({})
        try: yield
        finally:
            self.regions.pop()
            self._known.pop()

    # **** places and errors ****

    def line(self) -> Line | None:
        """Returns where the user's function is now."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.files: return Line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _exact(value: Any) -> Any:
    """Returns a key that is equal for the same attribute alone: 0.0 is not -0.0."""
    return value.hex() if isinstance(value, float) else value


def _wrap(value: int, dtype: DType) -> int:
    bits = dtype.itemsize * 8
    value &= (1 << bits) - 1
    return value - (1 << bits) if not dtypes.is_unsigned(dtype) and value >> bits - 1 else value


def current() -> Trace:
    """The program that this thread is writing. Raises `LanguageError` outside of a kernel."""
    found: Trace | None = getattr(_here, "trace", None)
    if found is None:
        raise LanguageError("an operation of the tile language outside of a kernel",
                            "inside a function with @kernel",
                            "decorate the function with @kernel and call it with Tensors")
    return found


def tracing() -> bool:
    """Whether this thread is writing a program."""
    return getattr(_here, "trace", None) is not None


@contextlib.contextmanager
def writing(trace: Trace) -> Iterator[Trace]:
    """Makes a program this thread's, inside the block."""
    before = getattr(_here, "trace", None)
    _here.trace = trace
    try: yield trace
    finally: _here.trace = before


def fail(found: str, expected: str = "", fix: str = "", line: Line | None = None) -> NoReturn:
    """Raises a `LanguageError` at the user's line."""
    trace: Trace | None = getattr(_here, "trace", None)
    at = line or (trace.line() if trace is not None else None)
    raise LanguageError(found if at is None else f"{at}: {found}{_show_line(at)}", expected, fix)


def fitting(x: float, dtype: DType) -> float:
    """A number that a dtype has; integers of 32 bits with or without a sign, as words of bits. Raises
    `LanguageError` for others."""
    if type(x) is not int or dtypes.is_float(dtype) or dtype == dtypes.bool: return x
    bits, unsigned = dtype.itemsize * 8, dtypes.is_unsigned(dtype)
    least, most = 0 if unsigned else -1 << bits - 1, (1 << bits) - 1 if unsigned else (1 << bits - 1) - 1
    if bits == 32: least, most = -2**31, 2**32 - 1
    if not least <= x <= most:
        fail(f"{x} as {short(dtype)}", f"{least} to {most}", "cast the tile beside it: tile.cast(x, int32)")
    return x


def no_attribute(of: str, own: Collection[str], instead: str, name: str) -> AttributeError:
    """The error for an attribute that something does not have, which is an AttributeError, too. `instead`:
    what to write for it."""
    plain = AttributeError(name)
    if name.startswith("_"): return plain
    close = difflib.get_close_matches(name, own, 1, 0.5)
    fix = instead or (f"write {close[0]}" if close else "")
    try: fail(f"{of} has no {name!r}", "" if fix else ", ".join(sorted(own)), fix)
    except LanguageError as error: return as_well(error, plain)  # type: ignore[return-value]


def explain_error(error: Exception, files: set[str], kernel: str) -> NVError:
    """Returns what Python raises of a user's function, as a `LanguageError` at its line and of its own type,
    too."""
    at, frames = None, error.__traceback__
    while frames is not None:
        if frames.tb_frame.f_code.co_filename in files and frames.tb_frame.f_code.co_name != "<module>":
            at = Line(frames.tb_frame.f_code.co_filename, frames.tb_lineno)
        frames = frames.tb_next
    words = f"{type(error).__name__}: {error}" if not isinstance(error, RecursionError) else \
        "a function that calls itself without end"
    place = f"kernel {kernel}: {words}" if at is None else f"{at}: {words}{_show_line(at)}"
    return as_well(LanguageError(place, *_MENDS.get(type(error), _OTHERWISE)), error)


_OTHERWISE = ("a function that Python runs when the kernel is built", "correct the line that is named")
_MENDS = {NameError: ("names of the function, of its module, or of its parameters", "import or define it"),
          RecursionError: ("functions that end", "end it by a constant, or write a loop")}


def _show_line(at: Line) -> str:
    text = linecache.getline(at.file, at.number).strip()
    return f"\n    {text}" if text else ""


def check_dtype(dtype: Any) -> DType:
    """The dtype of a tile, from a DType or from one with policies. Raises for those that tiles cannot
    have."""
    plain = getattr(dtype, "dtype", dtype)
    if plain not in COMPUTED:
        fail(f"a tile of {getattr(plain, 'name', repr(plain))}", "one of " + ", ".join(map(short, COMPUTED)))
    return plain


def check_shape(shape: Any) -> tuple[int, ...]:
    """Sizes of a tile, as ints. Blocks count as their sizes."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    made = []
    for one in sizes:
        try: size = one.__index__()
        except AttributeError: fail(f"{one!r} as an extent of a tile", "an integer or a block")
        if size < 1: fail(f"a tile with extent {size}", "extents of 1 and more")
        made.append(size)
    return tuple(made)
