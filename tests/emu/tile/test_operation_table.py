"""Every row of tile/operations.py: PTX on the emulator and C on the CPU compute what Python's value is, for
every dtype that the row has a cell for; the slope is that of the value; tinygrad's operation has the same
value. A new row is tested without a new test.

Protocol: a case is an operation, the dtype of its arguments and that of its result; its arguments are all
combinations of EDGES (of `cast`: numbers that every dtype holds). Where Python has no value, as of 1 / 0, the
PTX's result is what the C must give.
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops, python_alu

from tests.support.cpu.cpu_vector_case import LEVELS
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.cpu import expression as cpu
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import c_type, kernel
from tinygrad_nv.patterns.epilogue import NAMES
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile import epilogue as gpu
from tinygrad_nv.tile.access import advance, read, write
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import FLOATS, Apply, Constant, Expression, Load, Sum, nearest, short
from tinygrad_nv.tile.lanes import FP8, SUPPORTED, Lanes
from tinygrad_nv.tile.operations import OPERATIONS, Number, fold

KINDS = {**TORCH, dtypes.uint16: torch.uint16, dtypes.uint32: torch.uint32}
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.1, -7.3, 3.0, 300.0, 2.0**-9, 1 + 2**-7]
MOST, SLOT = 512, 2048      # combinations of arguments, and bytes for those of one case
ARCHS = ["sm_80", "sm_90a"]
rows = pytest.mark.parametrize("op", OPERATIONS)


class Case(NamedTuple):
    """An operation, the dtype of its arguments (of "where" those after the condition) and of its result."""
    op: str
    source: DType
    target: DType

    @property
    def sources(self) -> tuple[DType, ...]:
        count = OPERATIONS[self.op].arity
        return (dtypes.bool, self.source, self.source) if count == 3 else (self.source,) * count

    @property
    def wide(self) -> DType:
        """The dtype that a result is stored in: of short ones a wider, which shows whether it was rounded."""
        if dtypes.is_float(self.target): return dtypes.float32
        return self.target if self.target in (dtypes.bool, dtypes.uint32) else dtypes.int32

    @property
    def node(self) -> Expression:
        loads = (Load(i, dtype, 0, 1) for i, dtype in enumerate(self.sources))
        return Apply(self.op, tuple(loads), self.target).cast(self.wide)


def cases(op: str) -> list[Case]:
    """All dtypes, whether a target has them or not."""
    row = OPERATIONS[op]
    if op == "cast": return [Case(op, *both) for both in itertools.product(SUPPORTED, SUPPORTED)]
    return [Case(op, dtype, dtypes.bool if row.compares else dtype) for dtype in SUPPORTED]


def edges(dtype: DType) -> list[Number]:
    """Numbers of a dtype: extreme, small, none."""
    if dtype == dtypes.bool: return [False, True]
    if dtypes.is_int(dtype):
        low, high = int(dtype.min), int(dtype.max)
        some = [low, low + 1, 0, 1, 2, 3, 7, 77, high // 2 + 1, high - 1, high, -1 if low else 5]
        return list(dict.fromkeys(some))
    mantissa, smallest, largest = FLOATS[dtype]
    extreme = [largest, -largest, 2.0**smallest, 2.0**(smallest - mantissa), math.inf, math.nan]
    return [nearest(x, dtype) for x in (*NUMBERS, *extreme)]


@functools.cache
def arguments(case: Case) -> tuple[tuple[Number, ...], ...]:
    """The arguments of each element."""
    if case.op == "cast":
        usable = [0, 1, 2, 3, 7, 64, 100]
        if dtypes.is_float(case.source): usable += [0.25, 2.5, 5.75, 96.5]
        return tuple((rounded(x, case.source),) for x in usable)
    made = tuple(itertools.product(*(edges(dtype) for dtype in case.sources)))
    assert len(made) <= MOST
    return made


def rounded(x: Number, dtype: DType) -> Number:
    """A number as a dtype has it: floats to nearest, integers towards 0 and wrapped."""
    if dtype == dtypes.bool: return bool(x)
    if dtypes.is_float(dtype): return nearest(float(x), dtype)
    whole, bits = int(x) & (1 << 8 * dtype.itemsize) - 1, 8 * dtype.itemsize
    return whole - (1 << bits) * (not dtypes.is_unsigned(dtype) and whole >> bits - 1)


def values(case: Case) -> list[Number | None]:
    """Python's, None where it has none."""
    found = (args[0] if case.op == "cast" else fold(case.op, *args) for args in arguments(case))
    return [None if value is None else rounded(value, case.target) for value in found]


