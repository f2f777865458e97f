"""Parts of bench/gpu/run.py: "smoke" and "chains" on the emulated driver, and on drivers with a bug, each
of which a row of theirs finds; "conv", "language" and "train": what is wrong is found, what is predicted
is a row."""
from __future__ import annotations

import struct
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu import chains as gpu_chains
from bench.gpu import compare as gpu_compare
from bench.gpu import conv as gpu_conv
from bench.gpu import correct as gpu_correct
from bench.gpu import record as gpu_record
from bench.gpu import smoke as gpu_smoke
from bench.gpu import tile_language as gpu_language
from bench.gpu import train as gpu_train
from bench.gpu.cases import Case, Cases, Memory
from bench.gpu.compare import differs, wrong
from bench.gpu.parts import PARTS, NotMeasured
from bench.gpu.train_updates import Update
from tests.support.runtime import cuda_fake
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.driver import Launch
from tinygrad_nv.runtime.emulated import driver as emulated
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.emulated.graph import EmulatedExecutable, EmulatedGraph

OPTIONS = Namespace(emulate=True, arch="sm_90a", seed=0, only="")
N = 64


# **** smoke ****

def smoke(name: str, options: Namespace = OPTIONS) -> dict[str, Any]:
    return gpu_smoke.open_worker(options)(name, 10.0)


@pytest.mark.parametrize("name", gpu_smoke.ASKED)
def test_the_emulated_driver_does_what_is_taken_for_granted(name: str):
    assert smoke(name) == {"status": "emulated", "why": "as it must be"}


@pytest.mark.parametrize("name", gpu_smoke.ASKED)
def test_the_calls_of_cuda(name: str):
    """CUDADriver on the fake of cuda.bindings."""
    with cuda_fake.installed() as fake:
        assert smoke(name, Namespace(emulate=False)) == {"status": "measured", "why": "as it must be"}
        if name.startswith("other arguments"): assert fake.calls["cuGraphExecKernelNodeSetParams"] == 1


def without_cluster(work: Any) -> Any:
    return replace(work, cluster=(1, 1, 1)) if isinstance(work, Launch) else work


def loses_the_cluster_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    add = EmulatedGraph.add
    monkeypatch.setattr(EmulatedGraph, "add",
                        lambda self, work, after=(): add(self, without_cluster(work), after))


def loses_the_cluster_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    update = EmulatedExecutable.update
    monkeypatch.setattr(EmulatedExecutable, "update",
                        lambda self, node, work: update(self, node, without_cluster(work)))


def keeps_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedExecutable, "update", lambda self, node, work: None)


def keeps_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    update = EmulatedExecutable.update
    monkeypatch.setattr(EmulatedExecutable, "update", lambda self, node, work: update(
        self, node, replace(work, grid=self.works[node.number].grid)))


def skips_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    order = EmulatedGraph.order
    monkeypatch.setattr(EmulatedGraph, "order", lambda self: order(self)[:-1])


@pytest.mark.parametrize(("bug", "name"), [
    (loses_the_cluster_of_a_node, "a cluster of 2 of a graph's node"),
    (loses_the_cluster_of_a_node, "a cluster of 8 of a graph's node"),
    (loses_the_cluster_of_a_node, "nodes with and without clusters"),
    (loses_the_cluster_of_an_update, "other arguments of a node with a cluster"),
    (loses_the_cluster_of_an_update, "another grid of a node with a cluster"),
    (keeps_the_arguments, "other arguments of a node with a cluster"),
    (keeps_the_arguments, "nodes with and without clusters"),
    (keeps_the_arguments, "tensor maps of a node with a cluster"),
    (keeps_the_grid, "another grid of a node with a cluster"),
    (skips_a_node, "programmatic edges")], ids=lambda each: getattr(each, "__name__", None))
def test_a_driver_with_a_bug_is_found(monkeypatch: pytest.MonkeyPatch, bug: Any, name: str):
    bug(monkeypatch)
    row = smoke(name)
    assert row["status"] == "disagrees"
    assert "must be" in row["why"] or "not the product" in row["why"]


def test_before_hopper_nothing_is_asked():
    with pytest.raises(NotMeasured, match="need sm_90"): smoke("a cluster in a stream",
                                                               Namespace(emulate=True, arch="sm_80", seed=0))


# **** chains ****

