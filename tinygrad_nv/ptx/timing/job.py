"""From tapes and a listing to what csrc/sm.c runs.

Protocol: a tape says which PTX instructions a warp executed; blocks of them stand for SASS (`Code`). Each
execution of a block becomes that block's SASS, in ptxas's order. What a PTX instruction noted, copies, phases
of barriers, passes through shared memory, goes to the first SASS instruction of its line that does such a
thing. Events are phases of barriers: they have happened when every signal that the tapes have of them came.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tinygrad_nv.ptx.emulator.calls import expand_calls
from tinygrad_nv.ptx.emulator.tapes import NOTE, Note, Tape
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.instructions import TimedInstruction
from tinygrad_nv.ptx.timing.listing import Listing
from tinygrad_nv.ptx.timing.units import Cost, Kind, Unit, cost_of

INSTR = np.dtype([("unit", "u1"), ("kind", "u1"), ("stall", "u1"), ("wait_mask", "u1"), ("write_board", "i1"),
                  ("read_board", "i1"), ("busy", "<u2"), ("latency", "<u2"), ("tensor", "<u2"),
                  ("shared", "<u2"), ("registers", "<u2"), ("number", "<u2")])
STEP = np.dtype([("instr", "<i4"), ("note", "<i4"), ("notes", "<u2"), ("passes", "<u2")])
EFFECT = np.dtype([("event", "<i4"), ("bytes", "<u4"), ("near", "<u4"), ("far", "<u4"), ("delay", "<u2"),
                   ("waits", "u1"), ("signals", "u1"), ("late", "u1"), ("unused", "u1", 3)])
WARP = np.dtype([(name, "<i4") for name in ("first", "end", "sm", "scheduler", "cta", "after",
                                         "group")])
SCHEDULERS = 4
GLOBAL = ("LDG", "LD", "STG", "ST", "ATOMG", "ATOM", "RED", "REDG", "LDGSTS")
BAR_DELAY, REMOTE_DELAY, CLUSTER_DELAY = 9, 180, 190  # HOPPER_TIMING.md 7.5: bar.sync 20.7 in all; DSMEM 181
# what a note is of: an mbarrier, a named barrier, a cluster's barrier
_CLASSES = {Note.WAITED: 0, Note.ARRIVED: 0, Note.LOADS: 0, Note.FOLLOWS: 0, Note.MEETS: 1, Note.JOINS: 2}
# a step that no SASS does
_PLAIN = np.array((0, 0, 1, 0, -1, -1, 1, 1, 0, 0, 0, 0), INSTR)
_REST = Cost(Unit.CONTROL, 1, 1)
_NOTED = (Kind.GLOBAL_READ, Kind.GLOBAL_WRITE, Kind.TMA_READ, Kind.TMA_WRITE, Kind.COPY_ASYNC,
          Kind.SHARED_ACCESS)


@dataclass(frozen=True)
class Code:
    """A kernel's SASS, then an instruction for each first try of an mbarrier, which ptxas has put elsewhere
    than PTX. `lines`: the PTX line of each instruction; `executed`: instructions, and how many executions of
    a block of PTX they stand for; `block_of`: the block of each PTX instruction; `line_of`: its line; `rest`:
    what stands for it where no SASS of its block does."""
    instructions: Sequence[TimedInstruction]
    costs: Sequence[Cost]
    control: np.ndarray     # of INSTR, with stalls and scoreboards
    lines: np.ndarray
    executed: Mapping[int, tuple[np.ndarray, int]]
    block_of: np.ndarray
    line_of: np.ndarray
    rest: np.ndarray

    @property
    def unknown(self) -> tuple[str, ...]:
        """Instructions without a cost, and their lines."""
        both = zip(self.instructions, self.costs, strict=True)
        return tuple(dict.fromkeys(f"{each.opcode}{each.modifiers} of PTX line {each.ptx_line}"
                                   for each, cost in both if not cost.known))


def as_given(code: Code, origins: Sequence[int]) -> Code:
    """The same with the lines of the text that was given: for reports."""
    if not origins: return code
    return replace(code, instructions=[replace(each, ptx_line=origins[each.ptx_line]) for each in
                                       code.instructions], lines=np.array(origins)[code.lines])


def code_of(listing: Listing, entry: str, gpu: GPUFigures) -> Code:
    """The SASS of an entry function, and what it takes on a GPU. Of copies of a block that ptxas unrolled the
    one for the most executions stands for all."""
    placement = listing.placement(entry)
    instructions = [each for block in placement.sass for each in block]
    number = {each.address: i for i, each in enumerate(instructions)}
    control = np.zeros(len(instructions), INSTR)
    for i, each in enumerate(instructions):
        control[i]["stall"], control[i]["wait_mask"] = each.stall, each.wait_mask
        control[i]["write_board"] = -1 if each.write_barrier is None else each.write_barrier
        control[i]["read_board"] = -1 if each.read_barrier is None else each.read_barrier
    executed = {}
    for i, copies in enumerate(placement.copies):
        if not copies: continue
        # a guarded access that ptxas put a branch around: whether it happened is in the tape's notes
        body = [number[each.address] for each in copies[0].instructions
                if each.address not in copies[0].skipped or each.opcode in GLOBAL]
        executed[i] = np.array(body, np.int64), copies[0].executions
    module = parse(listing.text)
    function = expand_calls(module, module.functions[entry])
    block_of = np.zeros(len(function.body), np.int64)
    for i, part in enumerate(placement.blocks): block_of[part.start:part.stop] = i
    costs, line_of = [cost_of(each, gpu) for each in instructions], [each.line for each in function.body]
    tried = {each.ptx_line: each for each in reversed(instructions) if each.opcode == "SYNCS"}
    tries = [at for at, line in enumerate(line_of) if block_of[at] in placement.waits and line in tried]
    rest = np.full(len(line_of), len(instructions) + len(tries))
    rest[tries] = np.arange(len(tries)) + len(instructions)
    every = [*instructions, *(tried[line_of[at]] for at in tries)]
    return Code(every, [*costs, *[_REST] * len(tries)], np.append(control, np.full(len(tries), _PLAIN)),
                np.array([each.ptx_line for each in every]), executed, block_of, np.array(line_of), rest)


@dataclass(frozen=True)
class Job:
    """Arrays of csrc/sm.c. `cluster`: SMs that have their part of L2 and HBM together."""
    instrs: np.ndarray
    steps: np.ndarray
    effects: np.ndarray
    warps: np.ndarray
    need: np.ndarray
    sms: int
    ctas: int
    cluster: int = 1


def make_job(code: Code, tapes: Sequence[Tape], gpu: GPUFigures, shares: Sequence[np.ndarray],
         sms: Sequence[int], first: int) -> Job:
    """The job of recorded CTAs. `sms`: the SM of each tape. Of each SM the first `first` CTAs begin at once,
    each other one when the one that many before it has ended. `shares`: of each tape's notes (l2.py)."""
    steps, warps, notes, begin, count = [], [], [], 0, 0
    number = {cta: i for i, cta in enumerate(sorted({tape.cta for tape in tapes}))}
    of_sm: dict[int, list[int]] = {}
    for tape, sm in zip(tapes, sms, strict=True):
        if number[tape.cta] not in (mates := of_sm.setdefault(sm, [])): mates.append(number[tape.cta])
    for mates in of_sm.values(): mates.sort()
    warps_of_cta = 1 + max((tape.warp for tape in tapes), default=0)
    for tape, sm in zip(tapes, sms, strict=True):
        place = of_sm[sm].index(number[tape.cta])
        # warps go to the schedulers in turn, whatever CTA they are of
        scheduler = (place * warps_of_cta + tape.warp) % SCHEDULERS
        after = of_sm[sm][place - first] if place >= first else -1
        mine = _stream(code, tape)
        mine["note"] += count
        steps.append(mine)
        notes.append(tape.notes)
        warps.append((begin, begin + len(mine), sm, scheduler, number[tape.cta], after, -1))
        begin, count = begin + len(mine), count + len(tape.notes)
    every = np.concatenate(notes) if notes else np.zeros(0, NOTE)
    owner = np.concatenate([np.full(len(tape.notes), tape.cta, np.int64) for tape in tapes])
    effects, need = _effects(every, owner, np.concatenate(shares), gpu)
    made = np.array(warps, WARP)
    made["group"] = _warpgroups(tapes)
    return Job(_instrs(code), np.concatenate(steps), effects, made, need,
               max(sms) + 1, len(number), 1 + max(tape.rank for tape in tapes))


