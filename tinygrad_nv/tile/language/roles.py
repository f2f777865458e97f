"""Roles and pipes: which part of a kernel brings tiles, and which computes with them.

Protocol: a pipe has so many stages in shared memory. Two roles go through loops that are alike, and hand each
stage on:

    pipe = tile.pipe(3)
    with tile.role("producer"):
        for k in tile.range_k(a.shape, T.k):
            pipe.acquire()                          waits until a stage is free
            pipe.commit(a[T.m, k], b[k, T.n])       fills it, and gives it to the consumer
    with tile.role("consumer"):
        for k in tile.range_k(a.shape, T.k):
            x, y = pipe.wait()                      waits until the next stage is filled
            acc = tile.dot(x, y, acc)
            pipe.release()                          gives it back

The meaning is sequential: iteration by iteration, the producer's first. So NumPy and C compute it. On sm_90a
the producer is a warp of its own, whose TMA is up to all stages ahead; on sm_80 and sm_89 the consumer's
threads start its copies, by cp.async, one stage fewer ahead. Full and empty barriers stand where `wait`,
`release`, `acquire` and `commit` do, and products that may stay in flight do (gpu/).

A trace keeps the loops that are being written (`Loop`). The producer's loops are not written: `wait` writes
what makes the committed tiles, with the indices of the consumer's loops for those of the producer's. What a
program does wrong with roles is a `LanguageError` at its line.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tinygrad_nv.tile.language.ir import Line, Region, Value
from tinygrad_nv.tile.language.trace import Trace, current, fail
from tinygrad_nv.tile.language.values import Tile, describe

ROLES = ("producer", "consumer")
MOST_STAGES = 32
BROUGHT = ("load", "load_block")
ALLOWED = ("constant", "program_id", "apply", "cast", "bitcast", "iota", "broadcast", "reshape", "transpose",
           *BROUGHT)
WHAT = {"store": "a store", "store_block": "a store", "atomic": "an atomic", "if": "a branch",
        "while": "a `while` loop"}


@dataclass(eq=False)
class Loop:
    """A loop that is being written. `pipes`: those whose stages its iterations wait for."""
    start: Value
    stop: Value
    step: int
    region: Region
    line: Line | None
    pipes: list[Pipe] = field(default_factory=list)

    @property
    def index(self) -> Value: return self.region.arguments[0]

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes that an operation of this loop has for its pipes."""
        return {"pipe": self.pipes[0].stages} if self.pipes else {}


@contextmanager
def inside(trace: Trace, loop: Loop) -> Iterator[Loop]:
    """A loop whose body is written in the block."""
    trace.loops.append(loop)
    try: yield loop
    finally: trace.loops.pop()


def iteration_ended(trace: Trace, loop: Loop, carried: list[str]) -> None:
    """Behind a loop's body: stages are given back, and a producer has only brought tiles."""
    for pipe in trace.pipes: pipe.end_scope(loop)
    if trace.role is None or trace.role.name != "producer": return
    if carried:
        fail(f"{', '.join(carried)} changes in a loop of the producer", "loads at places that follow from "
             "indices of loops", "compute it from the loop's index")
    check_producer(loop.region)


def check_producer(region: Region, first: int = 0) -> None:
    """Raises for what a producer does not do."""
    for op in region.ops[first:]:
        if op.name not in ALLOWED:
            fail(f"{WHAT.get(op.name, f'tile.{op.name}')} in the producer",
                 "loads, and arithmetic that says where they begin", "move it to the consumer", op.line)


# **** roles ****

class Role:
    """Scope that `with tile.role(name)` enters."""
    __tile_scope__ = True

    def __init__(self, name: str) -> None: self.name = name

    def __enter__(self) -> Role:
        trace = current()
        if trace.role is not None:
            fail(f"the role {self.name!r} inside of the role {trace.role.name!r}", "one role after the other",
                 "end the first `with` before the second begins")
        self.depth, self.region = len(trace.loops), trace.regions[-1]
        self.first = len(self.region.ops)
        if self.name == "producer":
            for pipe in trace.pipes: pipe.empty()
        trace.role = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        trace = current()
        trace.role = None
        if kind is not None: return
        for pipe in trace.pipes: pipe.end_scope(None)
        if self.name == "producer": check_producer(self.region, self.first)


