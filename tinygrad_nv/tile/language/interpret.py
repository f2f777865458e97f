"""Runs a program in NumPy, one after the other of its grid: what every target is held to.

Protocol: `run(program, arrays)` takes an array for each tensor by name (of inputs, and of outputs that are
read or partly written) and gives those of the outputs. Elements of bfloat16 and of float8 are float32 arrays
of values that the dtype has, in arguments and results alike. Floats are computed in float32 and rounded to
their dtype after each operation; `exact` computes them in float64 and rounds nothing, for measuring errors.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.tile.language.ir import Op, Program, Region, TensorParameter, Value, select_numbers

Array = np.ndarray[Any, np.dtype[Any]]
_PLAIN = {dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.int16: np.int16, dtypes.uint16: np.uint16,
          dtypes.int32: np.int32, dtypes.uint32: np.uint32, dtypes.bool: np.bool_}
# bits of mantissa, the least exponent of a normal number, the largest finite one
_SHORT = {dtypes.float16: (10, -14, 65504.0), dtypes.bfloat16: (7, -126, 3.3895313892515355e38),
          dtypes.fp8e4m3: (3, -6, 448.0), dtypes.fp8e5m2: (2, -14, 57344.0)}


def round_to(x: Array, dtype: DType) -> Array:
    """Floats to the nearest value of a dtype, of two the even one: float32 arrays. What is too large becomes
    an infinity, in float8 the largest number, as cvt.rn.satfinite does."""
    if dtype == dtypes.float32: return np.asarray(x, np.float32)
    bits, least, most = _SHORT[dtype]
    wide = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(wide)[1] - 1, least)
        step = np.ldexp(1.0, exponent - bits)
        near = np.where(np.isfinite(wide), np.round(wide / step) * step, wide)
    beyond = np.abs(near) > most
    large = np.copysign(most if dtype.itemsize == 1 else np.inf, wide)
    return np.where(beyond & ~np.isnan(wide), large, near).astype(np.float32)


class _Run:
    """A program of the grid: the arrays of its values."""

    def __init__(self, program: Program, memory: Mapping[str, Array], place: tuple[int, int, int],
                 exact: bool) -> None:
        self.program, self.memory, self.place, self.exact = program, memory, place, exact
        self.values: dict[Value, Any] = {}
        self.chosen: dict[str, str] = {}        # the tensor of each choice

    def region(self, region: Region, arguments: tuple[Any, ...] = ()) -> list[Any]:
        self.values.update(zip(region.arguments, arguments, strict=True))
        for op in region.ops:
            given = [self.values[each] for each in op.operands]
            made = getattr(self, f"do_{op.name.rstrip('_')}")(op, *given)
            if op.results: self.values.update(zip(op.results, made if isinstance(made, list) else [made],
                                                  strict=True))
        return [self.values[each] for each in region.yields]

    def to(self, x: Any, dtype: DType) -> Array:
        """An array of a dtype's values."""
        if dtypes.is_float(dtype): return np.asarray(x, np.float64) if self.exact else round_to(x, dtype)
        return np.asarray(x).astype(_PLAIN[dtype])

    # **** values ****

    def do_constant(self, op: Op) -> Any: return self.to(op.attributes["value"], op.result.dtype)
    def do_program_id(self, op: Op) -> Any: return np.int32(self.place[op.attributes["axis"]])
    def do_iota(self, op: Op) -> Any: return np.arange(op.result.shape[0], dtype=np.int32)
    def do_broadcast(self, op: Op, x: Any) -> Any: return np.broadcast_to(x, op.result.shape)
    def do_reshape(self, op: Op, x: Any) -> Any: return np.reshape(x, op.result.shape)
    def do_transpose(self, op: Op, x: Any) -> Any: return np.transpose(x, op.attributes["permutation"])
    def do_barrier(self, op: Op) -> None: pass

    def do_apply(self, op: Op, *given: Any) -> Any:
        with np.errstate(all="ignore"): made = FUNCTIONS[op.attributes["fn"]](*given)
        return self.to(made, op.result.dtype)

    def do_cast(self, op: Op, x: Any) -> Any:
        source, dtype = op.operands[0].dtype, op.result.dtype
        if dtype == dtypes.bool: return np.asarray(x) != 0
        if not dtypes.is_float(source) or dtypes.is_float(dtype): return self.to(x, dtype)
        with np.errstate(all="ignore"): whole = np.trunc(np.nan_to_num(np.asarray(x, np.float64)))
        low, high = (0, 2**32 - 1) if dtype == dtypes.uint32 else (-2**31, 2**31 - 1)
        return np.clip(whole, low, high).astype(np.int64).astype(_PLAIN[dtype])

    def do_bitcast(self, op: Op, x: Any) -> Any:
        kind = np.float32 if op.result.dtype == dtypes.float32 else _PLAIN[op.result.dtype]
        return np.ascontiguousarray(x).view(kind)

    def do_halves(self, op: Op, x: Any) -> Any:
        words = np.ascontiguousarray(x)[..., None]
        if op.result.dtype == dtypes.float16: return words.view(np.float16).astype(np.float32)
        return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def do_deinterleave(self, op: Op, x: Any) -> Any: return x[..., op.attributes["odd"]::2]

    def do_interleave(self, op: Op, x: Any, y: Any) -> Any:
        return np.stack([x, y], -1).reshape(op.result.shape)

    # **** along an axis ****

    def do_reduce(self, op: Op, *given: Any) -> Any:
        axis = op.attributes["axis"]
        if not op.regions:
            with np.errstate(all="ignore"): made = REDUCTIONS[op.attributes["fn"]](given[0], axis)
            return self.to(made, op.result.dtype)
        return self._fold_partials(op, [np.moveaxis(x, axis, 0) for x in given])[-1]

    def do_scan(self, op: Op, *given: Any) -> Any:
        axis, back = op.attributes["axis"], op.attributes["reverse"]
        moved = [np.moveaxis(x, axis, 0)[::-1 if back else 1] for x in given]
        steps = self._fold_partials(op, moved)
        made = [np.stack([step[i] for step in steps])[::-1 if back else 1] for i in range(len(given))]
        return [np.moveaxis(x, 0, axis) for x in made]

    def _fold_partials(self, op: Op, moved: list[Any]) -> list[list[Any]]:
        """Partial results along the first axis."""
        state = [x[0] for x in moved]
        steps = [state]
        for i in range(1, moved[0].shape[0]):
            other = [x[i] for x in moved]
            with np.errstate(all="ignore"):
                state = self.region(op.regions[0], (*state, *other)) if op.regions else \
                    [self.to(FUNCTIONS[op.attributes["fn"]](state[0], other[0]), op.results[0].dtype)]
            steps.append([np.broadcast_to(x, moved[0].shape[1:]) for x in state])
        return steps

    def do_gather(self, op: Op, x: Any, index: Any) -> Any:
        return np.take_along_axis(np.asarray(x), np.asarray(index), op.attributes["axis"])

    def do_sort(self, op: Op, x: Any) -> Any:
        made = np.sort(x, axis=op.attributes["axis"])
        return np.flip(made, op.attributes["axis"]) if op.attributes["descending"] else made

    def do_rank(self, op: Op, x: Any) -> list[Any]:
        ranks, counts = np.zeros(op.results[0].shape, np.int32), np.zeros(op.attributes["bins"], np.int32)
        for i, number in enumerate(x):
            if 0 <= number < len(counts): ranks[i], counts[number] = counts[number], counts[number] + 1
        return [ranks, counts]

    def do_dot(self, op: Op, a: Any, b: Any, acc: Any) -> Any:
        kind = np.float64 if dtypes.is_float(op.result.dtype) else np.int64
        with np.errstate(all="ignore"): return self.to(acc + np.asarray(a, kind) @ np.asarray(b, kind),
                                                       op.result.dtype)

    # **** memory ****

    def do_load_block(self, op: Op, *starts: Any) -> Any:
        tensor, memory = self._tensor(op)
        made = np.full(op.result.shape, op.attributes["other"], memory.dtype)
        inside, outside = _overlap(tensor, op.attributes["sizes"], starts)
        if inside is not None: made[outside] = memory.reshape(tensor.shape)[inside]
        return self.to(made, op.result.dtype)

    def do_store_block(self, op: Op, *given: Any) -> None:
        tensor, memory = self._tensor(op)
        inside, outside = _overlap(tensor, op.attributes["sizes"], given[:-1])
        if inside is not None: memory.reshape(tensor.shape)[inside] = np.asarray(given[-1])[outside]

    def do_load(self, op: Op, offsets: Any, inside: Any, other: Any) -> Any:
        memory = self._tensor(op)[1].reshape(-1)
        found = memory[np.where(inside, offsets, 0)] if memory.size else np.zeros(op.result.shape)
        return self.to(np.where(inside, found, other), op.result.dtype)

    def do_store(self, op: Op, offsets: Any, value: Any, inside: Any) -> None:
        memory = self._tensor(op)[1].reshape(-1)
        memory[np.asarray(offsets)[inside]] = np.broadcast_to(value, np.shape(offsets))[inside]

    def do_atomic(self, op: Op, offsets: Any, value: Any, inside: Any) -> Any:
        memory = self._tensor(op)[1].reshape(-1)
        before = np.zeros(op.result.shape, memory.dtype)
        fn = FUNCTIONS.get(op.attributes["fn"], lambda old, new: new)
        for at in np.ndindex(op.result.shape):
            if not np.asarray(inside)[at]: continue
            offset = np.asarray(offsets)[at]
            before[at] = memory[offset]
            with np.errstate(all="ignore"): memory[offset] = fn(memory[offset], np.asarray(value)[at])
        return self.to(before, op.result.dtype)

    def _tensor(self, op: Op) -> tuple[TensorParameter, Array]:
        name = op.attributes["tensor"]
        if (tensor := self.program.tensor(name)).among:
            found = self.memory[self.chosen[name]]
            return replace(tensor, shape=(1, found.size)), found
        return tensor, self.memory[name]

    def do_select(self, op: Op, index: Any) -> list[Any]:
        """Takes one of each list."""
        place = min(max(int(index), 0), len(op.attributes["lengths"]) - 1)
        for name in op.attributes["choices"]: self.chosen[name] = self.program.tensor(name).among[place]
        lists = [select_numbers(op, value) for value in op.results]
        return [np.int32(each[min(place, len(each) - 1)]) for each in lists]

    def do_promise(self, op: Op, x: Any) -> None:
        """Raises `NumericsError` for a tile that is not what it is promised to be."""
        said, broken = op.attributes, int((~np.isfinite(x)).sum())
        least, most = float(np.min(x)), float(np.max(x))
        where = f"{said['at']}: {said['name']} in program {self.place} of kernel {self.program.name}"
        wanted = f"numbers of {said['least']:g} … {said['most']:g}"
        if said["stable"] and broken:
            raise NumericsError(f"{where} has {broken} of {np.size(x)} elements that are NaN or infinite",
                                wanted)
        if least < said["least"] or most > said["most"]:
            raise NumericsError(f"{where} has elements of {least:g} … {most:g}", wanted,
                                "scale its operands, or state a wider range")

    # **** control ****

    def do_for(self, op: Op, start: Any, stop: Any, step: Any, *state: Any) -> list[Any]:
        now = list(state)
        for i in range(int(start), int(stop), int(step)): now = self.region(op.regions[0],
                                                                            (np.int32(i), *now))
        return now

    def do_while(self, op: Op, *state: Any) -> list[Any]:
        now = list(state)
        while self.region(op.regions[0], tuple(now))[0]: now = self.region(op.regions[1], tuple(now))
        return now

    def do_where_needed(self, op: Op, condition: Any, other: Any) -> Any:
        return np.where(condition, self.region(op.regions[0])[0], other)

    def do_if(self, op: Op, condition: Any) -> list[Any]: return self.region(op.regions[0 if condition
                                                                                        else 1])


