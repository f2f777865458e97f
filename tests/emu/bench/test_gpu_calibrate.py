"""bench/gpu/calibrate.py: its microbenchmarks measure what they claim, which the timing model shows: it plays
a GPU, and what is found are its figures. On the emulator they run without findings; runs go on where they
ended."""
from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import calibrate as gpu_calibrate
from bench.gpu import calibrate_players
from bench.gpu.calibrate_constants import CONSTANTS, MEASURES, calibrate
from bench.gpu.calibrate_players import GPUPlayer, ModelPlayer
from bench.gpu.calibrate_probe import PROBES, Loop, Probe, count_in_loop, fits, fold, program
from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

# another GPU than the one that calibration begins with: factors
OTHER = {"mma_macs": 0.75, "fp32_cycles": 2, "tensor_w": 1.2, "shared_latency": 1.3, "wait_latency": 1.6,
         "wgmma_latency": 1.5, "wgmma_ahead": 0.7, "l2_latency": 1.2, "hbm_latency": 1.15,
         "l2_bytes_per_cycle": 0.9, "hbm_bytes_per_s": 0.85, "tma_issue": 1.5, "tma_latency": 1.2,
         "begin_latency": 1.4, "launch_s": 1.3, "gap_s": 1.2, "pdl_gap_s": 1.4, "submit_s": 1.2}
QUICK = ("mma_macs", "fp32_cycles", "shared_latency", "wait_latency", "wgmma_latency", "wgmma_ahead",
         "l2_latency", "tma_issue", "tma_latency", "begin_latency", "gap_s", "pdl_gap_s", "submit_s")
SMALL = "LDS, stride"       # some measures


def other(base: GPUFigures) -> GPUFigures:
    return replace(base, **{name: type(old)(old * factor) for name, factor in OTHER.items()
                            if (old := getattr(base, name))})


def recovered(name: str, wanted: Iterable[str]) -> None:
    """Figures of another GPU, from what the model measures as that one."""
    base = replace(figures(name), coalesced=0.0)
    wanted = [one for one in wanted if getattr(base, one)]
    truth = other(base)
    rows = {each.measure: [MEASURES[each.measure].value(ModelPlayer(truth))] for each in CONSTANTS
            if each.name in wanted and MEASURES[each.measure].of(base.arch)}
    found, said = calibrate(rows, base)
    assert {one for one in wanted if said[one].measure} >= set(wanted) - {"pdl_gap_s"}
    for one in wanted:
        if not said[one].measure: continue
        right = getattr(truth, one)
        assert getattr(found, one) == pytest.approx(right, rel=0.04), one    # mma.sync takes whole cycles
        assert getattr(base, one) != pytest.approx(right, rel=0.04)


@pytest.mark.slow
def test_the_figures_of_an_sm_are_found():
    recovered("h200", QUICK)


