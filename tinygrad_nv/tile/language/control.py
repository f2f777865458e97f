"""Loops and branches of a program.

Protocol: source.py turns `for`, `while` and `if` of a user's function into calls of `loop`, `repeat` and
`branch`, with the statement's body as a function of the variables that it assigns:

    state = loop(iterable, body, names, state)          body(item, *state) -> state
    state = repeat(condition, body, names, state)       condition(*state) -> bool, body(*state) -> state
    state = branch(condition, then, otherwise, names, state)

Over Python's own values they run the body as Python would. Over a `Range`, or a scalar that only the running
kernel knows, they write an operation whose region is the body. A variable that the body leaves as it was is
not carried; one that it changes is a tile that enters each iteration and leaves it with one dtype and shape.
A Python number that a body changes becomes such a tile, of the type that the body gives it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language import roles
from tinygrad_nv.tile.language.bounds import at_least
from tinygrad_nv.tile.language.ir import Region, TileType
from tinygrad_nv.tile.language.memory import Block
from tinygrad_nv.tile.language.trace import current, fail, tracing
from tinygrad_nv.tile.language.values import Operand, Tile, cast, describe, scalar

GROUPS = (tuple, list, dict)     # of which elements are carried
PASSES = 8   # of a body until the types of what it carries stay


class Undefined:
    """A variable without a value: its use is an error that names it."""

    def __init__(self, name: str) -> None: self.name = name

    def __tile__(self) -> NoReturn: self._fail()
    def __bool__(self) -> NoReturn: self._fail()
    def __index__(self) -> NoReturn: self._fail()
    def __iter__(self) -> NoReturn: self._fail()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"): raise AttributeError(name)
        self._fail()

    def _fail(self) -> NoReturn:
        fail(f"variable {self.name!r} has no value here", "a value before the loop or branch that assigns it",
             f"assign {self.name} first, for example {self.name} = tile.zeros(…)")


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "gt", "le", "ge",
              "eq",
              "ne", "neg", "abs", "invert", "getitem", "setitem", "and", "rand", "or", "ror", "xor", "rxor",
              "matmul", "rmatmul", "mod", "rmod", "floordiv", "rfloordiv", "pow", "rpow", "lshift", "rlshift",
              "rshift", "rrshift", "len", "call", "contains", "float", "int", "str", "format"):
    setattr(Undefined, f"__{_name}__", lambda self, *_: self._fail())


@dataclass(frozen=True, eq=False)
class Range:
    """Indices of a loop: start, start + step, … below stop. With a block size the loop's variable is the
    `Block` that begins there. `stages`: how many iterations ahead its loads may begin. `unroll`: whether
    compilers may write several iterations one after the other."""
    start: Operand
    stop: Operand
    step: int = 1
    block: int = 0
    stages: int = 0
    unroll: bool = True

    def item(self, index: Tile) -> Any: return Block(index, self.block, self._stop) if self.block else index

    @property
    def _stop(self) -> Operand | None:
        """The end of the axis, where blocks reach beyond it."""
        known = isinstance(self.start, int) and isinstance(self.stop, int)
        return None if known and (self.stop - self.start) % self.block == 0 else self.stop

    def __iter__(self) -> NoReturn:
        fail("a tile.range that Python iterates over",
             "a `for` statement in a kernel whose source can be read",
             "write the loop as a statement of a function in a file, not in exec or a comprehension")


def range_(start: Operand, stop: Operand | None = None, step: int = 1, *, stages: int = 0,
           prefetch: int = 0, unroll: bool = True) -> Range:
    """Indices of a loop of the program, as Python's range; `step` is a positive constant. Without `unroll`
    the body is compiled once: for a long one of few iterations."""
    first, last = (0, start) if stop is None else (start, stop)
    if isinstance(step, Tile) or int(step) < 1:
        fail(f"step={step!r}", "a positive constant", "count up, and subtract in the body; or use `while`")
    return Range(first, last, int(step), 0, stages or prefetch, unroll)


def blocks(extent: Operand, block: Any, *, start: Operand = 0, prefetch: int = 0) -> Range:
    """The blocks of an axis, from `start` (a multiple of the block) to `extent`."""
    return Range(start, extent, int(block), int(block), prefetch)


def is_dynamic(x: Any) -> bool:
    """Whether only the running kernel knows a scalar."""
    if not isinstance(x, Tile) or not tracing(): return False
    return current().constant_of(x.value) is None


# **** state ****

def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tile) and isinstance(b, Tile): return a.value is b.value
    if a is b: return True
    plain = (bool, int, float, str)
    if isinstance(a, plain) and isinstance(b, plain): return type(a) is type(b) and (a == b
                                                                                     or (a != a and b != b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return False


def _leaves(x: Any) -> list[Any]:
    if not isinstance(x, GROUPS): return [x]
    return [leaf for each in (x.values() if isinstance(x, dict) else x) for leaf in _leaves(each)]


def _over(x: Any, leaves: list[Any]) -> Any:
    """A variable's tuples, lists and dicts, new ones, with other leaves."""
    if not isinstance(x, GROUPS): return leaves.pop(0)
    if isinstance(x, dict): return {key: _over(each, leaves) for key, each in x.items()}
    parts = [_over(each, leaves) for each in x]
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


