"""Collectives of a warp to ops of lanes.c.

Protocol: the member mask is field c of each op, so that lanes.c can gather the members; a second destination
is the only item of `list`.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_operate import dest, kind_of, only, pair, source
from tinygrad_nv.ptx.emulator.lowering import FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Instruction

# lanes.c: enum { SHFL_UP, … }, { VOTE_ALL, … }, { REDUX_ADD, … }
SHUFFLES = ("up", "down", "bfly", "idx")
VOTES = ("all", "any", "uni", "ballot")
REDUCTIONS = {("add", "s32"): 0, ("add", "u32"): 0, ("min", "s32"): 1, ("max", "s32"): 2, ("min", "u32"): 3,
              ("max", "u32"): 4, ("and", "b32"): 5, ("or", "b32"): 6, ("xor", "b32"): 7}


def second(place: int) -> tuple[int, ...]:
    """A list of a second destination, or of nothing."""
    return (place,) if place >= 0 else ()


@lowers("shfl.sync")
def shuffle(low: FunctionLowering, instruction: Instruction) -> None:
    """`shfl.sync.mode.b32 d{|p}, a, b, c, members`."""
    only(low, "sync", *SHUFFLES)
    kind_of(low, "b32")
    to, *rest = instruction.operands
    d, p = pair(low, to, "b32", "pred")
    a, b, c, members = (source(low, operand, "b32") for operand in rest)
    if d < 0: d = low.scratch("b32")
    mode = SHUFFLES.index(low.one_of(*SHUFFLES))
    low.emit("shfl", d=d, a=a, e=b, b=c, c=members, list=second(p), more=mode, reads=(a, b, c, members),
             writes=(d, *second(p)))


@lowers("vote.sync")
def vote(low: FunctionLowering, instruction: Instruction) -> None:
    """`vote.sync.{all,any,uni}.pred p, {!}a, members` and `vote.sync.ballot.b32 d, {!}a, members`."""
    only(low, "sync", *VOTES)
    mode = low.one_of(*VOTES)
    kind = kind_of(low, "b32" if mode == "ballot" else "pred")
    d, a, members = instruction.operands
    low.emit("vote", d=dest(low, d, kind), a=source(low, a, "pred"), c=source(low, members, "b32"),
             more=VOTES.index(mode))


@lowers("match.any", "match.all")
def match(low: FunctionLowering, instruction: Instruction) -> None:
    """`match.any.sync.type d, a, members` and `match.all.sync.type d{|p}, a, members`."""
    only(low, "sync", "any", "all")
    kind = kind_of(low, "b32", "b64")
    to, value, members = instruction.operands
    d, p = pair(low, to, "b32", "pred")
    if d < 0: d = low.scratch("b32")
    a, c = source(low, value, kind), source(low, members, "b32")
    name = "match_all" if low.has("all") else "match_any"
    low.emit(name, d=d, a=a, c=c, wide=kind == "b64", list=second(p), reads=(a, c),
             writes=(d, *second(p)))


@lowers("redux.sync")
def reduce(low: FunctionLowering, instruction: Instruction) -> None:
    """`redux.sync.op.type d, a, members`."""
    only(low, "sync", *(op for op, _ in REDUCTIONS))
    kind = kind_of(low, "s32", "u32", "b32")
    how = (low.one_of(*(op for op, _ in REDUCTIONS)), kind)
    if how not in REDUCTIONS: raise low.fail(f".{how[0]}.{kind} does not exist")
    d, a, members = instruction.operands
    low.emit("redux", d=dest(low, d, kind), a=source(low, a, kind), c=source(low, members, "b32"),
             more=REDUCTIONS[how])


@lowers("elect.sync")
def elect(low: FunctionLowering, instruction: Instruction) -> None:
    """`elect.sync d|p, members`: d may be a sink."""
    only(low, "sync")
    to, members = instruction.operands
    d, p = pair(low, to, "b32", "pred")
    if p < 0: raise low.fail("the predicate is missing", "elect.sync d|p, members")
    c = source(low, members, "b32")
    low.emit("elect", d=d, c=c, list=(p,), reads=(c,), writes=(*second(d), p))


@lowers("activemask")
def active(low: FunctionLowering, instruction: Instruction) -> None:
    """`activemask.b32 d`: the lanes that are here."""
    low.emit("activemask", d=dest(low, instruction.operands[0], "b32"))


@lowers("bar.warp")
def warp_barrier(low: FunctionLowering, instruction: Instruction) -> None:
    """`bar.warp.sync members`."""
    only(low, "warp", "sync")
    low.emit("bar_warp_sync", c=source(low, instruction.operands[0], "b32"))
