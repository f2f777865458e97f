"""A user's function and its arguments, written as a program of the Tile IR.

Protocol: `trace_program(fn, arguments, …)` runs the passes of `FRONTEND`: the rewritten function (source.py)
runs once, with a `TensorRef` for each tensor, and gives the `Program`. A tile that the function returns is
stored to the output `result`, at the program's block.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

from tinygrad_nv.errors import LanguageError, NVError
from tinygrad_nv.tile.language.choices import with_choices
from tinygrad_nv.tile.language.context import Context
from tinygrad_nv.tile.language.ir import Line, Program, TensorParameter
from tinygrad_nv.tile.language.masks import clamp_masks
from tinygrad_nv.tile.language.memory import Block, TensorRef, store
from tinygrad_nv.tile.language.passes import Pass, run_passes
from tinygrad_nv.tile.language.promises import without
from tinygrad_nv.tile.language.roles import all_consumed
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.language.source import returns_value, rewritten, show_rewritten
from tinygrad_nv.tile.language.trace import Trace, current, explain_error, fail, writing
from tinygrad_nv.tile.language.values import Tile, describe

RESULT = "result"
NO_KERNELS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# programs along x, y, z: CUDA C Programming Guide, "Compute Capabilities"
LIMITS = (2**31 - 1, 65535, 65535)


@dataclass(eq=False)
class Frontend:
    """A function on its way to a program: what trace_program takes, and what the passes have made."""
    fn: FunctionType
    arguments: Mapping[str, Any]
    tensors: Sequence[TensorParameter]
    schedule: TileSchedule
    grid: tuple[int, ...] | None
    result: TensorParameter | None
    views: Sequence[TensorParameter]
    launch: Mapping[str, Any]
    function: Callable[..., Any] = field(init=False)
    program: Program = field(init=False)


def trace_program(fn: FunctionType, arguments: Mapping[str, Any], tensors: Sequence[TensorParameter],
                  schedule: TileSchedule, grid: tuple[int, ...] | None, result: TensorParameter | None,
                  views: Sequence[TensorParameter] = (), **launch: Any) -> Program:
    """The program of a function. `arguments` by name, tensors as `TensorRef`s; `grid` None: programs follow
    the result, of a shape and a dtype; by default the shape is that of the first tensor where a tile is
    returned or there are no outputs, else that of the output with most axes. `views` of inputs are tensors
    that the function may read, too. `launch`: name, rows and cluster of the program, where they are not the
    default. Raises `LanguageError`."""
    state = Frontend(fn, arguments, tensors, schedule, grid, result, views, launch)
    run_passes(FRONTEND, state)
    again = functools.partial(trace_program, fn, arguments, tensors, schedule, grid, result, views, **launch)
    return replace(state.program, retrace=again)


def _rewrite(state: Frontend) -> None:
    fn = state.fn
    if not state.tensors: raise LanguageError(f"kernel {fn.__name__} without a tensor", "one tensor at least")
    if fn.__code__.co_flags & NO_KERNELS:
        at = Line(fn.__code__.co_filename, fn.__code__.co_firstlineno)
        fail(f"kernel {fn.__name__} is a generator or coroutine",
             "a function that returns a tile or stores to outputs",
             "write it without yield, async and await", at)
    state.function = rewritten(fn)


def _trace(state: Frontend) -> None:
    """Runs the function."""
    fn, tensors, views, result = state.fn, state.tensors, state.views, state.result
    assert not {each.of for each in views} & {each.name for each in tensors if each.output}, "views are read"
    outputs = [each for each in tensors if each.output]
    first = not outputs or returns_value(fn.__code__, fn.__code__.co_filename)
    like = tensors[0] if first else max(outputs, key=lambda each: len(each.shape))
    out = result or TensorParameter(RESULT, like.dtype, like.shape, output=True)
    trace = Trace([*tensors, *views, out], {fn.__code__.co_filename})
    made = None if state.grid is not None else Context(TensorRef(tensors[0]), out.shape, state.schedule,
                                                       supposed=result is None and first)
    trace.context = made
    with writing(trace):
        try:
            returned = state.function(**state.arguments)
            all_consumed(trace)
            if returned is not None: out = _store_result(returned, out, made, declared=result is not None)
        except NVError: raise
        except Exception as error: raise explain_error(error, trace.files, fn.__name__) from error
        if made is not None: made.check()
        counts = _grid(made.grid if made is not None else state.grid or (1,), fn)
    results = [*([out] if returned is not None else []), *outputs]
    inputs = [each for each in tensors if not each.output]
    made_program = Program(**{"name": fn.__name__, **state.launch}, tensors=(*results, *inputs), grid=counts,
                           body=trace.body, views=tuple(views))
    state.program = with_choices(made_program, trace.choices)


def _clamp_masks(state: Frontend) -> None: state.program = clamp_masks(replace(state.program))


def _leave_promises(state: Frontend) -> None:
    whole = state.program
    if (made := without(whole)) is not whole: state.program = replace(made, promised=whole)


FRONTEND = (
    Pass("source", "Loops and branches of the function become calls.", _rewrite,
         lambda state: show_rewritten(state.fn)),
    Pass("trace", "The function runs once, and leaves the operations of the Tile IR, checked.", _trace,
         lambda state: str(state.program)),
    Pass("masks", "Loops end where a mask leaves nothing; blocks inside of a mask go without it.",
         _clamp_masks, lambda state: str(state.program)),
    Pass("promises", "Promises on tiles are left out; they are checked while a kernel is debugged.",
         _leave_promises, lambda state: str(state.program)))


def _store_result(returned: Any, out: TensorParameter, context: Context | None,
                  declared: bool) -> TensorParameter:
    if not isinstance(returned, Tile):
        fail(f"a kernel that returns {type(returned).__name__}", "one tile, or nothing",
             "store others to outputs: OTile", current().returned)
    if context is None:
        fail("a tile returned from a kernel with grid=", "stores to outputs",
             "annotate an argument as OTile[...]", current().returned)
    if not declared: out = TensorParameter(out.name, returned.dtype, out.shape, output=True)
    rank = min(returned.ndim, 2)
    if rank > len(out.shape):
        fail(f"a returned tile ({describe(returned)}) of a result of shape {out.shape}",
             f"a tile of at most {len(out.shape)} axes",
             'annotate the result: def kernel(…) -> OTile["N", f32]', current().returned)
    index = [_place(context, out.shape[axis], returned.shape[axis], axis) for axis in range(-rank, 0)]
    store(TensorRef(out), returned, *index)
    return out


def _place(context: Context, extent: int, size: int, axis: int) -> Block:
    """The block of an axis of the result that a returned tile covers."""
    rows = axis == -2 or len(context.result) == 1
    if rows and size == context.schedule.block_m: return context.m
    if not rows and 1 in context.used and size == context.schedule.block_n: return context.n
    if not rows and size >= extent: return Block(0, size)
    wanted = context.schedule.block_m if rows else f"{context.schedule.block_n}, or {extent}, the whole axis,"
    fail(f"a returned tile with {size} elements along axis {axis} of the result", f"{wanted}",
         "return a tile of the program's block: tile.context().m rows", current().returned)


def _grid(counts: Sequence[int], fn: FunctionType) -> tuple[int, int, int]:
    made = [*map(int, counts), 1, 1][:3]
    for count, limit, name in zip(made, LIMITS, "xyz", strict=True):
        if not 1 <= count <= limit:
            place = f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"
            raise LanguageError(f"kernel {fn.__name__} ({place}): {count} programs along {name}",
                                f"1 to {limit}",
                                "give more to each program, or count them along x")
    return made[0], made[1], made[2]

