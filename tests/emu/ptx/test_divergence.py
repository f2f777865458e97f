"""Lanes that part and meet: branches, loops of different length, exits, tables, and lanes that wait for one
another. Random structured programs are held against a lane-by-lane interpreter in Python."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ptx.kernel_texts import found, kernel, run, sound, words
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.program import lower
from tinygrad_nv.ptx.parser import parse

STORE = "mad.wide.u32 %d1, %t, 4, %a0; st.global.b32 [%d1], %r1;"


def result(body: str, block: int = 32, seed: int = 0) -> np.ndarray:
    emu = Emulator(seed=seed)
    out = emu.alloc(4 * block)
    report = run(f"{body}\n{STORE}", out, emu=emu, block=block)
    sound(report)
    return words(out, np.int32)


def test_lanes_meet_after_a_branch():
    """Only if they meet does one popc of activemask see all 32."""
    body = """mov.u32 %r1, 0; setp.lt.u32 %p1, %t, 5; @%p1 bra LOW; add.u32 %r1, %r1, 7; bra MEET;
LOW: add.u32 %r1, %r1, 3;
MEET: activemask.b32 %r2; popc.b32 %r2, %r2; mad.lo.u32 %r1, %r2, 100, %r1;"""
    assert result(body).tolist() == [3203] * 5 + [3207] * 27


def test_loops_of_different_length_end_together():
    body = """mov.u32 %r1, 0; mov.u32 %r2, 0;
AGAIN: add.u32 %r1, %r1, %r2; add.u32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %t; @%p1 bra AGAIN;
activemask.b32 %r3; setp.ne.u32 %p2, %r3, -1; @%p2 mov.u32 %r1, 999999;"""
    assert result(body).tolist() == [t * (t + 1) // 2 for t in range(32)]


def test_early_exits_leave_the_others():
    """Threads of odd number are gone; what is left still meets at barriers."""
    emu = Emulator()
    out = emu.alloc(np.zeros(64, np.int32))
    body = """and.b32 %r2, %t, 1; setp.eq.u32 %p1, %r2, 1; @%p1 exit;
activemask.b32 %r1; """ + STORE
    sound(run(body, out, emu=emu, block=64))
    assert words(out).tolist() == [0x55555555, 0] * 32


@pytest.mark.parametrize("seed", range(4))
def test_a_table_of_branches(seed: int):
    body = """and.b32 %r2, %t, 3; mov.u32 %r1, 0;
TABLE: .branchtargets A, B, C, D;
brx.idx %r2, TABLE;
A: mov.u32 %r1, 10; bra E;
B: mov.u32 %r1, 20; bra E;
C: mov.u32 %r1, 30;
D: add.u32 %r1, %r1, 40;
E: activemask.b32 %r3; popc.b32 %r3, %r3; mad.lo.u32 %r1, %r3, 1000, %r1;"""
    assert result(body, seed=seed).tolist() == [32010, 32020, 32070, 32040] * 8


def test_lanes_of_a_warp_may_wait_for_one_another():
    """A lock each lane takes in turn: the one that has it must go on past the loop where others spin, which
    no strict stack of reconvergence points allows."""
    emu = Emulator()
    lock, count = emu.alloc(np.zeros(1, np.int32)), emu.alloc(np.zeros(1, np.int32))
    body = """SPIN: atom.acquire.gpu.global.cas.b32 %r1, [%a0], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra SPIN;
ld.relaxed.gpu.global.u32 %r2, [%a1]; add.u32 %r2, %r2, 1; st.relaxed.gpu.global.u32 [%a1], %r2;
atom.release.gpu.global.exch.b32 %r3, [%a0], 0;"""
    sound(run(body, lock, count, emu=emu, block=64))
    assert words(count).tolist() == [64]


def test_a_barrier_that_only_some_lanes_reach_is_found():
    body = "setp.lt.u32 %p1, %t, 16; @!%p1 bra OTHER; bar.sync 0; OTHER: nanosleep.u32 1;"
    found(run(body), "barrier", "lanes")


def test_a_collective_waits_for_lanes_on_another_path():
    """Both paths come to a shfl of all lanes: at different instructions, which is an error that ends."""
    body = """mov.u32 %r1, %t; setp.lt.u32 %p1, %t, 16; @%p1 bra LOW;