LOAD = "ld.global.b32 %v, [%a];"
WAITS = """.version 8.0
.target sm_90
.address_size 64
.visible .entry each(.param .u64 out, .param .u64 in)
{
.reg .b64 %o, %a, %w;
.reg .b32 %v, %t;
ld.param.b64 %o, [out];
ld.param.b64 %a, [in];
mov.u32 %t, %tid.x;
mul.wide.u32 %w, %t, 4;
add.u64 %o, %o, %w;
add.u64 %a, %a, %w;
griddepcontrol.wait;
ld.global.b32 %v, [%a];
add.u32 %v, %v, %v;
st.global.b32 [%o], %v;
ret;
}
"""
LATE = WAITS.replace(f"griddepcontrol.wait;\n{LOAD}", f"{LOAD}\ngriddepcontrol.wait;")
PLAIN = WAITS.replace("griddepcontrol.wait;\n", "")


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cases]:
    """A file that what the emulator launches is recorded into."""
    monkeypatch.setattr(Emulator, "launch", Emulator.launch)
    made = Cases(tmp_path / "cases.sqlite", write=True)
    recorder = gpu_record.Recorder(made)
    recorder.test = "test_here::test_it"
    recorder.install()
    yield made
    made.close()


def recorded(cases: Cases, ptx: str) -> Case:
    """A launch by itself."""
    emu = Emulator("sm_90a")
    given = np.arange(N, dtype=np.int32)
    assert not emu.launch(ptx, 1, N, [emu.alloc(np.zeros(N, np.int32)), emu.alloc(given)]).findings
    return cases.get(cases.names()[-1])


def measured(cases: Cases, tmp_path: Path, **options: Any) -> dict[str, Any]:
    """The row of the test."""
    given = Namespace(**{**vars(OPTIONS), "cases": tmp_path / "cases.sqlite", **options})
    assert gpu_chains.rows(given) == ["test_here::test_it"]
    measure = PARTS["chains"].open_worker
    assert measure is not None
    return measure(given)("test_here::test_it", 10.0)


def test_a_text_with_an_address_is_not_recorded(cases: Cases):
    """It would name the same place on a device, where something else lies, or nothing."""
    emu = Emulator("sm_90a")
    out, given = emu.alloc(np.zeros(N, np.int32)), emu.alloc(np.arange(N, dtype=np.int32))
    for said in (str(given.ptr), f"{given.ptr:#x}"):
        text = PLAIN.replace("ret;", f".reg .b64 %named; mov.b64 %named, {said};\nret;")
        assert not emu.launch(text, 1, N, [out, given]).findings
        assert cases.names() == []
    recorded(cases, PLAIN)
    assert len(cases.names()) == 1


@pytest.mark.parametrize(("ptx", "bits"), [("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", True),
                                           ("ex2.approx.ftz.f32 %f0, %f1;", False)])
def test_only_values_without_approximations_are_judged_by_bits(ptx: str, bits: bool):
    """The emulator rounds approximations exactly, which no GPU does."""
    values = np.arange(N, dtype=np.float32)
    memory = Memory(0, values.tobytes(), values.tobytes(), "float32")
    made = gpu_record.judge(0, memory, ptx, "float32", values.astype(np.float64), np.full(N, 2.0**-20))
    assert made.exact.size == made.bound.size == (0 if bits else N)


def test_kernels_that_wait_are_chained(cases: Cases, tmp_path: Path):
    recorded(cases, PLAIN)
    recorded(cases, LATE.replace("%v", "%probe"))
    waits = recorded(cases, WAITS)
    assert gpu_chains.waiting(cases) == [waits.name]
    row = measured(cases, tmp_path)
    assert (row["status"], row["launches"], row["same"]) == ("emulated", 1, 1)
    answers = list(gpu_chains.in_chains(device := EmulatedDriver("sm_90a"), waits))
    assert len(answers) == 2 * gpu_chains.ROUNDS, "in a stream and in a graph"
    assert {bytes(found[0]) for found, _ in answers} == {waits.memory[0].after}
    assert device.used_bytes == 0


def test_the_same_over_the_calls_of_cuda(cases: Cases, tmp_path: Path):
    recorded(cases, WAITS)
    with cuda_fake.installed(): row = measured(cases, tmp_path, emulate=False)
    assert (row["status"], row["same"]) == ("measured", 1)


def test_a_kernel_that_reads_before_it_waits_is_found(cases: Cases, tmp_path: Path):
    """By itself it is right: recording finds nothing."""
    case = recorded(cases, LATE)
    with pytest.raises(RuntimeError, match=r"is not ordered after griddepcontrol\.wait"):
        measured(cases, tmp_path)
    assert gpu_correct.worst(gpu_correct.verdict(case, *each) for each in gpu_correct.once(
        EmulatedDriver("sm_90a"), case)).kind == "same"


@pytest.mark.parametrize(("launch", "kind"), [(0, "same"), (3, "disagrees"), (7, "disagrees"),
                                              (23, "disagrees")])
