"""The model of an SM in cycles: published latencies of wgmma, units, scoreboards, barriers, copies. Which
unit an instruction takes: a name that begins like another's is its own."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.sass import SASSInstruction
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.job import EFFECT, INSTR, STEP, WARP, Job
from tinygrad_nv.ptx.timing.simulator import Cause, Run, run
from tinygrad_nv.ptx.timing.units import Kind, Unit, cost_of

GPU = figures("h100")
FFMA = (Unit.FMA, Kind.PLAIN, 1, 0, -1, -1, 1, 4, 0, 0, 0)
HGMMA = (Unit.TENSOR, Kind.WGMMA, 2, 0, -1, -1, 2, 6, 18, 18, 0)          # m64n8k16
LAST = (*HGMMA[:10], 1)                                                   # of a group
DRAIN = (Unit.CONTROL, Kind.WGMMA_WAIT, 1, 0, -1, -1, 1, 6, 0, 0, 0)
LOAD = (Unit.MEMORY, Kind.GLOBAL_READ, 1, 0, 0, -1, 4, 0, 0, 0, 0)        # sets scoreboard 0
USE = (Unit.FMA, Kind.PLAIN, 1, 1, -1, -1, 1, 4, 0, 0, 0)                 # waits for it
SHARED = (Unit.SHARED, Kind.SHARED_ACCESS, 1, 0, 0, -1, 1, 29, 0, 0, 0)
EXP = (Unit.XU, Kind.PLAIN, 1, 0, -1, -1, 8, 18, 0, 0, 0)
BARRIER = (Unit.CONTROL, Kind.PLAIN, 1, 0, -1, -1, 2, 6, 0, 0, 0)
TMA = (Unit.COPY, Kind.TMA_READ, 1, 0, -1, -1, 2, 20, 0, 0, 0)
LARGE = (*HGMMA[:8], 128, 128, 0)                                         # m64n256k16
LARGE_LAST = (*LARGE[:10], 1)
INSTRS = (FFMA, HGMMA, LAST, DRAIN, LOAD, USE, SHARED, EXP, BARRIER, TMA, LARGE, LARGE_LAST)


def ran(*warps: list[tuple], effects: tuple | list = (), passes: int = 1, need: tuple[int, ...] = ()) -> Run:
    """Warps of (instruction, index of its effect or -1), one on each scheduler in turn."""
    steps, rows = [], []
    for number, warp in enumerate(warps):
        begin = len(steps)
        for instr, effect in warp:
            steps.append((INSTRS.index(instr), max(effect, 0), effect >= 0, passes))
        rows.append((begin, len(steps), 0, number % 4, 0, -1))
    made = np.zeros(max(1, len(effects)), EFFECT)
    made["event"] = -1
    for at, fields in enumerate(effects):
        for name, value in fields: made[name][at] = value
    return run(Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), made, np.array(rows, WARP),
                   np.array(need, np.int32), 1, 1), GPU)


def plain(*instrs: tuple) -> list[tuple]: return [(each, -1) for each in instrs]


@pytest.mark.parametrize(("count", "cycles"), [(1, 57.7), (4, 113.5), (8, 185.5)])
def test_latency_of_wgmma_is_that_of_an_h200(count: int, cycles: float):
    """Fence, m64n8k16 wgmmas, commit and wait, of one warpgroup (HOPPER_TIMING.md 7.3)."""
    warp = plain(*[HGMMA] * (count - 1), LAST, DRAIN)
    assert ran(warp, warp, warp, warp).cycles == pytest.approx(cycles, abs=2)


def test_a_scheduler_issues_one_instruction_a_cycle():
    assert ran(*[plain(*[FFMA] * 1000)] * 4).cycles == pytest.approx(1000, abs=4)   # one warp on each
    assert ran(*[plain(*[FFMA] * 1000)] * 8).cycles == pytest.approx(2000, abs=4)


def test_exponentials_take_eight_cycles_of_a_scheduler():
    assert ran(plain(*[EXP] * 100)).cycles == pytest.approx(800, abs=10)
    assert ran(plain(*[EXP, *[FFMA] * 7] * 100)).cycles == pytest.approx(800, abs=10)  # in their shadow


def test_a_result_is_waited_for_by_what_uses_it():
    read = [(("bytes", 128), ("near", 128),)]
    assert ran([(LOAD, 0), (FFMA, -1)], effects=read).cycles < 20
    assert ran([(LOAD, 0), (USE, -1)], effects=read).cycles == pytest.approx(GPU.l2_latency, abs=10)
    late = [(("bytes", 128), ("near", 128), ("far", 128), ("late", 1))]
    assert ran([(LOAD, 0), (USE, -1)], effects=late).cycles >= GPU.hbm_latency


def test_bank_conflicts_slow_all_warps():
    warp = plain(*[SHARED] * 200)
    once, eightfold = (ran(*[warp] * 4, passes=passes).cycles for passes in (1, 8))
    assert once == pytest.approx(800, rel=0.1)
    assert eightfold == pytest.approx(8 * 800, rel=0.1)


def test_a_barrier_waits_for_the_last_and_takes_21_cycles():
    """bar.sync (HOPPER_TIMING.md 7.5)."""
    meets = [(("event", 0), ("waits", 1), ("signals", 1), ("delay", 9))]
    alone = [(BARRIER, 0), (FFMA, -1)]
    assert ran(alone, effects=meets, need=(1,)).cycles == pytest.approx(21, abs=3)
    late = [*plain(*[FFMA] * 300), *alone]
    found = ran(alone, late, effects=meets, need=(2,))
    assert found.ends[0] == pytest.approx(321, abs=5)


def test_copies_fill_the_share_of_l2_that_an_sm_has():
    """64 copies of 16 KiB, and a wait for all of them."""
    effects = [(("event", -1), ("bytes", 1 << 14), ("near", 1 << 14)), (("event", 0), ("signals", 1)),
               (("event", 0), ("waits", 1))]
    made = np.zeros(3, EFFECT)
    for at, fields in enumerate(effects):
        for name, value in fields: made[name][at] = value
    steps = [(INSTRS.index(TMA), 0, 2, 1)] * 64 + [(INSTRS.index(BARRIER), 2, 1, 1)]
    warp = np.array([(0, 65, 0, 0, 0, -1)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), made, warp,
              np.array([64], np.int32), 1, 1)
    share = GPU.l2_bytes_per_cycle / GPU.sms
    assert run(job, GPU).cycles == pytest.approx(64 * (1 << 14) / share + GPU.tma_latency, rel=0.02)
    faster = replace(GPU, l2_bytes_per_cycle=1.4 * GPU.l2_bytes_per_cycle)
    assert run(job, faster).cycles == pytest.approx(run(job, GPU).cycles / 1.4, rel=0.03)
    assert run(job, GPU, sms=4).cycles == pytest.approx(64 * (1 << 14) / 64, rel=0.03)  # no SM gets more


def test_a_cta_begins_when_the_one_before_has_ended():
    """And after what it takes to begin."""
    steps = [(INSTRS.index(FFMA), 0, 0, 1)] * 200
    warps = np.array([(0, 100, 0, 0, 0, -1), (100, 200, 0, 1, 1, 0)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), np.zeros(1, EFFECT), warps,
              np.zeros(0, np.int32), 1, 2)
    assert run(job, GPU).cycles == pytest.approx(200 + GPU.begin_latency, abs=5)


def test_what_nothing_completes_is_refused():
    waits = [(("event", 0), ("waits", 1))]
    with pytest.raises(PTXError, match="warp 0 waits for a barrier"):
        ran([(BARRIER, 0)], effects=waits, need=(1,))


def test_the_same_job_takes_the_same_time():
    warp = plain(*[EXP, FFMA, SHARED] * 50)
    assert ran(*[warp] * 7).cycles == ran(*[warp] * 7).cycles


# **** the critical path ****

def on_path(found: Run) -> dict[Cause, int]:
    """Cycles of the critical path by what takes them. The path has no gap."""
    assert (found.path[1:, 1] == found.path[:-1, 2]).all()
    assert found.path[0, 1] == 0
    cycles = np.bincount(found.path[:, 3], found.path[:, 2] - found.path[:, 1], len(Cause))
    assert abs(int(cycles.sum()) - found.cycles) <= 1
    return {cause: int(cycles[cause]) for cause in Cause if cycles[cause]}


def test_the_critical_path_of_tensor_cores():
    """16 wgmmas of one warp take 18 cycles each, then the latency of the last."""
    found = on_path(ran(plain(*[HGMMA] * 15, LAST, DRAIN)))
    assert found[Cause.TENSOR_RATE] == 16 * 18
    assert found[Cause.TENSOR_LATENCY] == GPU.wgmma_latency


def test_the_critical_path_goes_through_the_slower_of_two_warps():
    """One warp has exponentials, the other few: only the first counts, at its unit."""
    found = on_path(ran(plain(*[EXP] * 100), plain(*[FFMA] * 30)))
    assert found[Cause.PIPE] == 99 * 8
    assert set(found) == {Cause.PIPE}


def test_the_critical_path_of_a_barrier_goes_to_the_warp_that_came_last():
    meets = [(("event", 0), ("waits", 1), ("signals", 1), ("delay", 9))]
    alone = [(BARRIER, 0), (FFMA, -1)]
    late = [*plain(*[EXP] * 50), *alone]
    found = ran(alone, late, effects=meets, need=(2,))
    assert on_path(found)[Cause.PIPE] == 49 * 8
    assert on_path(found)[Cause.SYNC] == 18             # to signal, and to hear of it
    # steps of the first warp come first: only its barrier and what follows may be there
    assert (found.path[:, 0] >= 2).sum() >= 50


def test_the_critical_path_of_memory():
    """Two loads of which the second is used: the rate of HBM for both, its latency once."""
    late = [(("bytes", 1 << 20), ("near", 1 << 20), ("far", 1 << 20), ("late", 1))]
    found = on_path(ran([(LOAD, 0), (LOAD, 0), (USE, -1)], effects=late))
    rate = GPU.hbm_bytes_per_s / GPU.clock_hz / GPU.sms
    assert found[Cause.HBM_RATE] == pytest.approx(2 * (1 << 20) / rate, rel=0.01)
    assert found[Cause.MEMORY_LATENCY] == GPU.hbm_latency


def test_the_critical_path_of_shared_memory_and_issue_slots():
    found = on_path(ran(*[plain(*[SHARED] * 200)] * 4, passes=8))
    assert found[Cause.SHARED_RATE] == pytest.approx(4 * 200 * 8, rel=0.02)
    slots = on_path(ran(*[plain(*[FFMA] * 1000)] * 8))
    assert slots[Cause.ISSUE_SLOT] + slots.get(Cause.PIPE, 0) + slots.get(Cause.IN_ORDER, 0) == \
        pytest.approx(2000, abs=4)


def test_the_critical_path_crosses_ctas():
    """The second CTA follows the first, after what it takes to begin."""
    steps = [(INSTRS.index(FFMA), 0, 0, 1)] * 200
    warps = np.array([(0, 100, 0, 0, 0, -1), (100, 200, 0, 1, 1, 0)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), np.zeros(1, EFFECT), warps,
              np.zeros(0, np.int32), 1, 2)
    found = on_path(run(job, GPU))
    assert found[Cause.BEGINS] == GPU.begin_latency
    assert found[Cause.IN_ORDER] == 198


# **** what the SM's parts take of each other ****

def test_register_instructions_take_cycles_of_running_wgmmas():
    """A warp's wgmmas, beside another warp of the same scheduler."""
    warp = plain(*[LARGE] * 15, LARGE_LAST, DRAIN)
    alone = ran(warp).cycles
    def beside(instr: tuple, count: int) -> int:
        other = plain(*[instr] * count)
        return ran(warp, [], [], [], other).cycles - alone
    assert beside(EXP, 100) == pytest.approx(100 * GPU.wgmma_yield, abs=4)
    assert beside(FFMA, 300) == pytest.approx(300 * GPU.wgmma_yield, abs=4)
    assert beside(BARRIER, 100) == 0


