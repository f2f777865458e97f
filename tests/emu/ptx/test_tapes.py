"""Tapes: what the emulator counts is what the tapes have, clusters that are not asked for do not run, and
every phase that is waited for has the signals that complete it."""
from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from bench.lib.specs import BF16, attention, matmul
from tests.support.tile.gemm_case import bits, tensor_map
from tests.support.tile.reference_case import storages
from tinygrad_nv.ptx.emulator import Emulator, running
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.emulator.tapes import NOTE, Note, Tapes
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.tile.arguments import with_scratch
from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER = GPU("sm_90a", 132)
SMALL = Wgmma().block(128, 64).k(64).stages(2)


def launched(spec: object, schedule: Schedule, tapes: Tapes | None,
             seed: int = 0) -> tuple[Report, np.ndarray, str]:
    """The report, the result's bytes, the text."""
    made = TABLE.build(spec, schedule, HOPPER).kernels[0]
    emu, given, arguments = Emulator("sm_90a", seed=seed), storages(spec), TABLE.arguments(spec)
    memory = [emu.alloc(bits(each)) for each in given.values()]
    order = with_scratch(made, memory, arguments, lambda some: emu.alloc(np.zeros(some.nbytes, np.uint8)))
    maps = [tensor_map(order, each, 0) for each in made.launch.maps]
    report = emu.launch(made.ptx, made.grid, made.threads, [*order, *maps], dynamic_smem=made.dynamic_smem,
                        cluster=made.cluster, tapes=tapes)
    return report, memory[0].numpy(), made.ptx