def _warpgroups(tapes: Sequence[Tape]) -> list[int]:
    """The number of the first tape of each one's warpgroup, whose four follow each other; -1 of others."""
    whole = [at for at, tape in enumerate(tapes[:-3]) if tape.warp % 4 == 0 and all(
        (other.cta, other.warp) == (tape.cta, tape.warp + i) for i, other in enumerate(tapes[at:at + 4]))]
    found = [-1] * len(tapes)
    for at in whole: found[at:at + 4] = [at] * 4
    return found


def _instrs(code: Code) -> np.ndarray:
    out = np.append(code.control, _PLAIN)
    for i, cost in enumerate((*code.costs, _REST)):
        for name in ("unit", "kind", "busy", "latency", "tensor", "shared", "registers", "number"):
            out[name][i] = getattr(cost, name)
    return out


# **** a warp's stream ****

def _stream(code: Code, tape: Tape) -> np.ndarray:
    blocks = code.block_of[tape.sources]
    new = np.ones(len(blocks), bool)
    new[1:] = (blocks[1:] != blocks[:-1]) | (tape.sources[1:] <= tape.sources[:-1])
    begins = np.flatnonzero(new)
    ends = np.append(begins[1:], len(blocks))
    of = blocks[begins]
    # the first of as many executions as a copy stands for has the copy
    run = np.ones(len(of), bool)
    run[1:] = of[1:] != of[:-1]
    place = np.arange(len(of)) - np.maximum.accumulate(np.where(run, np.arange(len(of)), 0))
    times = np.array([code.executed[int(b)][1] if int(b) in code.executed else 1 for b in of], np.int64)
    heads = place % times == 0
    lengths = np.array([len(code.executed[int(b)][0]) if head and int(b) in code.executed else 0
                        for b, head in zip(of, heads, strict=True)], np.int64)
    at = np.concatenate(([0], np.cumsum(lengths)))
    out = np.zeros(int(at[-1]), STEP)
    for block in np.unique(of):
        if int(block) not in code.executed: continue
        body, count = code.executed[int(block)]
        mine = np.flatnonzero((of == block) & heads)
        places = at[mine][:, None] + np.arange(len(body))
        out["instr"][places] = body
        last = np.minimum(mine + count - 1, len(of) - 1)
        last = np.where(of[last] == block, last, mine)
        _attach(code, tape, body, count, places, begins[mine], ends[last], out)
    return _with_the_rest(tape, out, at, np.searchsorted(begins, np.arange(len(blocks)), "right") - 1,
                          code.rest)