@pytest.mark.slow
def test_microbenchmarks_measure_what_they_are_called():
    """On the model, by its own rules: rates and latencies of units, passes of bank conflicts, figures."""
    gpu = replace(figures("h200"), coalesced=0.0)   # what a round reads again counts as another SM's
    def value(name: str) -> float: return MEASURES[name].value(ModelPlayer(gpu))
    wanted = {
        "FFMA latency": 4, "FFMA of an SM": 1 / 4, "IMAD of an SM": 2 / 4, "MUFU.EX2 of an SM": 8 / 4,
        "LDS, stride 2": 2, "LDS, stride 32": 32, "STS, stride 8": 8, "LDS.128 bytes": 128,
        "ldmatrix.x4": 4, "stmatrix.x2": 2, "mma.sync m16n8k16 bf16 of an SM": 2048 / gpu.mma_macs / 4,
        "wgmma m64n8k16 bf16 SS": 19, "wgmma m64n64k16 bf16 RS": 33, "wgmma m64n256k16 bf16 SS": 129,
        "a further TMA load of a row": gpu.tma_issue, "TMA bytes of an SM, 4 boxes of 32768": 64,
        "L2 bytes of all SMs, near": gpu.l2_bytes_per_cycle * gpu.clock_hz,
        "empty kernel, stream": gpu.submit_s, "clock of idle SMs": gpu.clock_hz, "SMs": gpu.sms}
    for name, right in wanted.items(): assert value(name) == pytest.approx(right, rel=0.04), name
    for name, right in {"LDS latency": gpu.shared_latency, "load latency, 4 MiB": gpu.l2_latency}.items():
        assert right < value(name) < right + 30, name
    counts = [value(f"wgmma m64n8k16 bf16, {count} and a wait") for count in (1, 4, 8)]
    assert [b - a for a, b in itertools.pairwise(counts)] == pytest.approx([3 * 18, 4 * 18], rel=0.16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100", "a100", "l40s"])
def test_all_figures_are_found(name: str):
    recovered(name, OTHER)


def test_figures_that_nothing_tells_stay():
    base = figures("h200")
    found, said = calibrate({"clock of idle SMs": [1.9e9, 1.7e9, 1.8e9], "clock, L2": [1.8e9]}, base)
    assert found == replace(base, clock_hz=1.8e9)
    assert said["clock_hz"].spread == pytest.approx(0.2 / 1.8)
    assert said["memory_w"].why == "power does not limit the clock"
    assert said["hbm_latency"].why == "not measured"


# **** the microbenchmarks ****

@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_microbenchmarks_have_no_findings(arch: str):
    """Races, barriers, fences, bounds; of memory less than on a GPU."""
    player = GPUPlayer(EmulatedDriver(arch), sms=1)
    for probe in PROBES.values():
        if not fits(probe, arch) or probe.nbytes > 64 << 20: continue
        assert player.cycles(probe, 1) >= 0
        player.cycles(probe, 2)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PROBES)
def test_the_loop_has_what_is_measured(name: str):
    """ptxas takes loads of the same place out of a loop, and leaves out what has no effect."""
    probe = PROBES[name]
    opcode, count = probe.sass
    assert count > 0
    assert count_in_loop(probe, "sm_89" if "sm_90a" in probe.without else "sm_90a")[opcode] == count