def test_register_instructions_are_issued_less_often_beside_wgmmas():
    warp = plain(*[LARGE] * 15, LARGE_LAST, DRAIN)
    def end(instr: tuple, count: int, *others: list[tuple]) -> int:
        return int(ran(plain(*[instr] * count), [], [], [], *others).ends[0])
    assert end(FFMA, 500) == pytest.approx(500, abs=4)
    assert end(FFMA, 500, warp) == pytest.approx(500 * GPU.beside_wgmma, rel=0.02)
    mixed = plain(*[EXP, FFMA] * 100)
    assert int(ran(mixed).ends[0]) == pytest.approx(800, abs=10)      # each in the shadow of the other
    beside = int(ran(mixed, [], [], [], warp).ends[0])
    assert beside == pytest.approx(100 * (GPU.xu_beside_wgmma + GPU.beside_wgmma), rel=0.03)


def test_the_sms_of_a_cluster_share_their_part_of_l2():
    """One CTA of two that loads for both gets more than half, up to what a port gives."""
    effects = [(("event", -1), ("bytes", 1 << 14), ("near", 1 << 14)), (("event", 0), ("signals", 1)),
               (("event", 0), ("waits", 1))]
    made = np.zeros(3, EFFECT)
    for at, fields in enumerate(effects):
        for name, value in fields: made[name][at] = value
    steps = [(INSTRS.index(TMA), 0, 2, 1)] * 64 + [(INSTRS.index(BARRIER), 2, 1, 1), (0, 0, 0, 1)]
    warps = np.array([(0, 65, 0, 0, 0, -1), (65, 66, 1, 0, 1, -1)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), made, warps,
              np.array([64], np.int32), 2, 2, 2)
    assert run(job, GPU).cycles == pytest.approx(64 * (1 << 14) / 64 + GPU.tma_latency, rel=0.02)


@pytest.mark.parametrize(("opcode", "modifiers", "unit", "busy"), [
    ("F2FP", ".BF16.F32.PACK_AB", Unit.ALU, 2), ("F2F", ".F64.F32", Unit.XU, 8), ("MUFU", ".EX2", Unit.XU, 8),
    ("I2FP", ".F32.S32", Unit.ALU, 2), ("I2F", ".F64", Unit.XU, 8), ("FFMA", "", Unit.FMA, 1)])
def test_units(opcode: str, modifiers: str, unit: Unit, busy: int):
    found = cost_of(SASSInstruction(0, opcode, modifiers, "R0, R1", "", None), figures("h100"))
    assert (found.unit, found.busy, found.known) == (unit, busy, True)