def test_every_answer_of_a_chain_is_compared(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             launch: int, kind: str):
    """After the kernel of a round, counted among all launches, an element of its result is another. There are
    4 launches a round, 12 in the stream and 12 in the graph."""
    recorded(cases, WAITS)

    class Wrong(EmulatedDriver):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.launches, self.arena = 0, 0

        def alloc(self, nbytes: int) -> int:
            address = super().alloc(nbytes)
            self.arena = self.arena or address
            return address

        def run(self, work: Any, stream: Any, ahead: Any = ()) -> Any:
            done = yield from super().run(work, stream, ahead)
            self.launches += isinstance(work, Launch)
            if isinstance(work, Launch) and self.launches == launch:
                memory = self.emulator.buffers[self.arena].data
                memory[4 * 9:4 * 10] = np.frombuffer(struct.pack("<I", 1234), np.uint8)
            return done

    monkeypatch.setattr(emulated, "EmulatedDriver", Wrong)
    row = measured(cases, tmp_path)
    assert row[kind] == 1, row
    if kind == "disagrees":
        assert "is 9: 1234 on the device, 18 emulated" in row["why"]
        assert "--part chains --only 'test_here::test_it#" in row["why"]


CONVS = {each.name: each for each in gpu_conv.shapes()}
KERNELS = {each.name: each for each in gpu_language.shapes()}


@pytest.mark.parametrize("name", ["UNet 2x64x64x320 to 320, 3x3, stride 2, f16",
                                  "UNet 2x64x64x320 to 320, 3x3, bf16, bias, residual"])
def test_convolutions(name: str):
    small = CONVS[name].scale_down()
    assert gpu_conv.run_emulated(small, OPTIONS)["status"] == "emulated"
    given = small.make_inputs("cpu")
    assert wrong(small, given, gpu_conv.cudnn(small, given, OPTIONS)) == ""
    given[1]["out"][0, 3, 2, 5] += 1
    assert differs(small, given).startswith("set 1: position ")


@pytest.mark.parametrize("name", ["softmax 4096x4096 bf16", "w4a16 16x4096x4096 f16"])
def test_kernels_of_the_language(name: str):
    assert gpu_language.run_emulated(KERNELS[name], OPTIONS)["status"] == "emulated"
    small = KERNELS[name].scale_down()
    given = small.make_inputs("cpu")
    assert wrong(small, given, small.torch(given, OPTIONS)) == ""
    given[0]["out"][1, 7] += 1
    assert differs(small, given).startswith("set 0: ")


def test_schedules_are_those_of_the_model():
    for each in KERNELS.values():
        assert str(gpu_language.schedule_of(each)) == gpu_language.model_cases()[each.case]["schedule"]


TRAINING = {each.name: each for each in gpu_train.shapes()}


@pytest.mark.parametrize("name", TRAINING)
def test_torch_is_right(name: str):
    """And what it is given to compile."""
    torch.manual_seed(0)
    small = TRAINING[name].scale_down()
    given = small.make_inputs("cpu")
    if "numbers" in given[0]:   # torch adds up bfloat16 on a CPU: few whole numbers are exact
        for one in given: one["grad"].round_().clamp_(-1, 1)
    run = gpu_train.torch_eager(small, given, Namespace())
    assert gpu_compare.wrong(small, given, run) == ""
    if isinstance(small, Update): return
    run = gpu_train.bind_torch(given, small.compilable)
    assert gpu_compare.wrong(small, given, run) == ""
    for result in small.results:
        one = dict(given[0])
        one[result] = one[result] * 1.02
        assert result in small.unlike(one)


@pytest.mark.parametrize("change", ["g", "v"])
def test_a_wrong_step_is_found(change: str):
    small: Any = TRAINING["AdamW GPT-2 124M f32"].scale_down()
    given = small.make_inputs("cpu")
    run = gpu_train.torch_eager(small, given, Namespace())
    before = given[0]["again"]

    def again() -> None:
        given[0][f"{change}1"].mul_(1.001)
        before()
        given[0][f"{change}1"].div_(1.001 if change == "g" else 1)

    given[0]["again"] = again
    assert small.unlike(given[0]) != ""
    run(0)


@pytest.mark.parametrize("name", ["silu·mul gradient 8192x14336", "norm weight gradient 8192x4096"])
def test_ours_is_right(name: str):
    row = gpu_train.run_emulated(TRAINING[name], Namespace(arch="sm_90a", seed=0))
    assert row["status"] == "emulated", row["why"]


def test_rows_that_are_predicted():
    known = {name for name, each in TRAINING.items() if gpu_train.predictions(each)}
    assert {"cross entropy 4096x50304 f32 → bf16", "AdamW GPT-2 124M bf16, masters",
            "norm of gradients GPT-2 124M bf16", "norm weight gradient 8192x4096",
            "rope gradient 1x8192, 32/8 heads of 128", "silu·mul gradient 8192x14336"} <= known