def _overlap(tensor: TensorParameter, sizes: tuple[int, ...], starts: Any) -> Any:
    """Returns where a block lies inside of a tensor, and that part of the block; None and None if nowhere."""
    inside, outside = list[Any](), list[Any]()
    for extent, size, start in zip(tensor.shape, sizes, map(int, starts), strict=True):
        if not size:
            if not 0 <= start < extent: return None, None
            inside.append(start)
            continue
        first, last = max(start, 0), min(start + size, extent)
        if first >= last: return None, None
        inside.append(slice(first, last))
        outside.append(slice(first - start, last - start))
    return tuple(inside), tuple(outside)


def run(program: Program, arrays: Mapping[str, Array], exact: bool = False) -> dict[str, Array]:
    """The outputs of a program by name. What no program writes of an output is 0 where it was not given."""
    memory: dict[str, Array] = {}
    for each in program.tensors:
        kind = (np.float64 if exact else np.float32) if dtypes.is_float(each.dtype) else _PLAIN[each.dtype]
        given = arrays.get(each.name, np.zeros(each.shape))
        memory[each.name] = np.array(given, kind).reshape(each.shape)
    x, y, z = program.grid
    for k in range(z):
        for j in range(y):
            for i in range(x): _Run(program, memory, (i, j, k), exact).region(program.body)
    return {each.name: memory[each.name] for each in program.tensors if each.output}


