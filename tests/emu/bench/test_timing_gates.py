"""No template's kernels are predicted slower than the baseline accepts, each template has such a gate, and a
gate that fails names the lines that lost the time. Launches of many layers from those of few, and kernels
that mutate.py breaks."""
from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.timing import gates, mutate, train_gpu_model
from bench.timing.gate_cases import GateCase, cases
from tinygrad_nv.errors import PTXError
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.tile.templates import TABLE

CASES = {case.name: case for case in cases()}
KNOWN = gates.read()
MATMUL, ATTENTION = CASES["wgmma: bf16"], CASES["flash_wgmma: causal d 128"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case.quick else pytest.mark.slow, id=name)
                                  for name, case in CASES.items()])
def test_no_kernel_is_slower_than_the_baseline(case: GateCase):
    lines = gates.judge(case, KNOWN)
    assert not lines, "\n".join(lines)


def test_every_template_of_gpus_has_a_gate_in_the_default_run():
    # an all-reduce waits for other GPUs: it has no time of its own
    templates = {template.name for family in TABLE.families("gpu") if family.name != "all_reduce"
                 for template in family.templates}
    assert {TABLE.of(case.schedule).name for case in CASES.values() if case.quick} == templates
    assert KNOWN.keys() == CASES.keys()


# **** what fails ****

SOFTMAX = ("MUFU.EX2", "FMNMX", "F2FP")


def spoilt(case: GateCase, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> list[str]:
    """The report where a kernel's text is another."""
    build = TABLE.build

    def changed(*arguments: Any):
        made = build(*arguments)
        assert old in made.ptx
        return replace(made, ptx=made.ptx.replace(old, new))
    monkeypatch.setattr(TABLE, "build", changed)
    return gates.judge(case, KNOWN)


def test_softmax_that_no_longer_overlaps_names_its_wait(monkeypatch: pytest.MonkeyPatch):
    lines = spoilt(ATTENTION, monkeypatch, "wait_group.sync.aligned 1;", "wait_group.sync.aligned 0;")
    # the other consumer's products fill the time: the wait is told by itself
    assert lines[0].startswith("flash_wgmma: causal d 128, flash_wgmma: 2 waits for all wgmmas, which were 1")
    assert "0 exponentials while a wgmma is under way, which were 66" in lines[0]
    (wait,) = [line for line in lines if "wgmma.wait_group.sync.aligned 0;  [WARPGROUP.DEPBAR" in line]
    assert "cycles a warp waits: line " in wait
    path = [line for line in lines if "cycles on the critical path: line " in line]
    assert any(name in line for line in path for name in SOFTMAX), path


@pytest.mark.slow
def test_a_pipeline_without_enough_stages_names_its_barrier_and_its_loads():
    lines = gates.judge(replace(MATMUL, schedule=MATMUL.schedule.stages(2)), KNOWN)
    assert any("mbarrier.try_wait" in line and "a warp waits" in line for line in lines)
    assert any("cp.async.bulk.tensor" in line and "latency of memory" in line for line in lines)
    assert any(line.strip().startswith("schedule: was") for line in lines)


def test_what_ptxas_serialises_is_reported(monkeypatch: pytest.MonkeyPatch):
    def serialised(*_: object): raise PTXError("ptxas changed the kernel: (C7510)")
    monkeypatch.setattr(gates, "records", serialised)
    assert gates.judge(MATMUL, KNOWN) == ["wgmma: bf16: ptxas changed the kernel: (C7510)"]
    assert gates.judge(MATMUL, {}) == ["wgmma: bf16: not in baseline.json: python "
                                       "bench/timing/gates.py --refresh"]


EXPONENTIALS = "exponentials while a wgmma is under way"
AROUND = "instructions around a tensor-core instruction"


@pytest.mark.parametrize(("change", "said"), [
    ({"us": 1.029}, []), ({"us": 0.5}, []), ({"us": 1.031}, ["+3.1%"]),
    ({"spilled_bytes": 8}, ["8 bytes spill"]),
    ({"loop": {AROUND: 1.04}}, [AROUND]), ({"loop": {AROUND: 0.5}}, []),
    ({"loop": {EXPONENTIALS: 0.9}}, [EXPONENTIALS]), ({"loop": {EXPONENTIALS: 1.5}}, [])], ids=str)
def test_what_is_worse(change: dict[str, Any], said: list[str]):
    old = KNOWN[ATTENTION.name][0]
    new = copy.deepcopy(old)
    if "us" in change: new["us"] *= change["us"]
    if "spilled_bytes" in change: new["spilled_bytes"] = change["spilled_bytes"]
    for name, factor in change.get("loop", {}).items(): new["loop"][name] *= factor
    found = gates.worse(old, new)
    assert len(found) == len(said)
    assert all(word in line for word, line in zip(said, found, strict=True))


def test_a_refresh_says_what_got_better_and_worse():
    old = {name: copy.deepcopy(KNOWN[name]) for name in ("wgmma: bf16", "norm: rms", "gemv: 1 row")}
    new = copy.deepcopy(old)
    new["wgmma: bf16"][0]["us"] *= 1.2
    new["norm: rms"][0]["us"] *= 0.9
    new["mma: bf16"] = KNOWN["mma: bf16"]
    del new["gemv: 1 row"]
    lines = list(gates.changes(old, new))
    assert [line.split()[0] for line in lines] == ["WORSE", "better", "new", "gone"]
    assert "(+20.0%)" in lines[0]
    assert list(gates.changes(new, new)) == []
    assert gates.render_baseline(KNOWN) == gates.BASELINE.read_text()


RING = """.version 8.6
.target sm_90a
.address_size 64
.shared .align 128 .b8 line[512];
.shared .align 8 .b64 bar[2];
.visible .entry add_up(.param .u64 from, .param .u64 to) .reqntid 128
{
    .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [from]; ld.param.u64 %d1, [to]; mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
    mov.u32 %r1, line; mov.u32 %r2, bar;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 512, [%r2];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
    @!%p1 bra WAIT;
    mov.u32 %r1, line; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2;
    ld.shared.b32 %r3, [%r1]; add.u32 %r3, %r3, 1; st.shared.b32 [%r1], %r3;
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    @%p0 bra END;
    mov.u32 %r1, line;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
    fence.acq_rel.gpu;
    ret;
}
"""


def test_what_is_broken():
    made = mutate.mutants(RING)
    assert [(one.line, one.how.rpartition(": ")[2]) for one in made] == [
        (12, "left out"), (12, "one arrival more"), (13, "left out"), (13, "another space"), (14, "left out"),
        (14, "16 bytes more"), (14, "16 bytes fewer"), (14, "no bytes"), (18, "left out"),
        (20, "does not wait"), (20, "waits for the other phase"),
        (24, "left out"), (24, "another space"), (25, "left out"),
        (25, "32 threads more"), (25, "32 threads fewer"), (29, "left out"), (30, "left out"),
        (30, "one group more may be pending"), (32, "left out")]
    for one in made:
        changed = [i for i, (x, y) in enumerate(zip(RING.splitlines(), one.text.splitlines(), strict=True), 1)
                   if x != y]
        assert changed == [one.line]


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """All that does harm is found. Of the fence of an mbarrier's init there is a note, left out or of global
    memory, and of the last wait; a fence that nothing follows does nothing."""
    (tmp_path / "ring.ptx").write_text(RING)
    monkeypatch.setattr(sys, "argv", ["mutate.py", str(tmp_path / "ring.ptx"), "--arg", "arange:u32:128",
                                      "--arg", "empty:512"])
    assert mutate.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:3]) for line in said if " line " in line] == [
        "noted line 13:", "noted line 13:", "noted line 29:", "noted line 30:", "noted line 30:",
        "silent line 32:"]
    assert "20 of 20 mutants: 14 found, 5 noted, 1 silent" in said


