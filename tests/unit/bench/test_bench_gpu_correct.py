"""Recorded launches, replayed on a device: what is the same, what is let pass and why, and what disagrees."""
from __future__ import annotations

import json
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu import compare as gpu_compare
from bench.gpu import correct as gpu_correct
from bench.gpu import gemm as gpu_gemm
from bench.gpu import gemm_contenders
from bench.gpu import record as gpu_record
from bench.gpu.cases import Case, Cases, Judged, relocate
from bench.gpu.correct import replay, verdict
from tests.support.runtime import cuda_fake
from tinygrad_nv.ptx.assemble import assemble, sass
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "bench" / "gpu" / "run.py")

HEAD = ".version 9.4\n.target sm_80\n.address_size 64\n"
N = 64


def kernel(body: str, load: str = "ld.global.b32 %v, [%a];") -> str:
    """out[i] = %v of in[i], %v being a register of 32 bits."""
    return HEAD + f""".visible .entry each(.param .u64 out, .param .u64 in)
{{
.reg .b64 %o, %a, %w;
.reg .b32 %v, %t, %s;
ld.param.b64 %o, [out];
ld.param.b64 %a, [in];
mov.u32 %t, %tid.x;
mul.wide.u32 %w, %t, 4;
add.u64 %o, %o, %w;
add.u64 %a, %a, %w;
{load}
{body}
st.global.b32 [%o], %v;
ret;
}}
"""


DOUBLE = kernel("add.u32 %v, %v, %v;")
EXP = kernel("ex2.approx.f32 %v, %v;")
TURNS = kernel("atom.global.add.u32 %v, [%a], 1;", "ld.param.b64 %a, [in];")
THROUGH = kernel("ld.global.b64 %a, [%a];\nld.global.b32 %v, [%a];", "ld.param.b64 %a, [in];")


@pytest.fixture
def cases(tmp_path: Path) -> Iterator[Cases]:
    made = Cases(tmp_path / "cases.sqlite", write=True)
    yield made
    made.close()


