"""No template's kernels are predicted slower than the baseline accepts, each template has such a gate, and a
gate that fails names the lines that lost the time."""
from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from bench.timing import gates
from bench.timing.gate_cases import GateCase, cases
from tinygrad_nv.errors import PTXError
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
    assert lines[0].startswith("flash_wgmma: causal d 128, flash_wgmma: +")
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