def of_numbers(op: Op, *given: float) -> float:
    """Returns what a constant, an element operation or a cast makes of tiles with the same number
    throughout."""
    one = _Run(Program("", (), (1, 1, 1), Region()), {}, (0, 0, 0), False)
    numbers = [one.to(x, each.dtype) for x, each in zip(given, op.operands, strict=True)]
    return float(getattr(one, f"do_{op.name}")(op, *numbers))


# **** element operations ****

def _quotient(a: Any, b: Any) -> Any:
    wide, by = np.asarray(a, np.int64), np.asarray(b, np.int64)
    return np.where(by == 0, 0, np.abs(wide) // np.maximum(np.abs(by), 1) * np.sign(wide) * np.sign(by))


def _shift(left: bool) -> Callable[..., Any]:
    def shift(a: Any, b: Any) -> Any:
        wide, by = np.asarray(a, np.int64), np.clip(np.asarray(b, np.int64) & 0xFFFFFFFF, 0, 32)
        return wide << by if left else wide >> by
    return shift


def _integers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Exact of floats and of integers, which wrap later."""
    def run(a: Any, b: Any) -> Any:
        kind = np.asarray(a).dtype
        return fn(a, b) if kind.kind == "f" else fn(np.asarray(a, np.int64), np.asarray(b, np.int64))
    return run


def _mul_high(a: Any, b: Any) -> Any:
    if np.asarray(a).dtype != np.uint32: return np.asarray(a, np.int64) * np.asarray(b, np.int64) >> 32
    return np.asarray(a, np.uint64) * np.asarray(b, np.uint64) >> np.uint64(32)


def _remainder(a: Any, b: Any) -> Any:
    return np.where(np.asarray(b) == 0, 0, np.asarray(a, np.int64) - _quotient(a, b) * b)


def _wide(x: Any) -> Any: return np.float64 if np.asarray(x).dtype.kind == "f" else np.int64


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": _integers(np.add), "sub": _integers(np.subtract), "mul": _integers(np.multiply), "max": np.fmax,
    "min": np.fmin, "reciprocal": lambda x: 1 / np.asarray(x), "div": np.divide, "round": np.round,
    "exp2": np.exp2, "exp2_small": np.exp2,
    "log2": np.log2, "sqrt": np.sqrt, "sin": np.sin, "floor": np.floor, "abs": np.abs,
    "less": np.less, "not_equal": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "where": np.where, "quotient": _quotient, "remainder": _remainder,
    "shift_left": _shift(True), "shift_right": _shift(False), "mul_high": _mul_high,
    "funnel_left": lambda low, high, by: (np.asarray(high, np.int64) << (by & 31)) | (
        (np.asarray(low, np.int64) & 0xFFFFFFFF) >> 32 - (np.asarray(by, np.int64) & 31)),
    "log_normal": np.log, "log_near_one": np.log,
    "fma": lambda a, b, c: np.float64(a) * np.float64(b) + np.float64(c)}
REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, axis: np.sum(x, axis, dtype=_wide(x)),
    "mul": lambda x, axis: np.prod(x, axis, dtype=_wide(x)),
    **{name: (lambda x, axis, fn=fn: fn.reduce(x, axis)) for name, fn in (
        ("max", np.fmax), ("min", np.fmin), ("and", np.bitwise_and), ("or", np.bitwise_or),
        ("xor", np.bitwise_xor))}}