shfl.sync.idx.b32 %r1, %r1, 0, 31, -1; bra MEET;
LOW: shfl.sync.idx.b32 %r1, %r1, 0, 31, -1;
MEET: nanosleep.u32 1;"""
    assert {f.kind for f in run(body).findings} == {"barrier"}


def test_an_endless_loop_ends_at_the_instruction_limit():
    """20 times the step limit: the loop asks nothing of other threads."""
    body = "AGAIN: add.u32 %r1, %r1, 1; setp.eq.u32 %p1, %r1, %r1; @%p1 bra AGAIN;"
    report = run(body, emu=Emulator(step_limit=10_000))
    found(report, "instruction-limit", "still runs here after 200000 warp-instructions, the launch's limit",
          "much work, or an endless loop")
    assert report.findings[0].ptx_line == 5
    assert 200_000 <= report.stats.warp_instructions < 210_000


def test_a_wait_that_never_ends_ends_at_the_step_limit():
    """The loop reads what another thread may write: no 20 times."""
    body = "AGAIN: ld.relaxed.cta.shared.b32 %r1, [s]; setp.eq.u32 %p1, %r1, %r1; @%p1 bra AGAIN;"
    report = run(body, emu=Emulator(step_limit=10_000, check=False), variables=".shared .b32 s;")
    found(report, "instruction-limit", "after 10000 warp-instructions, the launch's limit",
          "a wait for what never comes")
    assert report.stats.warp_instructions < 11_000


# **** random programs ****

@dataclass(frozen=True)
class Add:
    """x = x * 3 + n"""
    n: int


@dataclass(frozen=True)
class If:
    """One arm or the other, by a bit of x."""
    bit: int
    yes: tuple
    no: tuple


@dataclass(frozen=True)
class While:
    """Rounds by the low bits of x, at most 3; with a break in the middle by another bit."""
    bit: int
    body: tuple


BLOCK = st.deferred(lambda: st.lists(STATEMENT, max_size=3).map(tuple))
STATEMENT = st.deferred(lambda: st.one_of(
    st.builds(Add, st.integers(0, 99)), st.builds(If, st.integers(0, 4), BLOCK, BLOCK),
    st.builds(While, st.integers(0, 4), BLOCK)))


def emit(block: tuple, out: list[str], depth: int = 0) -> None:
    """PTX of a block. %r1 is x, %r(8 + depth) the rounds of a loop."""
    for statement in block:
        label = f"L{len(out)}"
        if isinstance(statement, Add): out.append(f"mad.lo.u32 %r1, %r1, 3, {statement.n};")
        elif isinstance(statement, If):
            out.append(f"bfe.u32 %r2, %r1, {statement.bit}, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra {label}n;")
            emit(statement.yes, out, depth)
            out.append(f"bra {label}e; {label}n:")
            emit(statement.no, out, depth)
            out.append(f"{label}e:")
        else:
            rounds = f"%r{8 + depth}"
            out.append(f"and.b32 {rounds}, %r1, 3; {label}b: setp.eq.u32 %p1, {rounds}, 0;")
            out.append(f"@%p1 bra {label}e; sub.u32 {rounds}, {rounds}, 1;")
            emit(statement.body, out, depth + 1)
            out.append(f"bfe.u32 %r2, %r1, {statement.bit}, 1; setp.eq.u32 %p1, %r2, 1; @%p1 bra {label}e;")
            emit(statement.body[:1], out, depth + 1)
            out.append(f"bra {label}b; {label}e:")


def interpret(block: tuple, x: int) -> int:
    """The same for one lane."""
    for statement in block:
        if isinstance(statement, Add): x = (3 * x + statement.n) % (1 << 32)
        elif isinstance(statement, If):
            x = interpret(statement.yes if x >> statement.bit & 1 else statement.no, x)
        else:
            for _ in range(x & 3):
                x = interpret(statement.body, x)
                if x >> statement.bit & 1: break
                x = interpret(statement.body[:1], x)
    return x


@settings(max_examples=60, deadline=None)
@given(BLOCK, st.integers(0, 3))
def test_random_programs(block: tuple, seed: int):
    lines: list[str] = ["mad.lo.u32 %r1, %t, 2654435761, 12345;"]
    emit(block, lines)
    got = result("\n".join(lines), 64, seed).view(np.uint32)
    assert got.tolist() == [interpret(block, (t * 2654435761 + 12345) % (1 << 32)) for t in range(64)]


@settings(max_examples=30, deadline=None)
@given(BLOCK)
def test_branches_join_at_their_immediate_post_dominators(block: tuple):
    """Against the definition: a node post-dominates another when no path to the end avoids it."""
    lines: list[str] = []
    emit(block, lines)
    module = parse(kernel("\n".join(lines), ()))
    ops = lower(module, module.functions["test"], {}).ops
    after = [[at + 1] if op.handler not in ("bra", "exit") else
             [op.target] * (op.handler == "bra") + [at + 1] * (op.guard >= 0) for at, op in enumerate(ops)]
    before: list[list[int]] = [[] for _ in ops]
    for at, following in enumerate(after):
        for each in following:
            if each < len(ops): before[each].append(at)
    ends = [at for at, op in enumerate(ops) if op.handler == "exit"]

    def ending(without: int) -> set[int]:
        """The nodes from which a path reaches an end and avoids `without`."""
        seen, rest = {without}, list(ends)
        while rest:
            at = rest.pop()
            if at in seen: continue
            seen.add(at)
            rest += before[at]
        return seen - {without}

    avoiding = [ending(p) for p in range(len(ops))]
    for at, op in enumerate(ops):
        if op.handler != "bra" or op.guard < 0: continue
        dominators = [p for p in range(len(ops)) if p != at and at not in avoiding[p]]
        nearest = [p for p in dominators if all(q == p or p not in avoiding[q] for q in dominators)]
        assert op.join in (nearest or [-1]), (at, op.join, nearest)