def role(name: str) -> Role:
    """Makes what follows, inside of `with`, the producer's or the consumer's: it loads tiles, or computes
    with them."""
    if name not in ROLES: fail(f"tile.role({name!r})", " or ".join(map(repr, ROLES)))
    return Role(name)


# **** pipes ****

@dataclass(frozen=True, eq=False)
class Committed:
    """Commit of a producer into a pipe, and the loops that it was in."""
    values: tuple[Value, ...]
    loops: tuple[Loop, ...]
    line: Line | None


class Pipe:
    """Stages between a producer and a consumer."""

    def __init__(self, stages: int, line: Line | None) -> None:
        self.stages, self.line = stages, line
        self.acquired: Line | None = None
        self.committed: Committed | None = None
        self.held: tuple[Value, ...] = ()
        self.region: Region | None = None       # of the last wait
        self.waited: Line | None = None

    def acquire(self) -> None:
        """Waits until a stage is free."""
        trace = self._role("acquire", "producer")
        if self.acquired is not None:
            fail("pipe.acquire() of a pipe that holds a stage already", "pipe.commit(…) in between")
        if self.committed is not None:
            fail(f"a second stage of a pipe in the producer, after that of {self.committed.line}",
                 "one acquire and one commit, in the body of one loop", "make another: tile.pipe(stages)")
        self._plain(trace, "acquire")
        self.acquired = trace.line()

    def commit(self, *tiles: Tile) -> None:
        """Fills the stage with loaded tiles, and gives it to the consumer."""
        trace = self._role("commit", "producer")
        if self.acquired is None:
            fail("pipe.commit(…) of a stage that was not acquired", "pipe.acquire() before it")
        if not tiles: fail("pipe.commit() of nothing", "tiles that were loaded")
        for each in tiles: self._check_load(trace, each)
        self._plain(trace, "commit")
        loops = tuple(trace.loops[trace.role.depth:])
        self.committed = Committed(tuple(each.value for each in tiles), loops, trace.line())
        self.acquired = None

    def wait(self) -> Any:
        """Waits until the next stage is filled: its tile, or a tuple of its tiles."""
        trace = self._role("wait", "consumer")
        if self.committed is None:
            fail("pipe.wait() of a pipe that no producer fills",
                 "a `with tile.role(\"producer\")` before the consumer, that commits to it")
        if self.held or self.region is trace.regions[-1]:
            fail(f"a second pipe.wait() in an iteration, after that of {self.waited}",
                 "one for each commit", "release the stage at the end of the iteration")
        if self.waited not in (None, trace.line()):
            fail(f"another pipe.wait(), after that of {self.waited}", "one for each commit",
                 "make another pipe: tile.pipe(stages)")
        self._plain(trace, "wait")
        loops = trace.loops[trace.role.depth:]
        mapped = self._pair_indices(trace, loops)
        self._set_stages(loops)
        self.held = tuple(_recompute(trace, each, mapped) for each in self.committed.values)
        self.region, self.waited = trace.regions[-1], trace.line()
        made = tuple(map(Tile, self.held))
        return made[0] if len(made) == 1 else made

    def release(self) -> None:
        """Gives the stage back: its tiles are used no more."""
        trace = self._role("release", "consumer")
        if not self.held: fail("pipe.release() of a stage that was not waited for", "pipe.wait() before it")
        self._plain(trace, "release")
        trace.released |= set(self.held)
        self.held = ()

    def empty(self) -> None:
        """Ahead of a producer: what a consumer has waited for is done, and the pipe can be filled again."""
        if self.waited is not None: self.committed = self.waited = self.region = None

    def end_scope(self, loop: Loop | None) -> None:
        """Behind an iteration of a loop, or a role."""
        if self.acquired is not None:
            fail("a stage that is acquired and not committed", "pipe.commit(…) in the same iteration", "",
                 self.acquired)
        if self.held and (loop is None or self.region is loop.region):
            fail("a stage that is not released", "pipe.release() behind its last use", "", self.waited)

    # **** checks ****

    def _role(self, what: str, name: str) -> Any:
        """The trace, in the role that calls."""
        trace = current()
        if trace.role is None or trace.role.name != name:
            there = "outside of a role" if trace.role is None else f"in the {trace.role.name}"
            fail(f"pipe.{what} {there}", f"the {name}", f"write it inside of `with tile.role({name!r}):`")
        return trace

    def _plain(self, trace: Any, what: str) -> None:
        """Raises in a branch."""
        loops = trace.loops[trace.role.depth:]
        home = loops[-1].region if loops else trace.role.region
        if trace.regions[-1] is not home:
            fail(f"pipe.{what} in a branch", "the body of the loop itself: both roles count the same stages",
                 "load behind a mask, or put the `if` around what is computed")

    def _check_load(self, trace: Any, tile: Any) -> None:
        op = trace.defining_op(tile.value) if isinstance(tile, Tile) else None
        while op is not None and op.name == "transpose": op = trace.defining_op(op.operands[0])
        if op is None or op.name not in BROUGHT or not tile.shape:
            fail(f"pipe.commit of {describe(tile)} that is not a loaded tile",
                 "x[rows, cols] or tile.load(…)",
                 "load it in the producer, and compute with it in the consumer")

    def _pair_indices(self, trace: Any, loops: list[Loop]) -> dict[Value, Value]:
        """Indices of the producer's loops as those of the consumer's."""
        assert self.committed is not None
        theirs, mapped = self.committed.loops, dict[Value, Value]()
        if len(theirs) != len(loops):
            fail(f"pipe.wait() in {len(loops)} loops of the consumer, pipe.commit in {len(theirs)} of the "
                 f"producer ({self.committed.line})", "as many, of the same lengths")
        for a, b in zip(theirs, loops, strict=True):
            if a.step != b.step or not all(_alike(trace, x, y, mapped) for x, y in ((a.start, b.start),
                                                                                    (a.stop, b.stop))):
                fail(f"the consumer's loop of {b.line} goes {_range(trace, b)}, the producer's of {a.line} "
                     f"{_range(trace, a)}", "loops of the same lengths", "give both the same range")
            mapped[a.index] = b.index
        return mapped

    def _set_stages(self, loops: list[Loop]) -> None:
        """Says in the innermost loop how many stages there are."""
        if not loops: return
        others = [each for each in loops[-1].pipes if each.stages != self.stages]
        if others:
            fail(f"pipes of {others[0].stages} and of {self.stages} stages in one loop", "the same number",
                 f"tile.pipe({self.stages}) for both")
        loops[-1].pipes.append(self)


