"""Kernels in the tile language, called with Tensors.

    @kernel(grid=lambda N, BM: (cdiv(N, BM),))
    def add(x: KTile["N", f32], y: KTile["N", f32], out: OTile["N", f32], *, BM: int = 256):
        rows = tile.block(tile.program_id(0) * BM, BM)
        out[rows] = x[rows] + y[rows]

Protocol. A call binds its arguments (arguments.py), reads the function once for these shapes, dtypes,
constants and values around it (captured.py, tile/language/program.py), builds the kernel of the tensors'
device once, and puts its call into the graph: eager, in TinyJit and in graph pools as any kernel of ours. It
gives the Tensor that the function returns, or the outputs: one, or a tuple. Without `grid=` programs follow
the result (tile.context()). Outputs that are changed by atomics, or read, begin as zeros.

Gradients are what `defvjp` says: `vjp(inputs, outputs, gradients)` of tuples of Tensors gives the gradient of
each input, or None; of several outputs one has a gradient at a time, the others None. It is called with the
keyword arguments of the call, too, where it has any.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.engine import jit
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import EffectError, LanguageError, NumericsError, ScheduleError, ShapeError
from tinygrad_nv.language.arguments import Bound, bind_arguments, place_together
from tinygrad_nv.language.building import build, make
from tinygrad_nv.language.captured import capture_values, exact
from tinygrad_nv.language.checking import gradients_of, grid_of, label
from tinygrad_nv.language.effects import check_effects
from tinygrad_nv.patterns import named, program
from tinygrad_nv.patterns.target import Target, target_of
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.shapes.signature import Signature, signature
from tinygrad_nv.tile import order
from tinygrad_nv.tile.language.ir import STORES, Program
from tinygrad_nv.tile.language.program import RESULT, trace_program
from tinygrad_nv.tile.language.schedule import TileSchedule

VJP = Callable[..., Any]
KEPT = 512   # programs of one kernel


@dataclass(frozen=True)
class Call:
    """Call of a kernel: a program, on a target, and the gradient's function."""
    name: str
    key: str
    program: Program = field(compare=False)
    schedule: TileSchedule
    vjp: VJP | None = None
    constants: tuple[tuple[str, Any], ...] = ()
    effects: str = ""       # what blocks of `prefetch` ask for, for its note
    initial: tuple[str, ...] = ()               # outputs that have contents before
    donated: frozenset[str] = frozenset()       # those of them that are written where they are
    label: str = field(default="", compare=False)   # the name with the place of the function

    def __repr__(self) -> str:
        """All that the call's kernels depend on: tinygrad knows a call by these words alone."""
        own = (self.schedule, self.initial, sorted(self.donated), self.effects, self.constants)
        return f"kernel {self.name} {self.key[:16]} {own}"


@dataclass(frozen=True)
class Output:
    """One of a call's several results: of the call's arguments and of all results, the one of a number."""
    call: Call
    number: int
    inputs: int


@dataclass(frozen=True)
class Choice:
    """A schedule, and values of keyword arguments that a call may still replace."""
    schedule: TileSchedule
    constants: Mapping[str, Any]