def _with_the_rest(tape: Tape, out: np.ndarray, at: np.ndarray, execution: np.ndarray,
                   rest: np.ndarray) -> np.ndarray:
    """The stream, and a step of `Code.rest` for each PTX instruction with notes that no SASS of its block
    carries: after what its execution has become."""
    carried = np.zeros(len(tape.notes) + 1, bool)
    carried[out["note"][out["notes"] > 0]] = True
    missing = np.flatnonzero((tape.end_note > tape.first_note) & ~carried[tape.first_note])
    extra = np.zeros(len(missing), STEP)
    extra["instr"], extra["note"] = rest[tape.sources[missing]], tape.first_note[missing]
    extra["passes"], extra["notes"] = 1, tape.end_note[missing] - tape.first_note[missing]
    return np.insert(out, at[execution[missing] + 1], extra)


def _attach(code: Code, tape: Tape, body: np.ndarray, count: int, places: np.ndarray, begins: np.ndarray,
            ends: np.ndarray, out: np.ndarray) -> None:
    """Notes and passes of the steps that lie in each pass of a block: of each PTX instruction to the first
    instruction of its line that carries such, of each of its `count` executions to its own."""
    by_line: dict[int, list[int]] = {}
    for place, instr in enumerate(body):
        if _carries(code.costs[instr]): by_line.setdefault(int(code.lines[instr]), []).append(place)
    for line, carriers in by_line.items():
        for source in np.flatnonzero(code.line_of == line):
            found = np.flatnonzero(tape.sources == source)
            if not len(found): continue
            nearest, each = np.searchsorted(found, begins), max(1, len(carriers) // count)
            for number in range(count):
                own = carriers[number * each:(number + 1) * each]
                if not own: break
                at = nearest + number
                inside = at < len(found)
                inside[inside] &= found[at[inside]] < ends[inside]
                step, rows = found[at[inside]], places[inside]
                out["note"][rows[:, own[0]]] = tape.first_note[step]
                out["notes"][rows[:, own[0]]] = tape.end_note[step] - tape.first_note[step]
                for carrier in own: out["passes"][rows[:, carrier]] = np.maximum(1, tape.passes[step] // each)


def _carries(cost: Cost) -> bool:
    return cost.kind in _NOTED or (
        cost.unit in (Unit.SHARED, Unit.CONTROL) and cost.kind is Kind.PLAIN and cost.busy > 1)


# **** what notes do ****

def _effects(notes: np.ndarray, owner: np.ndarray, shares: np.ndarray,
             gpu: GPUFigures) -> tuple[np.ndarray, np.ndarray]:
    kind = notes["kind"]
    out = np.zeros(len(notes), EFFECT)
    out["event"] = -1
    classes = np.full(16, -1)
    for note, number in _CLASSES.items(): classes[note] = number
    timed = np.flatnonzero(classes[kind] >= 0)
    keys = np.stack([classes[kind[timed]].astype(np.uint64), notes["key"][timed], notes["a"][timed]], 1)
    _, events = np.unique(keys, axis=0, return_inverse=True)
    events = events.reshape(-1)
    out["event"][timed] = events
    remote = (notes["key"] >> 32 != owner) & (classes[kind] == 0)

    def where(note: Note) -> np.ndarray: return kind == note
    waits = where(Note.WAITED) | where(Note.MEETS) & (notes["b"] == 1) | where(Note.JOINS) & (notes["b"] == 1)
    arrives = where(Note.ARRIVED) & (notes["count"] > 0)
    signals = arrives | where(Note.LOADS) | where(Note.FOLLOWS) | where(Note.MEETS) \
        | where(Note.JOINS) & (notes["b"] == 0)
    out["waits"], out["signals"] = waits, signals
    out["delay"][where(Note.WAITED)] = gpu.wait_latency
    out["delay"][arrives] = gpu.arrive_latency
    out["delay"][where(Note.MEETS)] = BAR_DELAY
    out["delay"][where(Note.JOINS) & (notes["b"] == 0)] = CLUSTER_DELAY
    out["delay"][remote & signals & ~where(Note.LOADS)] += REMOTE_DELAY
    rows = where(Note.READS) | where(Note.WRITES) | where(Note.REDUCED)
    nbytes = np.where(rows, notes["count"].astype(np.int64) * notes["a"].astype(np.int64),
                      np.where(where(Note.SECTORS), notes["count"].astype(np.int64) * 32, 0))
    moved = (nbytes[:, None] * shares).astype(np.int64)
    reduced = where(Note.REDUCED) | where(Note.SECTORS) & (notes["b"] == 2)
    moved[reduced, 1] = (gpu.reduction_cost * moved[reduced, 1]).astype(np.int64)
    out["bytes"], out["far"], out["near"] = nbytes, moved[:, 0], moved[:, 1]
    out["late"] = (shares[:, 0] > 0) & (nbytes > 0)
    need = np.bincount(events[signals[timed]], minlength=int(events.max()) + 1 if len(events) else 0)
    return out, need.astype(np.int32)