def pipe(stages: int) -> Pipe:
    """Stages between a producer and a consumer, 1 to 32: how many iterations' tiles shared memory holds."""
    if type(stages) is not int or not 1 <= stages <= MOST_STAGES:
        fail(f"tile.pipe({stages!r})", f"a number of stages, 1 to {MOST_STAGES}")
    trace = current()
    made = Pipe(stages, trace.line())
    trace.pipes.append(made)
    return made


def all_consumed(trace: Trace) -> None:
    """Raises for a pipe that a producer fills and no consumer empties."""
    for each in trace.pipes:
        if each.committed is not None and each.waited is None:
            fail("a pipe that no consumer waits for", "pipe.wait() in `with tile.role(\"consumer\")`", "",
                 each.committed.line)


# **** values of two roles ****

def _recompute(trace: Trace, value: Value, mapped: dict[Value, Value]) -> Value:
    """Returns what makes a value of the producer, here."""
    if value in mapped: return mapped[value]
    op = trace.defining_op(value)
    if op is None or trace.visible(value): return value
    given = [_recompute(trace, each, mapped) for each in op.operands]
    made = trace.emit(op.name, given, [each.type for each in op.results], op.attributes)
    maker = trace.defining_op(made[0])
    if maker is not None and op.name in BROUGHT: maker.line = op.line
    mapped.update(zip(op.results, made, strict=True))
    return mapped[value]


def _alike(trace: Trace, a: Value, b: Value, mapped: dict[Value, Value]) -> bool:
    """Whether a scalar of the producer is one of the consumer."""
    if mapped.get(a, a) is b: return True
    known = trace.constant_of(a), trace.constant_of(b)
    if known != (None, None): return bool(known[0] == known[1])
    one, other = trace.defining_op(a), trace.defining_op(b)
    if one is None or other is None or one.name != other.name or one.name not in ALLOWED: return False
    return one.attributes == other.attributes and len(one.operands) == len(other.operands) and \
        all(_alike(trace, x, y, mapped) for x, y in zip(one.operands, other.operands, strict=True))


def _range(trace: Trace, loop: Loop) -> str:
    ends = [trace.constant_of(each) for each in (loop.start, loop.stop)]
    start, stop = ("a number of the kernel's" if each is None else str(each) for each in ends)
    return f"from {start} to {stop} in steps of {loop.step}"