def _copy_state(state: Sequence[Any]) -> list[Any]:
    """Variables for a body, which may change elements of lists and dicts."""
    return [_over(x, _leaves(x)) if isinstance(x, GROUPS) else x for x in state]


class _Carried:
    """Variables that a body changes: for each name, the types of its leaves; () for those that it leaves
    alone."""

    def __init__(self, names: Sequence[str], state: Sequence[Any], what: str) -> None:
        self.names, self.state, self.what = names, list(state), what
        self.types: list[list[TileType] | None] = [None] * len(names)

    def initial(self) -> list[Tile]:
        """The values that enter."""
        return [self._fit(leaf, to, name) for name, x,
                types in zip(self.names, self.state, self.types, strict=True)
                if types is not None for leaf, to in zip(_leaves(x), types, strict=True)]

    def _fit(self, leaf: Any, to: TileType, name: str) -> Tile:
        if not isinstance(leaf, Tile): return _fit_leaf(leaf, to)
        if leaf.value.type != to:
            fail(f"{name} enters the {self.what} as {describe(leaf)} and leaves it as {to}",
                 "one shape and dtype",
                 f"make it {to} from the beginning, or cast it at the end of the body")
        return leaf

    @property
    def names_of_changes(self) -> list[str]:
        """Names of what is carried."""
        return [name for name, types in zip(self.names, self.types, strict=True) if types is not None]

    def flat_types(self) -> list[TileType]:
        return [to for types in self.types if types is not None for to in types]

    def inside(self, values: Sequence[Any]) -> list[Any]:
        """The state, with values in the places of what is carried."""
        left = list(values)
        return [x if types is None else _over(x, [left.pop(0) for _ in types])
                for x, types in zip(self.state, self.types, strict=True)]

    def is_stable(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Whether a body's results are of the types that entered; notes what else it changes."""
        good = True
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            if isinstance(self.state[i], Undefined): continue
            if self.types[i] is None and _same(old, new): continue
            found = self._types(i, new)
            if found != self.types[i]: self.types[i], good = found, False
        return good

    def _types(self, i: int, new: Any) -> list[TileType]:
        name, old = self.names[i], _leaves(self.state[i])
        leaves = _leaves(new)
        if len(leaves) != len(old):
            fail(f"{name} is {len(old)} values before the {self.what} and {len(leaves)} after", "as many")
        return [self._type(a, b, name) for a, b in zip(old, leaves, strict=True)]

    def _type(self, old: Any, new: Any, name: str) -> TileType:
        if isinstance(new, Tile): return new.value.type
        if not isinstance(new, (bool, int, float)) or not isinstance(old, (Tile, bool, int, float)):
            fail(f"{name} is {old!r} before the {self.what} and {new!r} after",
                 "tiles and numbers change in a loop of the kernel; other objects stay",
                 "use `for … in range(…)` of constants to unroll the loop")
        if isinstance(old, Tile): return old.value.type
        if isinstance(new, bool): return TileType(dtypes.bool)
        return TileType(dtypes.float32 if isinstance(new, float) or isinstance(old, float) else dtypes.int32)

    def yields(self, after: Sequence[Any]) -> list[Tile]:
        return [self._fit(leaf, to, name)
                for name, x, types in zip(self.names, after, self.types, strict=True) if types is not None
                for leaf, to in zip(_leaves(x), types, strict=True)]

    def after(self, values: Sequence[Any]) -> list[Any]:
        """The state behind the statement."""
        return [Undefined(name) if isinstance(x, Undefined) else x
                for name, x in zip(self.names, self.inside(values), strict=True)]


def _fit_leaf(leaf: Any, to: TileType) -> Tile:
    """A number, or a tile that has the type already, as a tile of a type."""
    made = cast(scalar(leaf, to.dtype), to.dtype)
    return made if made.shape == to.shape else made.broadcast_to(*to.shape)


# **** statements ****

def loop(iterable: Any, body: Callable[..., Sequence[Any]], names: Sequence[str],
         state: Sequence[Any]) -> list[Any]:
    """A `for` statement."""
    if not isinstance(iterable, Range):
        for item in iterable: state = body(item, *state)
        return list(state)
    trace, carried = current(), _Carried(names, state, "loop")
    bounds = [_loop_bound(each) for each in (iterable.start, iterable.stop)]
    for _ in range(PASSES):
        initial = carried.initial()
        with trace.region([TileType(dtypes.int32), *carried.flat_types()]) as region:
            index, *inside = map(Tile, region.arguments)
            trace.least[index.value] = at_least(bounds[0].value, trace)
            before, item, outer = carried.inside(inside), iterable.item(index), trace.block
            if iterable.block: trace.block = item
            own = roles.Loop(bounds[0].value, bounds[1].value, iterable.step, region, trace.line())
            with roles.inside(trace, own): after = body(item, *_copy_state(before))
            trace.block = outer
            if done := carried.is_stable(before, after):
                region.yields = tuple(each.value for each in carried.yields(after))
            roles.iteration_ended(trace, own, carried.names_of_changes)
        if done: break
    else: _fail_unstable(carried)
    if trace.role is not None and trace.role.name == "producer": return carried.after([])
    step = trace.constant(iterable.step, dtypes.int32)
    rolled = {} if iterable.unroll else {"unroll": False}
    made = trace.emit("for", [*(each.value for each in bounds), step, *(each.value for each in initial)],
                      carried.flat_types(), {"stages": iterable.stages, **own.attributes, **rolled}, [region])
    return carried.after(list(map(Tile, made)))


def _loop_bound(x: Operand) -> Tile:
    if isinstance(x, float): fail(f"{x} as a bound of a loop", "an integer")
    if isinstance(x, int) and not -2**31 <= x < 2**31: fail(f"{x} as a bound of a loop",
                                                            "an integer of 32 bits")
    made = scalar(x, dtypes.int32)
    if made.shape or not dtypes.is_int(made.dtype):
        fail(f"{describe(made)} as a bound of a loop", "an integer, or a scalar of integers",
             "cast it: tile.cast(n, int32)")
    return cast(made, dtypes.int32)


def repeat(condition: Callable[..., Any], body: Callable[..., Sequence[Any]], names: Sequence[str],
           state: Sequence[Any]) -> list[Any]:
    """A `while` statement. Its condition is Python's as long as it is known."""
    trace, state = current() if tracing() else None, list(state)
    while trace is None or not _dynamic_condition(condition, state, trace):
        if not condition(*state): return state
        state = list(body(*state))
    carried = _Carried(names, state, "loop")
    for _ in range(PASSES):
        initial = carried.initial()
        with trace.region(carried.flat_types()) as test:
            found = condition(*_copy_state(carried.inside(list(map(Tile, test.arguments)))))
            test.yields = _truth(found).value,
        with trace.region(carried.flat_types()) as region:
            before = carried.inside(list(map(Tile, region.arguments)))
            after = body(*_copy_state(before))
            if done := carried.is_stable(before, after):
                region.yields = tuple(each.value for each in carried.yields(after))
        if done: break
    else: _fail_unstable(carried)
    made = trace.emit("while", [each.value for each in initial], carried.flat_types(), {}, [test, region])
    return carried.after(list(map(Tile, made)))


def _dynamic_condition(condition: Callable[..., Any], state: Sequence[Any], trace: Any) -> bool:
    with trace.region(): return is_dynamic(condition(*state))


def branch(condition: Any, then: Callable[..., Sequence[Any]], otherwise: Callable[..., Sequence[Any]],
           names: Sequence[str], state: Sequence[Any]) -> list[Any]:
    """An `if` statement."""
    if not is_dynamic(condition): return list((then if condition else otherwise)(*state))
    trace, test = current(), _truth(condition)
    sides: list[tuple[Region, Sequence[Any]]] = []
    for run in (then, otherwise):
        with trace.region() as region: sides.append((region, run(*_copy_state(state))))
    (_, left), (_, right) = sides
    merged = [None if _same(a, b) or isinstance(a, Undefined) or isinstance(b, Undefined)
              else _meeting(name, a, b)
              for name, a, b in zip(names, left, right, strict=True)]
    types = [to for one in merged if one is not None for to in one]
    for region, after in sides:
        with trace.inside(region):
            region.yields = tuple(_fit_leaf(leaf, to).value for one, x in zip(merged, after, strict=True)
                                  if one is not None for leaf, to in zip(_leaves(x), one, strict=True))
    made = list(map(Tile, trace.emit("if", [test.value], types, {}, [region for region, _ in sides])))
    return [(a if _same(a, b) else Undefined(name)) if one is None else _over(a, [made.pop(0) for _ in one])
            for name, one, a, b in zip(names, merged, left, right, strict=True)]


def _meeting(name: str, a: Any, b: Any) -> list[TileType]:
    """The types of a variable that both sides of a branch assign."""
    left, right = _leaves(a), _leaves(b)
    if len(left) != len(right): fail(f"{name} is {len(left)} values or {len(right)}, as a branch goes",
                                     "as many")
    return [_meet(name, x, y) for x, y in zip(left, right, strict=True)]


def _meet(name: str, x: Any, y: Any) -> TileType:
    tiles = [one.value.type for one in (x, y) if isinstance(one, Tile)]
    if len(set(tiles)) == 2:
        fail(f"{name} is {tiles[0]} or {tiles[1]}, as a branch goes", "one shape and dtype on both sides",
             "cast or broadcast one of them")
    if tiles and all(isinstance(one, (Tile, bool, int, float)) for one in (x, y)): return tiles[0]
    if all(isinstance(one, (bool, int, float)) for one in (x, y)):
        if isinstance(x, bool) and isinstance(y, bool): return TileType(dtypes.bool)
        return TileType(dtypes.float32 if isinstance(x, float) or isinstance(y, float) else dtypes.int32)
    fail(f"{name} is {x!r} or {y!r}, as a branch goes", "tiles or numbers",
         "only these can depend on a branch")


def _truth(x: Any) -> Tile:
    made = scalar(x, dtypes.bool)
    if made.shape: fail(f"a condition of {describe(made)}", "a scalar",
                        "use tile.any, tile.all or tile.where")
    return made if made.dtype == dtypes.bool else made != 0


def _fail_unstable(carried: _Carried) -> NoReturn:
    fail(f"the types of {', '.join(carried.names)} change with every iteration", "one shape and dtype",
         "give them their dtype before the loop")