CASES = {"wgmma": (matmul(256, 128, 512), SMALL),
         "multicast": (matmul(256, 128, 512), SMALL.cluster(2, 1)),
         "mma, cp.async": (matmul(128, 64, 512), Mma().block(64, 64).k(32).warps(2, 2).stages(3)),
         "attention": (attention(256, 300, 64, BF16, batch=1, heads=1), None)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_that_are_counted(name: str, seed: int):
    spec, schedule = CASES[name]
    schedule = schedule or TABLE.choose(spec, HOPPER)
    plain, right, text = launched(spec, schedule, None, seed)
    tapes = Tapes(range(_clusters(spec, schedule)))
    report, found, _ = launched(spec, schedule, tapes, seed)
    assert plain.findings == report.findings == []
    assert (found == right).all()
    lines = [each.line for each in next(iter(parse(text).functions.values())).body]
    steps = Counter(lines[source] for tape in tapes.warps for source in tape.sources)
    tries = {line for line, words in enumerate(text.splitlines(), 1) if "try_wait" in words or "bra" in words}
    counted = {site.line: site.warps for site in report.stats.sites if site.line not in tries}
    assert {line: steps[line] for line in counted} == counted


def _clusters(spec: object, schedule: Schedule) -> int:
    made = TABLE.build(spec, schedule, HOPPER).kernels[0]
    return int(np.prod(made.grid) // np.prod(made.cluster))


@pytest.mark.parametrize("name", CASES)
def test_every_phase_that_is_waited_for_is_signalled(name: str):
    spec, schedule = CASES[name]
    schedule = schedule or TABLE.choose(spec, HOPPER)
    tapes = Tapes(range(_clusters(spec, schedule)))
    launched(spec, schedule, tapes)
    signals, waits = defaultdict(int), set()
    for tape in tapes.warps:
        for each in tape.notes:
            key = int(each["key"]), int(each["a"])
            if each["kind"] == Note.ARRIVED: signals[key] += int(each["count"])
            if each["kind"] == Note.WAITED: waits.add(key)
    started = {key for key in waits if key[1] < 1 << 31}     # before its first phase an mbarrier is free
    assert started <= signals.keys()
    assert bool(started) == (name != "mma, cp.async")


def test_other_clusters_do_not_run():
    spec, schedule = CASES["wgmma"]
    report, found, _ = launched(spec, schedule, Tapes((1,)))
    whole, right, _ = launched(spec, schedule, None)
    assert report.stats.warp_instructions < 0.7 * whole.stats.warp_instructions
    same = (found.view(np.uint16) == right.view(np.uint16)).mean()
    assert same == pytest.approx(1 / _clusters(spec, schedule), abs=0.01)


def test_idle_tensor_cores_add_random_numbers():
    """Sums are as large as products of random numbers, and each warp's differ: softmax finds new maxima."""
    spec, schedule = CASES["wgmma"]
    tapes, idle = Tapes((0,)), Tapes((0,), idle=True)
    _, found, _ = launched(spec, schedule, tapes)
    _, other, _ = launched(spec, schedule, idle)
    assert (found != other).any()
    sums = (other.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(256, 128)
    recorded = sums[:128, :64]      # the tile of cluster 0
    assert recorded.std() == pytest.approx(np.sqrt(spec.k), rel=0.05)
    assert abs(recorded.mean()) < 0.1 * recorded.std()
    warps = np.corrcoef(recorded.reshape(8, -1))    # 16 rows each
    assert np.abs(warps - np.eye(8)).max() < 0.15
    for one, same in zip(tapes.warps, idle.warps, strict=True):
        assert (one.cta, one.warp, len(one.sources)) == (same.cta, same.warp, len(same.sources))


@pytest.mark.parametrize(("limit", "kinds"), [(1 << 18, []), (1 << 12, ["instruction-limit"])])
def test_what_is_kept_is_limited_not_what_runs(limit: int, kinds: list[str],
                                               monkeypatch: pytest.MonkeyPatch):
    """Keeps 91 KB of 546,000 warp-instructions: all steps of one cluster, and what 127 others read."""
    monkeypatch.setattr(running, "MOST_TAPED_BYTES", limit)
    monkeypatch.setattr(running, "FIRST_SLICE", 1 << 8)
    monkeypatch.setattr(running, "SLICE", 1 << 8)
    tapes = Tapes((0,), idle=True, others=range(128), brief=40000)
    report, _, _ = launched(matmul(2048, 512, 512), SMALL, tapes)
    passed = [each.kind for each in report.findings if each.kind == "instruction-limit"]
    assert passed[:1] == kinds
    if not kinds:
        notes = [*(tape.notes for tape in tapes.warps), *tapes.reads.values()]
        kept = 4 * sum(len(tape.sources) for tape in tapes.warps) + NOTE.itemsize * sum(map(len, notes))
        assert kept < limit < report.stats.warp_instructions


# each CTA takes the next work tile from a counter until 40 are gone, and says how many it had
DYNAMIC = """.version 8.0
.target sm_90
.address_size 64
.visible .entry dynamic(.param .u64 counter, .param .u64 out) {
    .reg .pred %p; .reg .b32 %r<5>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [counter]; ld.param.u64 %rd2, [out];
    mov.u32 %r1, 0;
LOOP: atom.global.add.u32 %r2, [%rd1], 1;
    setp.ge.u32 %p, %r2, 40;
    @%p bra DONE;
    add.u32 %r1, %r1, 1;
    bra LOOP;
DONE: mov.u32 %r3, %ctaid.x;
    mul.wide.u32 %rd3, %r3, 4;
    add.u64 %rd3, %rd2, %rd3;
    st.global.u32 [%rd3], %r1;
    ret;
}
"""


@pytest.mark.parametrize(("clusters", "others"), [((2,), ()), ((0, 3), ()), ((1,), (2, 3)),
                                                  ((0, 1, 2, 3), ())])
def test_a_tile_scheduler_deals_to_clusters_that_do_not_run(clusters: tuple[int, ...],
                                                            others: tuple[int, ...]):
    emu = Emulator()
    counter, out = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(4, np.uint32))
    emu.launch(DYNAMIC, 4, 1, [counter, out], tapes=Tapes(clusters, others=others, brief=30))
    found = out.numpy()
    assert sum(found) == 10 * len(clusters)
    assert all(abs(int(found[number]) - 10) <= 2 for number in clusters)