def alike(case: Case, got: Number, want: Number, ulps: float) -> bool:
    """Equal, down to the sign of 0 unless the result is an argument. Approximated functions: within `ulps`
    units of float32, one of a shorter dtype, or 2^-20. Always a number of the result's dtype."""
    if want != want or got != got: return want != want and got != got
    if rounded(got, case.target) != got: return False
    row = OPERATIONS[case.op]
    if got == want: return row.exact or math.copysign(1, got) == math.copysign(1, want)
    if row.cost == 1 or not (math.isfinite(got) and math.isfinite(want)): return False
    mantissa, smallest, _ = FLOATS[case.target]
    unit = math.ldexp(1.0, max(math.frexp(want)[1] - 1, smallest) - mantissa)
    return abs(got - want) <= unit * (ulps if case.target == dtypes.float32 else 1) + 2.0**-20


def check(case: Case, got: Sequence[Number], want: Sequence[Number | None], ulps: float) -> None:
    wrong = [(args, x, y) for args, x, y in zip(arguments(case), got, want, strict=True)
             if y is not None and not alike(case, x, y, ulps)]
    assert not wrong, f"{case.op} of {short(case.source)} to {short(case.target)}: {wrong[:4]}"


# **** memory ****

def stored(numbers: Sequence[Number], dtype: DType) -> np.ndarray:
    """Numbers as bytes of a slot, the last one repeated to the end."""
    filled = [*numbers, *[numbers[-1]] * (MOST - len(numbers))]
    made = np.zeros(SLOT, np.uint8)
    data = torch.tensor(filled, dtype=KINDS[dtype]).view(torch.uint8).numpy()
    made[:len(data)] = data
    return made


def taken(slot: np.ndarray, dtype: DType, count: int) -> list[Number]:
    """The first numbers of a slot."""
    part = torch.from_numpy(slot[:count * dtype.itemsize].copy()).view(KINDS[dtype])
    return (part.double() if dtypes.is_float(dtype) else part).tolist()


def operands(some: Sequence[Case]) -> list[np.ndarray]:
    """Three buffers, of each a slot for a case."""
    made = [np.zeros(SLOT * len(some), np.uint8) for _ in range(3)]
    for number, case in enumerate(some):
        columns = zip(*arguments(case), strict=True)
        for buffer, column, dtype in zip(made, columns, case.sources, strict=False):
            buffer[number * SLOT:(number + 1) * SLOT] = stored(column, dtype)
    return made


# **** PTX ****

@dataclass
class Elements:
    """Elements side by side, of slot `slot` of the operands."""
    k: Kernel
    pointers: list[Value]
    first: Value
    slot: int
    width: int

    def at(self, parameter: int, dtype: DType) -> Value:
        return advance(self.k, self.pointers[parameter] + self.slot * SLOT, self.first, dtype.itemsize)

    def load(self, load: Load, row: int, pair: int) -> Lanes:
        return read(self.k, self.at(load.parameter, load.dtype), 0, load.dtype, self.width)

    def sums(self, part: int, row: int, pair: int) -> Sequence[Value]: raise AssertionError

    def position(self, axis: str | int, row: int, pair: int) -> Sequence[Value]: raise AssertionError