@pytest.fixture
def recorder(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> gpu_record.Recorder:
    """Records from now to the end of the test."""
    monkeypatch.setattr(Emulator, "launch", Emulator.launch)
    made = gpu_record.Recorder(cases)
    made.test = "test_here::test_it"
    made.install()
    return made


def recorded(cases: Cases, ptx: str = DOUBLE, given: np.ndarray | None = None, seed: int = 0) -> Case:
    """A launch of `kernel` on 64 numbers."""
    given = np.arange(N, dtype=np.int32) if given is None else given
    emu = Emulator("sm_90a", seed=seed)
    report = emu.launch(ptx, 1, N, [emu.alloc(np.zeros(N, given.dtype)), emu.alloc(given)])
    assert not report.findings
    return cases.get(cases.names()[-1])


class Wrong(EmulatedDriver):
    """A device that writes other bytes than the kernel did, at an element of the first buffer."""
    element, word = 5, 1234

    def copy_out(self, target: memoryview, address: int, stream: object = None) -> None:
        super().copy_out(target, address)
        if address == min(self.buffers): struct.pack_into("<I", target, 4 * self.element, self.word)


# **** recording ****

def test_a_launch_is_kept_with_what_it_was_given_and_what_came_of_it(recorder: object, cases: Cases):
    case = recorded(cases)
    assert (case.test, case.entry) == ("test_here::test_it", "each")
    assert (case.grid, case.block) == ((1, 1, 1), (N, 1, 1))
    assert case.arch == "sm_90a"
    assert case.ptx == DOUBLE
    assert [each.dtype for each in case.memory] == ["int32", "int32"]
    assert case.memory[0].before == bytes(4 * N)
    assert case.memory[0].after == (2 * np.arange(N, dtype=np.int32)).tobytes()
    assert case.memory[1].before == case.memory[1].after == np.arange(N, dtype=np.int32).tobytes()


def test_the_same_launch_is_kept_once_and_another_beside_it(recorder: object, cases: Cases):
    recorded(cases)
    recorded(cases, seed=3)
    recorded(cases, given=np.arange(N, dtype=np.int32) + 1)
    assert len(cases.names()) == 2


def test_launches_with_findings_are_not_kept(recorder: object, cases: Cases):
    emu = Emulator()
    emu.launch(DOUBLE, 1, N, [emu.alloc(4 * N - 4), emu.alloc(np.zeros(N, np.int32))])
    assert cases.names() == []


def test_emulators_that_sum_exactly_are_not_kept(recorder: object, cases: Cases):
    emu = Emulator(exact=True)
    emu.launch(DOUBLE, 1, N, [emu.alloc(4 * N), emu.alloc(np.zeros(N, np.int32))])
    assert cases.names() == []


def test_no_more_of_a_test_than_that(recorder: gpu_record.Recorder, cases: Cases):
    for i in range(gpu_record.MOST + 3): recorded(cases, given=np.full(N, i, np.int32))
    assert len(cases.names()) == gpu_record.MOST


def test_tensor_maps_are_kept_as_what_they_are_made_of(recorder: object, cases: Cases):
    emu = Emulator()
    buffer = emu.alloc(np.zeros((16, 32), np.float16))
    text = HEAD.replace("sm_80", "sm_90") + """.visible .entry mapped(.param .align 64 .b8 map[128])
{
ret;
}
"""
    emu.launch(text, 1, 32, [TensorMap.of_tiles(buffer, (8, 16), "32B")])
    case = cases.get(cases.names()[-1])
    spec = case.maps[0]
    assert (spec.dtype, spec.address, spec.dims, spec.strides, spec.box, spec.swizzle) == \
        ("f16", buffer.ptr, (32, 16), (64,), (16, 8), "32B")
    assert [each.address for each in case.memory] == [buffer.ptr]
    assert replay(EmulatedDriver(), case)[0] == [case.memory[0].after]


# **** replaying ****

def test_addresses_move_with_their_memory(recorder: object, cases: Cases):
    case = recorded(cases)
    a, b = case.memory
    words = struct.pack("<4Q", a.address, b.address + 8, 7, b.address + len(b.before)) + b"tail"
    at = relocate(words, case.memory, [1 << 40, 2 << 40])
    assert struct.unpack("<4Q", at[:32]) == (1 << 40, (2 << 40) + 8, 7, b.address + len(b.before))
    assert at[32:] == b"tail"


def test_memory_that_holds_addresses_is_reached(recorder: object, cases: Cases):
    emu = Emulator()
    far = emu.alloc(np.full(4, 99, np.uint32))
    emu.alloc(np.zeros(8, np.uint8))  # no pointer leads there
    table = emu.alloc(np.array([far.ptr] + [0] * N, np.uint64))
    assert not emu.launch(THROUGH, 1, N, [emu.alloc(np.zeros(N, np.uint32)), table]).findings
    case = cases.get(cases.names()[-1])
    assert len(case.memory) == 3
    device = EmulatedDriver()
    device.alloc(1 << 20)  # nothing lies where it lay
    found, addresses = replay(device, case)
    assert verdict(case, found, addresses).kind == "same"
    assert addresses != [each.address for each in case.memory]


def test_nothing_stays_on_the_device(recorder: object, cases: Cases):
    device = EmulatedDriver()
    replay(device, recorded(cases))
    assert device.used_bytes == 0


def test_ptx_is_given_in_a_version_that_drivers_know():
    assert gpu_correct.readable(HEAD).startswith(".version 9.0\n")
    assert gpu_correct.readable(HEAD.replace("9.4", "8.7")).startswith(".version 8.7\n")


FUSED = kernel("mul.f32 %v, %v, %v;\nadd.f32 %v, %v, 0f3DCCCCCD;\nred.global.add.f32 [%o], %v;")


def test_no_mul_and_add_are_fused(recorder: object, cases: Cases):
    """ptxas makes an fma of them, which rounds once, where no rounding is named."""
    def counts(text: str) -> list[int]:
        found = sass(assemble(text.replace("9.4", "8.0"), "sm_90a"))
        assert found is not None
        return [found[name] for name in ("FFMA", "FMUL", "FADD")]
    assert counts(FUSED) == [1, 0, 0]
    text = gpu_correct.readable(FUSED)
    assert "mul.rn.f32 %v, %v, %v;\nadd.rn.f32 %v, %v, 0f3DCCCCCD;\nred.global.add.f32 [%o], %v;" in text
    assert counts(text) == [0, 1, 1]
    case = recorded(cases, FUSED, np.linspace(0, 1, N, dtype=np.float32))
    assert verdict(case, *replay(EmulatedDriver(), case)).kind == "same"


IGNORED = kernel("setmaxnreg.inc.sync.aligned.u32 64;").replace("sm_80", "sm_90a")


def test_a_kernel_that_ptxas_does_not_follow_is_left_out(recorder: object, cases: Cases, tmp_path: Path):
    recorded(cases)
    good = cases.get(cases.names()[0])
    cases.add(replace(good, name="test_here::test_it#ignored", ptx=IGNORED))
    options = Namespace(cases=tmp_path / "cases.sqlite", emulate=False, seed=0, only="")
    with cuda_fake.installed(ptxas=True):
        row = gpu_correct.open_worker(options)("test_here::test_it", 10.0)
    assert (row["status"], row["same"], row["elsewhere"]) == ("measured", 1, 1)


@pytest.mark.parametrize(("target", "arch", "runs"), [("sm_80", "sm_90a", True), ("sm_90", "sm_80", False),
                                                      ("sm_90a", "sm_90a", True),
                                                      ("sm_90a", "sm_100a", False)])
def test_which_ptx_a_device_runs(recorder: object, cases: Cases, target: str, arch: str, runs: bool):
    case = recorded(cases)
    assert gpu_correct.runnable(replace(case, ptx=case.ptx.replace("sm_80", target)), arch) is runs


# **** verdicts ****

def test_a_disagreement_says_where_and_what_and_how_to_run_it_again(recorder: object, cases: Cases):
    case = recorded(cases)
    said = verdict(case, *replay(Wrong(), case))
    assert said.kind == "disagrees"
    for words in ("either the kernel or the emulator is wrong", case.name, "kernel each", "buffer 1 of 2",
                  "1 of 64 elements differ", "is 5: 1234 on the device, 10 emulated"):
        assert words in said.text


def test_answers_that_depend_on_the_order_of_warps(recorder: object, cases: Cases):
    case = recorded(cases, TURNS, np.zeros(N, np.int32))
    other = np.arange(N, dtype=np.int32)[::-1].tobytes()
    found, addresses = [other, case.memory[1].after], [each.address for each in case.memory]
    assert verdict(case, found, addresses).kind == "order"


def test_what_ptx_leaves_open_may_differ_a_little(recorder: object, cases: Cases):
    case = recorded(cases, EXP, np.linspace(0, 1, N, dtype=np.float32))
    addresses = [each.address for each in case.memory]
    values = np.frombuffer(case.memory[0].after, np.float32)
    near = [np.nextafter(values, np.float32(9)).tobytes(), case.memory[1].after]
    assert verdict(case, near, addresses).kind == "open"
    far = (values + np.float32(0.1) * (np.arange(N) == 7)).astype(np.float32).tobytes()
    said = verdict(case, [far, case.memory[1].after], addresses)
    assert said.kind == "disagrees"
    assert " is 7: " in said.text


def test_judged_values_may_be_as_far_off_as_their_bound(recorder: object, cases: Cases):
    case = recorded(cases, kernel("mul.f32 %v, %v, %v;"), np.linspace(0, 1, N, dtype=np.float32))
    exact = np.linspace(0, 1, N) ** 2
    case = replace(case, judged=(Judged(0, exact, np.full(N, 2.0**-20)),))
    addresses = [each.address for each in case.memory]
    values = np.frombuffer(case.memory[0].after, np.float32)
    for off, kind in ((2.0**-21, "close"), (2.0**-18, "disagrees"), (np.nan, "disagrees")):
        found = [(values + np.float32(off)).astype(np.float32).tobytes(), case.memory[1].after]
        assert verdict(case, found, addresses).kind == kind, off
    assert "exactly" in verdict(case, found, addresses).text


def test_where_nan_is_wanted_a_number_is_wrong(recorder: object, cases: Cases):
    given = np.where(np.arange(N) == 3, np.nan, 1).astype(np.float32)
    case = recorded(cases, kernel("mul.f32 %v, %v, %v;"), given)
    exact = given.astype(np.float64)
    case = replace(case, judged=(Judged(0, exact, np.full(N, 2.0**-20)),))
    addresses = [each.address for each in case.memory]
    other_nan = np.where(np.isnan(given), np.array([0x7fc12345], np.uint32).view(np.float32), given)
    for values, kind in ((other_nan, "close"), (np.ones(N, np.float32), "disagrees")):
        found = [values.astype(np.float32).tobytes(), case.memory[1].after]
        assert verdict(case, found, addresses).kind == kind


def test_exact_sums_must_be_the_same_whatever_the_instruction(recorder: object, cases: Cases):
    case = recorded(cases, EXP, np.zeros(N, np.float32))
    case = replace(case, judged=(Judged(0, np.zeros(0), np.zeros(0)),))
    found = [np.full(N, 1 + 2.0**-23, np.float32).tobytes(), case.memory[1].after]
    assert verdict(case, found, [each.address for each in case.memory]).kind == "disagrees"


# **** the command ****

def command(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, RUN, "--emulate", "--part", "correctness", "--cases", str(path),
            "--out", str(path.parent / "out.json"), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_the_command_counts_launches_and_finds_the_one_that_disagrees(recorder: gpu_record.Recorder,
                                                                      cases: Cases, tmp_path: Path):
    good = recorded(cases)
    assert command(tmp_path / "cases.sqlite").returncode == 0
    after = (2 * np.arange(N, dtype=np.int32) + (np.arange(N) == 9)).astype(np.int32).tobytes()
    name = "test_here::test_it#wrong"
    cases.add(replace(good, name=name, memory=(replace(good.memory[0], after=after), good.memory[1])))
    done = command(tmp_path / "cases.sqlite")
    assert done.returncode == 1
    assert f"either the kernel or the emulator is wrong: {name}" in done.stdout
    assert f"again: python3 bench/gpu/run.py --part correctness --only '{name}'" in done.stdout
    row = json.loads((tmp_path / "out.json").read_text())["parts"]["correctness"]["test_here::test_it"]
    assert (row["launches"], row["same"], row["disagrees"]) == (2, 1, 1)
    alone = command(tmp_path / "cases.sqlite", "--only", name)
    assert alone.returncode == 1
    assert command(tmp_path / "cases.sqlite", "--only", good.name).returncode == 0


@pytest.mark.slow
def test_without_recorded_launches_the_part_says_how_to_make_them(tmp_path: Path):
    done = command(tmp_path / "none.sqlite")
    assert "bench/gpu/record.py makes them" in done.stdout
    assert done.returncode == 2


def test_a_gpu_in_the_emulators_place(recorder: object, cases: Cases, tmp_path: Path):
    """The same worker over cuda.bindings, of which there is a fake."""
    recorded(cases)
    recorded(cases, EXP, np.linspace(0, 1, N, dtype=np.float32))
    options = Namespace(cases=tmp_path / "cases.sqlite", emulate=False, seed=0, only="")
    with cuda_fake.installed():
        row = gpu_correct.open_worker(options)("test_here::test_it", 10.0)
    assert row["status"] == "measured", row
    assert (row["launches"], row["same"]) == (2, 2)


# **** products ****

OPTIONS = Namespace(arch="sm_90a", seed=0, emulate=True)


@pytest.mark.parametrize("name", ["1024³", "Llama 8B o M=1", "Llama 8B gate_up silu M=16"])
def test_products_are_right_on_the_emulated_device(name: str):
    shape = next(each for each in gpu_gemm.shapes() if each.name == name)
    row = gpu_gemm.run_emulated(shape, OPTIONS)
    assert row["status"] == "emulated", row
    assert row["predicted_s"] > 0


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch):
    shape = next(each for each in gpu_gemm.shapes() if each.name == "Llama 8B o M=1")
    build = gpu_gemm.TABLE.build
    monkeypatch.setattr(gpu_gemm, "TABLE", Namespace(build=lambda spec, *rest: build(
        replace(spec, epilogue=(gpu_gemm.Sum() * 1.05).cast(spec.out.dtype)), *rest)))
    row = gpu_gemm.run_emulated(shape, OPTIONS)
    assert row["status"] == "disagrees"
    assert "exactly" in row["why"]


class OnDevice:
    """What a launch needs of a tensor of torch's."""

    def __init__(self, address: int) -> None: self.address = address

    def data_ptr(self) -> int: return self.address


class TorchStream:
    """What a launch needs of a stream of torch's."""
    cuda_stream = 0


@pytest.mark.parametrize("name", ["Llama 8B o M=16", "Llama 8B gate_up silu M=1"])
def test_ours_runs_in_the_stream_of_torch(monkeypatch: pytest.MonkeyPatch, name: str):
    """On the fake of cuda.bindings: two sets of inputs, each with its own result."""
    shape = next(each for each in gpu_gemm.shapes() if each.name == name).scale_down()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", TorchStream)
    with cuda_fake.installed():
        gpu = CUDADriver()
        monkeypatch.setattr(gemm_contenders, "device", lambda: gpu)
        sets = shape.make_inputs("cpu")
        placed = [{name: OnDevice(gpu.alloc(t.nbytes)) for name, t in each.items()} for each in sets]
        for tensors, places in zip(sets, placed, strict=True):
            for key in ("a", "b"): gpu.copy_in(places[key].address, memoryview(gpu_compare.raw(tensors[key])))
        run = gemm_contenders.ours(shape, placed, OPTIONS)
        for i in range(len(sets)): run(i)
        gpu.synchronize()
        for tensors, places in zip(sets, placed, strict=True):
            out = bytearray(tensors["out"].nbytes)
            gpu.copy_out(memoryview(out), places["out"].address)
            tensors["out"] = torch.frombuffer(out, dtype=torch.bfloat16)
            assert shape.unlike(tensors) == ""
        assert not torch.equal(sets[0]["out"], sets[1]["out"])
        assert gemm_contenders.describe_schedule(shape)["predicted_s"] > 0
        del run
        gpu.close()


def test_recording_without_pytest_says_what_to_do():
    code = "import sys; sys.modules['pytest'] = None; from bench.gpu import record"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "pytest is not installed, and the tests need it: pip install -e '.[cpu,test]'\n"
