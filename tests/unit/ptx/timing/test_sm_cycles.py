"""The model of an SM in cycles: published latencies of wgmma, units, scoreboards, barriers, copies. Which
unit an instruction takes: a name that begins like another's is its own."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.sass import SASSInstruction
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures
from tinygrad_nv.ptx.timing.job import EFFECT, INSTR, STEP, WARP, Job
from tinygrad_nv.ptx.timing.simulator import Cause, Run, run
from tinygrad_nv.ptx.timing.units import Kind, Unit, cost_of

GPU = figures("h100")
FFMA = (Unit.FMA, Kind.PLAIN, 1, 0, -1, -1, 1, 4, 0, 0, 3, 0)
HGMMA = (Unit.TENSOR, Kind.WGMMA, 2, 0, -1, -1, 2, 6, 18, 18, 0, 0)          # m64n8k16
LAST = (*HGMMA[:-1], 1)                                                   # of a group
DRAIN = (Unit.CONTROL, Kind.WGMMA_WAIT, 1, 0, -1, -1, 1, 6, 0, 0, 0, 0)
LOAD = (Unit.MEMORY, Kind.GLOBAL_READ, 1, 0, 0, -1, 4, 0, 0, 0, 0, 0)        # sets scoreboard 0
USE = (Unit.FMA, Kind.PLAIN, 1, 1, -1, -1, 1, 4, 0, 0, 3, 0)                 # waits for it
SHARED = (Unit.SHARED, Kind.SHARED_ACCESS, 1, 0, 0, -1, 1, 29, 0, 0, 0, 0)
EXP = (Unit.XU, Kind.PLAIN, 1, 0, -1, -1, 8, 18, 0, 0, 1, 0)
BARRIER = (Unit.CONTROL, Kind.PLAIN, 1, 0, -1, -1, 2, 6, 0, 0, 0, 0)
TMA = (Unit.COPY, Kind.TMA_READ, 1, 0, -1, -1, 2, 20, 0, 0, 0, 0)
LARGE = (*HGMMA[:8], 128, 128, 0, 0)                                      # m64n256k16
LARGE_LAST = (*LARGE[:-1], 1)
HMMA = (Unit.TENSOR, Kind.MMA, 1, 0, -1, -1, 1, 24, 6, 0, 14, 0)          # m16n8k16
ARRIVE = (Unit.CONTROL, Kind.WGMMA_ARRIVE, 1, 0, -1, -1, 1, 6, 0, 0, 0, 0)
FENCE = (Unit.MEMORY, Kind.HOLD, 6, 0, -1, -1, 2, GPU.fence_latency, 0, 0, 0, 0)
SYNCWARP = (Unit.CONTROL, Kind.HOLD, 1, 0, -1, -1, 1, GPU.reconverge_latency, 0, 0, 0, 0)
INSTRS = (HMMA, ARRIVE, FENCE, SYNCWARP, FFMA, HGMMA, LAST, DRAIN, LOAD, USE, SHARED, EXP, BARRIER, TMA,
          LARGE, LARGE_LAST)


def ran(*warps: list[tuple], effects: tuple | list = (), passes: int = 1, need: tuple[int, ...] = (),
        gpu: GPUFigures = GPU, group: tuple[int, ...] = ()) -> Run:
    """Warps of (instruction, index of its effect or -1), one on each scheduler in turn."""
    steps, rows = [], []
    for number, warp in enumerate(warps):
        begin = len(steps)
        for instr, effect in warp:
            steps.append((INSTRS.index(instr), max(effect, 0), effect >= 0, passes))
        rows.append((begin, len(steps), 0, number % 4, 0, -1, group[number] if group else -1))
    made = np.zeros(max(1, len(effects)), EFFECT)
    made["event"] = -1
    for at, fields in enumerate(effects):
        for name, value in fields: made[name][at] = value
    return run(Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), made, np.array(rows, WARP),
                   np.array(need, np.int32), 1, 1), gpu)


def plain(*instrs: tuple) -> list[tuple]: return [(each, -1) for each in instrs]


@pytest.mark.parametrize(("count", "cycles"), [(1, 57.7), (4, 113.5), (8, 185.5)])
def test_latency_of_wgmma_is_that_of_an_h200(count: int, cycles: float):
    """Fence, m64n8k16 wgmmas, commit and wait, of one warpgroup (HOPPER_TIMING.md 7.3)."""
    warp = plain(*[HGMMA] * (count - 1), LAST, DRAIN)
    assert ran(warp, warp, warp, warp, gpu=figures("h200")).cycles == pytest.approx(cycles, abs=2)


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
    warp = np.array([(0, 65, 0, 0, 0, -1, -1)], WARP)
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
    warps = np.array([(0, 100, 0, 0, 0, -1, -1), (100, 200, 0, 1, 1, 0, -1)], WARP)
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
    warps = np.array([(0, 100, 0, 0, 0, -1, -1), (100, 200, 0, 1, 1, 0, -1)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), np.zeros(1, EFFECT), warps,
              np.zeros(0, np.int32), 1, 2)
    found = on_path(run(job, GPU))
    assert found[Cause.BEGINS] == GPU.begin_latency
    assert found[Cause.IN_ORDER] == 198


# **** what the SM's parts take of each other ****

def test_register_instructions_are_issued_less_often_beside_wgmmas():
    warp = plain(*[LARGE] * 15, LARGE_LAST, DRAIN)
    def end(instr: tuple, count: int, *others: list[tuple]) -> int:
        return int(ran(plain(*[instr] * count), [], [], [], *others).ends[0])
    assert end(FFMA, 500) == pytest.approx(500, abs=4)
    assert end(FFMA, 300, warp) == pytest.approx(300 * 3 * GPU.beside_wgmma, rel=0.02)     # it reads three
    assert end(BARRIER, 100, warp) == end(BARRIER, 100)
    mixed = plain(*[EXP, FFMA] * 100)
    assert int(ran(mixed).ends[0]) == pytest.approx(800, abs=10)      # each in the shadow of the other
    beside = int(ran(mixed[:160], [], [], [], warp).ends[0])
    assert beside == pytest.approx(80 * (GPU.xu_beside_wgmma + 4 * GPU.beside_wgmma), rel=0.03)


def test_registers_give_three_a_cycle():
    """An FFMA reads three; mma.sync of m16n8k16 has 14 in six cycles, and leaves four of 18 for others."""
    alone = ran(plain(*[HMMA] * 1000)).cycles
    assert alone == pytest.approx(6 * 1000, rel=0.02)
    assert ran(plain(*[HMMA, FFMA] * 1000)).cycles == pytest.approx(alone, rel=0.02)
    both = plain(*[HMMA, *[FFMA] * 6] * 1000)
    assert ran(both).cycles == pytest.approx(1000 * (14 + 6 * 3) / 3, rel=0.02)


def test_a_wgmma_begins_when_all_warps_of_its_warpgroup_have_arrived():
    products = plain(ARRIVE, *[HGMMA] * 7, LAST, DRAIN)
    late = [*plain(*[FFMA] * 400), *products]
    together = ran(products, products, products, late, group=(0, 0, 0, 0))
    assert min(together.ends) >= 400 + 8 * 18
    apart = ran(products, products, products, late)
    assert min(apart.ends) < 300
    assert on_path(together)[Cause.TENSOR_RATE] == pytest.approx(8 * 18, abs=20)


def test_a_fence_holds_its_warp_and_so_does_meeting_again_beside_wgmmas():
    fence = plain(FENCE, FFMA)
    assert ran(fence).cycles == pytest.approx(GPU.fence_latency, abs=5)
    assert ran(plain(FFMA, FFMA), fence).ends[0] < 10
    meets = plain(SYNCWARP, FFMA)       # a __syncwarp takes no time but in a warp that issues wgmmas
    assert ran(meets).cycles < 10
    assert ran(plain(LAST, SYNCWARP, DRAIN)).cycles == pytest.approx(GPU.reconverge_latency, abs=10)
    for text, latency in (("MEMBAR.ALL.GPU", GPU.fence_latency), ("MEMBAR.SC.GPU", GPU.fence_latency),
                          ("WARPSYNC.ALL", GPU.reconverge_latency)):
        opcode, _, modifiers = text.partition(".")
        found = cost_of(SASSInstruction(0, opcode, f".{modifiers}", "", "", None), GPU)
        assert (found.kind, found.latency) == (Kind.HOLD, latency)
    assert cost_of(SASSInstruction(0, "MEMBAR", ".ALL.CTA", "", "", None), GPU).kind == Kind.PLAIN


def test_requests_to_hbm_wait_where_it_is_busy():
    """Loads of 4 KiB by a warp that waits for each, and by four that do not: by Little's law HBM serves B
    waiting bytes at a share r of its rate P for which B = c P r^2 / (1 - r), c being what crowding takes."""
    far = [(("bytes", 4096), ("near", 4096), ("far", 4096), ("late", 1))]
    rate = GPU.hbm_bytes_per_s / GPU.clock_hz / GPU.sms
    whole = GPU.hbm_crowding * GPU.clock_hz * rate
    share = (np.sqrt(4096**2 + 4 * whole * 4096) - 4096) / (2 * whole)
    assert pytest.approx(whole * share**2 / (1 - share)) == 4096
    single = ran([(LOAD, 0), (USE, -1)] * 20, effects=far).cycles
    assert single == pytest.approx(20 * (4096 / rate / share + GPU.hbm_latency), rel=0.02)
    many = ran(*[[*[(LOAD, 0)] * 200, (USE, -1)]] * 4, effects=far).cycles
    assert 800 * 4096 / rate < many < 1.03 * 800 * 4096 / rate
    idle = replace(GPU, hbm_crowding=0.0)
    alone = ran([(LOAD, 0), (USE, -1)] * 20, effects=far, gpu=idle).cycles
    assert alone == pytest.approx(20 * (4096 / rate + GPU.hbm_latency), rel=0.02)


def test_the_sms_of_a_cluster_share_their_part_of_l2():
    """One CTA of two that loads for both gets more than half, up to what a port gives."""
    effects = [(("event", -1), ("bytes", 1 << 14), ("near", 1 << 14)), (("event", 0), ("signals", 1)),
               (("event", 0), ("waits", 1))]
    made = np.zeros(3, EFFECT)
    for at, fields in enumerate(effects):
        for name, value in fields: made[name][at] = value
    steps = [(INSTRS.index(TMA), 0, 2, 1)] * 64 + [(INSTRS.index(BARRIER), 2, 1, 1), (0, 0, 0, 1)]
    warps = np.array([(0, 65, 0, 0, 0, -1, -1), (65, 66, 1, 0, 1, -1, -1)], WARP)
    job = Job(np.array(list(INSTRS), INSTR), np.array(steps, STEP), made, warps,
              np.array([64], np.int32), 2, 2, 2)
    assert run(job, GPU).cycles == pytest.approx(64 * (1 << 14) / 64 + GPU.tma_latency, rel=0.02)


@pytest.mark.parametrize(("opcode", "operands", "count"), [
    ("FFMA", "R4, R5.reuse, R6, R7", 3), ("MUFU", "R2, R3", 1), ("FADD", "R0, R1, -RZ", 1),
    ("FMNMX", "R0, R1, R2, !PT", 2), ("FSETP", "P0, PT, R8, R9, PT", 2), ("IMAD", "R0, R1, UR4, R2", 2),
    ("FMUL", "R3, R3, 1.5", 1)])
def test_registers_that_arithmetic_reads(opcode: str, operands: str, count: int):
    assert cost_of(SASSInstruction(0, opcode, "", operands, "", None), GPU).registers == count


@pytest.mark.parametrize(("modifiers", "count"), [
    (".16816.F32.BF16", 14), (".1688.F32.TF32", 14), (".1688.F32", 11), (".16816.F16", 10)])
def test_registers_of_mma(modifiers: str, count: int):
    assert cost_of(SASSInstruction(0, "HMMA", modifiers, "R0, R4, R8, R0", "", None), GPU).registers == count


def test_what_never_happens_takes_an_issue_slot_alone():
    """ptxas keeps @!PT LDS beside some barriers: an H100 does not wait for shared memory there."""
    load = SASSInstruction(0, "LDS", "", "RZ, [RZ]", "@!PT", None)
    assert (cost_of(load, GPU).kind, cost_of(load, GPU).latency) == (Kind.PLAIN, 1)
    assert cost_of(replace(load, guard="@PT"), GPU).kind == Kind.SHARED_ACCESS


@pytest.mark.parametrize(("opcode", "modifiers", "unit", "busy"), [
    ("F2FP", ".BF16.F32.PACK_AB", Unit.ALU, 2), ("F2F", ".F64.F32", Unit.XU, 8), ("MUFU", ".EX2", Unit.XU, 8),
    ("I2FP", ".F32.S32", Unit.ALU, 2), ("I2F", ".F64", Unit.XU, 8), ("FFMA", "", Unit.FMA, 1)])
def test_units(opcode: str, modifiers: str, unit: Unit, busy: int):
    found = cost_of(SASSInstruction(0, opcode, modifiers, "R0, R1", "", None), figures("h100"))
    assert (found.unit, found.busy, found.known) == (unit, busy, True)