def on_gpu(arch: str, some: Sequence[Case], width: int) -> list[list[Number]]:
    """What PTX makes of cases, a thread `width` elements."""
    k = Kernel("operations", arch=arch, threads=MOST // width)
    pointers = [k.pointer(name) for name in ("x0", "x1", "x2", "out")]
    for slot, case in enumerate(some):
        elements = Elements(k, pointers, k.tid.x * width, slot, width)
        write(k, elements.at(3, case.wide), 0, EpilogueEmitter(k, case.node, elements, width).at(0, 0), width)
    emu = Emulator(arch)
    given = [emu.alloc(buffer) for buffer in (*operands(some), np.zeros(SLOT * len(some), np.uint8))]
    assert emu.launch(k.ptx(), (1, 1, 1), MOST // width, given).findings == []
    out = given[3].numpy().view(np.uint8).reshape(-1, SLOT)
    return [taken(slot, case.wide, len(arguments(case))) for slot, case in zip(out, some, strict=True)]


def of_gpu(op: str, arch: str) -> list[Case]:
    return [case for case in cases(op) if not gpu.problems(case.node, arch)]


@pytest.mark.sampled(28)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [1, 2])
@rows
def test_ptx_computes_the_value(op: str, arch: str, width: int):
    """One element at a time, and two. Functions are approximated to some units of float32."""
    some = of_gpu(op, arch)
    assert some
    for case, got in zip(some, on_gpu(arch, some, width), strict=True): check(case, got, values(case), ulps=4)


@rows
def test_a_gpu_computes_what_has_a_cell(op: str):
    """Nothing else: where a cell is empty, the operation is refused by name and dtype."""
    row = OPERATIONS[op]
    for case in cases(op):
        found = gpu.problems(case.node, "sm_90a")
        there = op == "cast" or row.ptx(case.source)
        assert found == ([] if there else [f"{op} of {short(case.source)} in an epilogue"])
    assert row.ptx_pair == "" or row.ptx_f32
    assert row.ptx_fused is None or row.ptx_pair


def test_eight_bit_floats_need_sm_89():
    refused = [case for case in cases("add") if gpu.problems(case.node, "sm_80")]
    assert {case.source for case in refused} == set(FP8)


# **** C ****

def of_cpu(op: str) -> list[Case]:
    return [case for case in cases(op) if not cpu.problems(case.node)]


@functools.cache
def on_cpu(level: ISA) -> dict[Case, list[Number]]:
    """What C makes of every case, a vector at a time and a part of one at last."""
    some = [case for op in OPERATIONS for case in of_cpu(op)]
    text = []
    for slot, case in enumerate(some):
        lines, value = statements(case.node, LanePlace([], "0", "i", [], "left"))
        pointers = [f"const {c_type(dtype)} *x{i} = (const {c_type(dtype)} *)(a{i} + {slot * SLOT});"
                    for i, dtype in enumerate(case.sources)]
        to = f"({c_type(case.wide)} *)(out + {slot * SLOT}) + i"
        text.append(f"{{ {' '.join(pointers)} for (s64 i = 0; i < {len(arguments(case))}; i += W) {{ "
                    f"const s64 left = {len(arguments(case))} - i; {' '.join(lines)} "
                    f"store_n_{short(case.wide)}({to}, {value}, left); }} }}")
    inputs = [("u8", f"a{i}") for i in range(3)]
    made = load(kernel("operations", level, "\n".join(text), [("u8", "out")], inputs))
    out = np.zeros(SLOT * len(some), np.uint8)
    made(out, *operands(some))
    slots = out.reshape(-1, SLOT)
    return {case: taken(slot, case.wide, len(arguments(case)))
            for slot, case in zip(slots, some, strict=True)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_c_computes_the_value(level: ISA):
    """And where Python has none, what PTX has. A NaN that comes first stays in max and min."""
    made = on_cpu(level)
    for op in OPERATIONS:
        for case in of_cpu(op):
            want = values(case)
            if None in want:
                other, = on_gpu("sm_90a", [case], 1)
                want = [y if x is None else x for x, y in zip(want, other, strict=True)]
            if op in ("max", "min"):
                pairs = zip(arguments(case), want, strict=True)
                want = [args[0] if args[0] != args[0] else x for args, x in pairs]
            check(case, made[case], want, ulps=16)


@rows
def test_a_cpu_computes_what_has_a_cell(op: str):
    row = OPERATIONS[op]
    for case in cases(op):
        words = f"{op} of {short(case.source)}" if row.on_cpu else op
        there = op == "cast" or row.c(case.source)
        assert cpu.problems(case.node) == ([] if there else [f"{words} in an epilogue"])


@rows
def test_both_targets_compute_the_same(op: str):
    """For the same dtypes: a cell that one target lacks is a kernel that one target refuses."""
    on_gpu, on_cpu = of_gpu(op, "sm_90a"), of_cpu(op)
    assert (on_gpu and not on_cpu) if op == "sin" else on_gpu == on_cpu


# **** slope, graph ****

def evaluated(node: Expression, x: float) -> float | None:
    """An expression of a sum in float64, without rounding; None where it has no value."""
    if isinstance(node, Sum): return x
    if isinstance(node, Constant): return node.value
    assert isinstance(node, Apply)
    args = [evaluated(arg, x) for arg in node.args]
    if any(arg is None for arg in args): return None
    return args[0] if node.op == "cast" else fold(node.op, *(arg for arg in args if arg is not None))


def compared(score: Expression) -> int:
    """At how many points a derivative is that of differences of the value, where there are both."""
    slope, count = derivative(score), 0
    for x in (-40.2, -3.1, -0.9, -0.2, 0.03, 0.4, 1.3, 2.7, 8.4, 40.2):  # off integers, where roundings jump
        step = 2.0**-21 * max(1.0, abs(x))
        low, high, got = evaluated(score, x - step), evaluated(score, x + step), evaluated(slope, x)
        if low is None or high is None or got is None: continue
        want = (high - low) / (2 * step)
        assert abs(got - want) <= 1e-6 * max(1.0, abs(want), abs(high)), (x, got, want)
        count += 1
    return count


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16])
@rows
def test_the_slope_is_that_of_the_value(op: str, dtype: DType):
    """By each argument alone, the others being constants on either side, and by all of them."""
    row = OPERATIONS[op]
    floats = op == "cast" or (row.ptx_f32 and not row.compares)
    assert (row.slope is not None) == bool(floats), "floats have a slope, nothing else has"
    if not floats: return
    x, condition = Sum(dtype), [Sum(dtype) < 0.7] * (row.arity == 3)
    moving = [x * 0.75 + 0.5, x * x * 0.25 - 2.0]
    free = row.arity - len(condition)
    chosen = [moving[:free], moving[::-1][:free]]
    for i in range(free):
        for fixed in (Constant(-1.5, dtype), Constant(2.0, dtype)):
            chosen.append([x if i == j else fixed for j in range(free)])
    for args in chosen:
        assert compared(Apply(op, (*condition, *args), dtype)) >= 4, args


@rows
def test_the_graph_has_the_same_operation(op: str):
    """tinygrad's own evaluation of constants gives the value; no other row has the same member of Ops."""
    graph = OPERATIONS[op].graph
    if not graph:
        assert op not in NAMES.values()
        return
    assert NAMES[Ops[graph]] == op
    if Ops[graph] not in python_alu: return
    for case in cases(op):
        if not (OPERATIONS[op].ptx(case.source)): continue
        for args in arguments(case):
            want = fold(op, *args)
            if want is None or any(arg != arg for arg in args): continue  # tinygrad's max of NaN is another
            theirs = rounded(python_alu[Ops[graph]](*args), case.target)
            assert alike(case, theirs, rounded(want, case.target), ulps=0), args


def test_only_cast_has_no_value():
    assert [row.name for row in OPERATIONS.values() if row.value is None] == ["cast"]
    assert len({row.graph for row in OPERATIONS.values() if row.graph}) == len(NAMES)
    for op, x in (("reciprocal", 0.0), ("log2", -1.0), ("exp2", 1e9), ("cast", 1)):
        assert fold(op, x) is None