def test_a_load_of_one_place_leaves_the_loop():
    def body(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
        whole = kb.reg("b32", 0)
        return Loop(lambda: fold(whole, kb.ld("global", "b32", memory.at(), 4, ".cg")), [whole])
    assert count_in_loop(Probe("one place", body), "sm_90a")["LDG"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_ptxas_takes_every_microbenchmark(arch: str):
    for probe in PROBES.values():
        if fits(probe, arch): assert assemble(program(probe, arch)[0], arch).kernels


def test_every_measure_has_a_constant_or_a_model_to_judge():
    assert {each.measure for each in CONSTANTS} <= MEASURES.keys()
    assert len({each.name for each in CONSTANTS}) == len(CONSTANTS)
    assert all(hasattr(figures("h200"), each.name) for each in CONSTANTS)
    assert len(MEASURES) > 100


# **** the command ****

@pytest.fixture
def command(tmp_path: Path):
    """The command on the emulated GPU, with its files here: exit code, and rows."""
    out = tmp_path / "found.json"

    def run(*words: str, emulate: bool = True) -> tuple[int, dict[str, Any]]:
        code = gpu_calibrate.main([*(["--emulate"] if emulate else []), "--out", str(out), *words])
        return code, json.loads(out.read_text())["measured"] if out.exists() else {}
    return run


def test_a_run_writes_measurements_and_figures(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, rows = command("--only", SMALL)
    assert code == 0
    assert list(rows) == [f"LDS, stride {count}" for count in (1, 2, 4, 8, 16, 32)]
    assert all(row["values"] and row["unit"] == "cycles" for row in rows.values())
    made = figures(str(tmp_path / "found.toml"))
    assert made == replace(figures("h200"), name="emulated sm_90a")
    shown = capsys.readouterr().out
    assert "not measured" in shown
    assert "model, old figures" in shown


def test_a_figure_says_where_it_is_from(command, tmp_path: Path):
    command("--brief", "--only", "SMs")
    lines = (tmp_path / "found.toml").read_text().splitlines()
    assert lines[0].startswith("# emulated sm_90a, measured by bench/gpu/calibrate.py")
    line, = (line for line in lines if line.startswith("sms = "))
    assert line == "sms = 2                         # measured: SMs, spread 0.0%; was 132"
    assert figures(str(tmp_path / "found.toml")).sms == 2
    assert any(line.startswith("hbm_latency = 685") and "[hopper 7.4]" in line for line in lines)


def test_a_run_goes_on_where_one_ended(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_calibrate, "sources", lambda: "some")
    _, first = command("--brief", "--only", "stride 1", "--minutes", "0")
    assert {row.get("why") for row in first.values()} == {"out of time"}
    _, second = command("--brief", "--only", "LDS, stride 1")
    calls: list[str] = []
    cycles = GPUPlayer.cycles
    monkeypatch.setattr(GPUPlayer, "cycles", lambda self, probe, rounds: (
        calls.append(probe.name), cycles(self, probe, rounds))[1])
    _, third = command("--brief", "--only", SMALL)
    assert "LDS, stride 1" not in calls
    assert third["LDS, stride 1"] == second["LDS, stride 1"]
    assert "LDS, stride 32" in calls
    monkeypatch.setattr(gpu_calibrate, "sources", lambda: "others")
    calls.clear()
    command("--brief", "--only", SMALL)
    assert "LDS, stride 1" in calls


def test_what_fails_is_said_and_the_rest_goes_on(command, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]):
    cycles = GPUPlayer.cycles

    def failing(self: GPUPlayer, probe: Any, rounds: int) -> float:
        if probe.name == "LDS, stride 4": raise NVError("it is broken", "a whole one")
        return cycles(self, probe, rounds)
    monkeypatch.setattr(GPUPlayer, "cycles", failing)
    code, rows = command("--brief", "--only", SMALL)
    assert code == 1
    assert "values" not in rows["LDS, stride 4"]
    assert rows["LDS, stride 32"]["values"]
    assert "not measured: LDS, stride 4: NVError: it is broken" in capsys.readouterr().err


def test_measurements_give_figures_elsewhere(command, tmp_path: Path):
    command("--brief", "--only", "LDS")
    (tmp_path / "found.toml").unlink()
    out = tmp_path / "elsewhere.toml"
    code, _ = command("--brief", "--from", str(tmp_path / "found.json"), "--toml", str(out), emulate=False)
    assert code == 0
    assert figures(str(out)).shared_latency != figures("h200").shared_latency


def test_the_model_can_be_measured(command, tmp_path: Path):
    code, _ = command("--against", "h100", "--brief", "--only", "LDS latency", emulate=False)
    assert code == 0
    assert figures(str(tmp_path / "found.toml")).name == "H100 SXM, played by the timing model"


def test_what_is_wrong_is_said(command, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_calibrate.cuda, "missing", lambda: "no NVIDIA GPU")
    assert command(emulate=False)[0] == 2
    assert capsys.readouterr().err.startswith("nothing to measure on: no NVIDIA GPU. --emulate")
    for words, said in ((("--base", "h900"), "no figures of a GPU 'h900'"),
                        (("--against", "a100"), "h200 has figures of sm_90a, A100 SXM, played by the timing"),
                        (("--from", str(tmp_path / "none")), "no file ")):
        assert command(*words, emulate=False)[0] == 2
        assert said in capsys.readouterr().err


def test_the_driver_of_a_gpu_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """Of cuda-bindings, on a fake of it."""
    monkeypatch.setattr(calibrate_players, "LOAD_S", 0.0)
    with installed():
        player = GPUPlayer(CUDADriver(), sms=2)
        assert player.repeats == 5
        for name in ("LDS latency", "TMA load of 128 bytes", "DSMEM load latency"):
            assert player.cycles(PROBES[name], 2) > 0
        assert all(player.row(3, how) > 0 for how in calibrate_players.ROWS)
        assert player.seconds(PROBES["store and fence"], 2) > 0
        assert player.hertz(PROBES["wgmma m64n8k16 bf16 SS"], 2) > 0