def test_what_is_missed_is_said(tmp_path: Path):
    """A run that finds nothing: mutants with other numbers are missed. The kernel itself must be sound."""
    def run(text: str, seed: int | str) -> mutate.Outcome:
        return mutate.Outcome((), (np.int32(text == RING).tobytes(),), (), frozenset(range(99)))

    told: list[str] = []
    made = mutate.survey(run, RING, most=5, tell=told.append)
    assert {verdict.kind for verdict in made} == {"numbers"}
    assert told[-1] == "5 of 20 mutants: 5 numbers"
    with pytest.raises(mutate.PTXError, match="as it stands has findings under seed late: race"):
        mutate.survey(lambda text, seed: mutate.Outcome(("race",), (), (), frozenset()), RING)


SMALL = train_gpu_model.GPT2 | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
                                "num_key_value_heads": 2, "vocab_size": 512}


@pytest.mark.slow
def test_launches_of_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 layers, scheduled as they are, and from 2 and 3: as many of every kernel that has no layers, or
    one layer, among its arguments, and the bytes of all."""
    config = train_gpu_model.shorten(parse_config(SMALL), 6)
    options = {"dtype": "bfloat16", "max_length": 64, "per_device_train_batch_size": 2}
    every = train_gpu_model.launches_of(config, options)
    monkeypatch.setattr(train_gpu_model, "WHOLE", 4)
    few = train_gpu_model.launches_of(config, options)
    assert sum(few.values()) == sum(every.values())
    for call, count in few.items():
        if call.spec is not None: assert every[call] == count, call
    def moved(found: dict[train_gpu_model.Call, int]) -> int:
        return sum(call.nbytes * count for call, count in found.items())
    assert moved(few) == pytest.approx(moved(every), rel=1e-3)