class Kernel:
    """A function as a kernel. Called with Tensors, it gives Tensors."""

    def __init__(self, fn: Callable[..., Any], grid: Any = None,
                 schedule: TileSchedule | None = None) -> None:
        if not isinstance(fn, FunctionType):
            raise LanguageError(f"@kernel on a {type(fn).__name__}", "a Python function",
                                "give a grid or a schedule by name: @kernel(grid=…, schedule=…)")
        if not isinstance(schedule, TileSchedule | None):
            raise ScheduleError(f"{schedule!r} as the schedule of kernel {label(fn)}", "a Schedule",
                                "Schedule(block=(128, 64), k=64, warps=8, stages=3)")
        functools.update_wrapper(self, fn)
        self.__tile_function__ = fn
        self.fn, self.grid, self.label = fn, grid, label(fn)
        self.chosen = schedule or TileSchedule()
        self.vjp: VJP | None = None
        self._programs: dict[Any, Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, given, outputs = self._prepare(args, kwargs)
        results = self._call(call, given, outputs)
        # a call runs again for each result that is realized by itself: once alone where memory is written
        if call.donated: Tensor.realize(*results)
        return results[0] if outputs == 1 else results

    def _call(self, call: Call, given: list[Tensor], outputs: int) -> tuple[Tensor, ...]:
        """The results in the graph."""
        if outputs == 1: return named.call(call, body, *given, grad=_gradient)
        made = named.call(call, body, *given)
        # tinygrad tells a function's gradients without the results that have none, so each is one's own
        return tuple(named.call(Output(call, i, len(given)), _output, *given, *made, grad=_gradient)[0]
                     for i in range(outputs))

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, list[Tensor], int]:
        """The call, the tensors that it takes, and how many it gives."""
        given, made, schedule = self._trace(args, kwargs)
        if made.promised is not None and not jit.capturing: self._keep_promises(made.promised, given)
        outputs = [each for each in made.tensors if each.output]
        first = next(iter(given.tensors.values()))
        initial = {each.name: contents for each in outputs
                   if (contents := _initial(each, given, made, first)) is not None}
        inputs = [given.tensors[each.name] for each in made.tensors if not each.output]
        own = self.signature.parameters.parameters
        constants = tuple((name, value) for name, value in kwargs.items()
                          if name in given.constants and own[name].kind is own[name].KEYWORD_ONLY)
        if given.deterministic or order.is_wanted(): _one_order(made)
        _alone(given, self.label)
        words = check_effects(made, schedule, given.tensors)
        call = Call(self.fn.__name__, made.key, made, schedule, self.vjp, constants, words, tuple(initial),
                    frozenset(given.donated), self.label)
        return call, [*inputs, *initial.values()], len(outputs)

    def _keep_promises(self, promised: Program, given: Bound) -> None:
        """Raises `NumericsError` where a tile is not what `verify.numerics` says."""
        from tinygrad_nv.language.interpreted import interpret
        if config.get("NV_DEBUG"): interpret(promised, given.tensors)

    def _trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Bound, Program,
                                                                                 TileSchedule]:
        choice = self.choice(args, kwargs)
        given = self.bind(args, self.fill_constants(choice, kwargs), choice.schedule)
        return given, self.trace_program(given, choice.schedule), choice.schedule

    def choice(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
        """Returns what a call is computed with."""
        return Choice(self.chosen, {})

    def fill_constants(self, choice: Choice, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keyword arguments with the choice's values for those that a call does not give."""
        return {**choice.constants, **kwargs}

    @functools.cached_property
    def signature(self) -> Signature:
        """The function's annotations, evaluated at the first call."""
        return signature(self.fn)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], schedule: TileSchedule) -> Bound:
        """The arguments of a call."""
        try: return place_together(bind_arguments(self.label, self.signature, args, kwargs, schedule))
        except ShapeError as error:
            raise ShapeError(f"kernel {self.label}: {error.found}", error.expected, error.fix) from error

    def trace_program(self, given: Bound, schedule: TileSchedule) -> Program:
        """The program of bound arguments."""
        key = (schedule, tuple(given.parameters), exact(given.constants), given.result,
               capture_values(self.fn),
               config.get("NV_DEBUG"))
        if (made := self._programs.get(key)) is None:
            if len(self._programs) >= KEPT: self._programs.pop(next(iter(self._programs)))
            made = trace_program(self.fn, given.arguments, given.parameters, schedule, self._grid(given),
                                 given.result)
            if not any(op.name in STORES for op in made.body.walk()):
                raise LanguageError(f"kernel {self.label} stores nothing",
                                    "a returned tile, or stores to outputs annotated as OTile",
                                    "write out[rows, cols] = …: out = … names another tile")
            self._programs[key] = made
        return made

    def _grid(self, given: Bound) -> tuple[int, ...] | None:
        return None if self.grid is None else grid_of(self.label, self.grid, given.names)

    # **** for a reader ****

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The Tile IR of a call: print it, or look at its operations."""
        return self._trace(args, kwargs)[1]

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The text that a call compiles: PTX, or C."""
        call, given, _ = self._prepare(args, kwargs)
        target = target_of(given[0].device)
        if target is None: raise _no_target(call.label, given[0].device)
        return "\n".join(each.text for each in build(call.program, call.schedule, target).kernels)

    def interpret(self, *args: Any, **kwargs: Any) -> Any:
        """The results of a call as NumPy computes them from the Tile IR, slowly: for finding errors."""
        from tinygrad_nv.language.interpreted import interpret
        given, made, _ = self._trace(args, kwargs)
        return interpret(made, given.tensors)

    def explain(self, *args: Any, full: bool = False, **kwargs: Any) -> str:
        """A call at every level: schedule, grid, Tile IR, and with `full` the text that is compiled."""
        from tinygrad_nv.language.inspection import explain_levels
        given, made, schedule = self._trace(args, kwargs)
        device = next(iter(given.tensors.values())).device
        return explain_levels(made, schedule, self.source(*args, **kwargs), str(device), full)

    def passes(self, *args: Any, only: str = "all", arch: str = "", **kwargs: Any) -> str:
        """Returns what each pass makes of a call, or `only` one of them: on the Tensors' device, on a GPU of
        an `arch`, or on this "cpu"."""
        from tinygrad_nv.language.passes import show_passes
        return show_passes(self.build_for(arch, 0, *args, **kwargs), only)

    def build_for(self, arch: str, sm_count: int, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """The build of a call's kernel, for a target as `passes` has it. Raises `ConfigError`."""
        from tinygrad_nv.language.inspection import find_target
        given, made, schedule = self._trace(args, kwargs)
        device = next(iter(given.tensors.values())).device
        target = find_target(arch, sm_count) if arch else target_of(device)
        if target is None: raise _no_target(self.label, device)
        return functools.partial(make, made, schedule, target)

    def check(self, *args: Any, arch: str = "sm_90a", emulator_seed: int = 0, **kwargs: Any) -> Any:
        """Runs a call's PTX on the emulator: findings (races, bank conflicts and the like), counters,
        outputs.
        `emulator_seed` orders asynchronous work."""
        from tinygrad_nv.language.inspection import check
        given, made, schedule = self._trace(args, kwargs)
        return check(made, schedule, given.tensors, arch, emulator_seed)

    def time(self, *args: Any, gpu: str = "h100", **kwargs: Any) -> float:
        """Microseconds that the timing model predicts of a call on a GPU: a model, not a measurement."""
        from tinygrad_nv.language.inspection import predict_us
        _, made, schedule = self._trace(args, kwargs)
        return predict_us(made, schedule, gpu)

    # **** derived kernels ****

    def defvjp(self, fn: VJP) -> VJP:
        """Says what the gradient is: fn(inputs, outputs, gradients) gives one Tensor or None for each
        input."""
        self.vjp = fn
        return fn

    def with_schedule(self, schedule: TileSchedule) -> Kernel:
        """The same function with another schedule."""
        made = Kernel(self.fn, self.grid, schedule)
        made.vjp = self.vjp
        return made

    def schedule(self, *args: Any, **kwargs: Any) -> Scheduled:
        """Sets this kernel's schedule: `flash.schedule(block=(128, 128), k=64).warps(8).stages(3)`."""
        given = args[0] if args and isinstance(args[0], TileSchedule) else TileSchedule(*args, **kwargs)
        self.chosen = given
        return Scheduled(self)


class Scheduled:
    """The fluent form of a kernel's schedule: each call changes the kernel's own."""

    def __init__(self, kernel: Kernel) -> None: self.kernel = kernel

    def __getattr__(self, name: str) -> Callable[..., Scheduled]:
        change = getattr(self.kernel.chosen, name)
        if name.startswith("_") or not callable(change): raise AttributeError(name)

        def set_schedule(*args: Any, **kwargs: Any) -> Scheduled:
            self.kernel.chosen = change(*args, **kwargs)
            return self
        return set_schedule

    def __call__(self, *args: Any, **kwargs: Any) -> Any: return self.kernel(*args, **kwargs)

    def __repr__(self) -> str: return f"{self.kernel.fn.__name__}: {self.kernel.chosen}"


def _alone(given: Bound, label: str) -> None:
    """Raises `EffectError` for a donated Tensor whose memory the call reads as another argument."""
    for name in given.donated:
        own = given.tensors[name].uop.base
        for other, each in given.tensors.items():
            if other == name or each.uop.base is not own: continue
            raise EffectError(f"kernel {label}: {name} is donated, and {other} is the same memory",
                              "a donated Tensor that no other argument is",
                              f"read {name} in the kernel, or give {other}.clone()")


def _one_order(program: Program) -> None:
    """Raises `NumericsError` for sums whose order is that in which programs of the grid happen to run."""
    for op in program.body.walk():
        if op.name == "atomic" and op.attributes["fn"] == "add" and dtypes.is_float(op.operands[1].dtype):
            raise NumericsError(f"{op.line}: atomic_add of floats in kernel {program.name}, which is "
                                "deterministic",
                                "sums in one order", "store partial sums, and add them up in one program")


# **** a call in the graph ****

def _initial(output: Any, given: Bound, made: Program, first: Tensor) -> Tensor | None:
    """Returns what an output contains before the kernel: a Tensor that was given, zeros, or nothing."""
    if output.name in given.tensors: return given.tensors[output.name]
    if output.name == RESULT or not _is_read(made, output.name): return None
    return Tensor.zeros(*output.shape, dtype=output.dtype, device=first.device).contiguous()


def _is_read(made: Program, name: str) -> bool:
    """Whether a program reads what it writes: by atomics, or by loads; or leaves some of it unwritten."""
    return any(op.name in ("atomic", "load", "load_block") and name in made.tensor_names(op)
               for op in made.body.walk())


def _lower(call: Call, target: Target, *given: UOp) -> tuple[UOp, ...]:
    """The kernel's call where the graph is rewritten: outputs are storage of each call's own."""
    device = given[0].device

    def contents(name: str, value: UOp) -> UOp:
        if name in call.donated and program.is_whole(value): return value
        room = program.storage(program.Output(value.shape, value.dtype), device)
        return room.after(room.store(value))
    return _call_kernels(call, target, given, contents)


def body(call: Call, *given: Tensor) -> tuple[Tensor, ...]:
    """The same at tensor level, where it is not rewritten: while tinygrad_nv is disabled."""
    if (target := target_of(given[0].device)) is None: raise _no_target(call.label, given[0].device)

    def contents(_: str, value: UOp) -> UOp: return value.alu(Ops.MUL, value.const_like(1)).contiguous()
    return tuple(map(Tensor, _call_kernels(call, target, [each.uop for each in given], contents)))


def _call_kernels(call: Call, target: Target, given: Sequence[UOp],
            contents: Callable[[str, UOp], UOp]) -> tuple[UOp, ...]:
    kernels = build(call.program, call.schedule, target)
    count = sum(not each.output for each in call.program.tensors)
    stores = dict(zip(call.initial, given[count:], strict=True))
    where: list[program.Output | UOp] = [
        contents(each.name, stores[each.name]) if each.name in stores else program.Output(each.shape,
                                                                                          each.dtype)
        for each in call.program.tensors if each.output]
    words = f"{call.name}: {call.schedule}{call.effects and '; ' + call.effects}"
    if order.is_wanted(): words += f"; {order.CLASS}{order.PROGRAM}"
    note = Note("tile", words, None, call.schedule)
    return program.call(kernels, given[0].device, where, given[:count], note=note)


def _no_target(label: str, device: Any) -> LanguageError:
    return LanguageError(f"kernel {label} on {device}", "a device with kernels of ours: CPU, EMU or CUDA",
                         "move the tensors: x.to('CPU')")


def _output(what: Output, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors[what.inputs + what.number],


def _gradient(gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
    of = call.arg.aux
    what: Call = of.call if isinstance(of, Output) else of
    if what.vjp is None:
        raise LanguageError(f"a gradient of kernel {what.label}", "a kernel with a gradient",
                            f"say what it is: @{what.name}.defvjp")
    given = tuple(map(Tensor, call.src[1:]))
    count = of.inputs if isinstance(of, Output) else len(given)
    inputs, outputs = given[:count], given[count:] or (Tensor(call.gettuple(0)),)
    number = of.number if isinstance(of, Output) else 0
    gradients = tuple(Tensor(gradient) if i == number else None for i in range(len(outputs)))
    code = what.vjp.__code__
    takes = code.co_kwonlyargcount or code.co_flags & inspect.CO_VARKEYWORDS
    found = what.vjp(inputs, outputs, gradients, **(dict(what.constants) if takes else {}))
    made = gradients_of(what.label, found, inputs)
    return (*(None if each is None else each.uop for each in made), *[None] * (len(given) - len(inputs)))


named.lower(Call, "tile", _lower)
