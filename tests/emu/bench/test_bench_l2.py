"""bench/gpu/l2.py: its kernel reads every byte once, its contenders carry the windows they name, and without
a GPU it says so."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import l2
from bench.lib import measure
from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import driver as cuda
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Launch, Window
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

CTAS, KIB = 3, 1 << 10


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("pieces", [0, 1, 255, 3 * 768, 4 * 768, 4 * 768 + 1, 11 * 768 - 5])
def test_the_kernel_reads_every_byte_once(arch: str, pieces: int):
    emu = Emulator(arch=arch, check=True, seed=0)
    words = np.random.default_rng(pieces).integers(0, 1 << 32, 4 * max(pieces, 1), np.uint32)
    source, out = emu.alloc(words), emu.alloc(np.zeros(CTAS * l2.THREADS, np.uint32))
    report = emu.launch(l2.reader(arch), (CTAS, 1, 1), (l2.THREADS, 1, 1), [out, source, np.uint32(pieces)],
                        entry="l2_read")
    assert not report.findings
    found = np.bitwise_xor.reduce(out.numpy())
    assert found == np.bitwise_xor.reduce(words[:4 * pieces], initial=np.uint32(0))


def test_contenders_carry_their_windows(monkeypatch: pytest.MonkeyPatch):
    gpu = EmulatedDriver()
    limit = gpu.properties.persisting_l2_limit
    launches: list[tuple[Window | None, int]] = []
    submit = gpu.submit
    monkeypatch.setattr(gpu, "submit", lambda work, *args: (
        launches.append((work.window, gpu.set_aside_bytes)) if isinstance(work, Launch) else None,
        submit(work, *args)))
    bench = l2.L2Bench(gpu, 64 * KIB, 16 * KIB, CTAS)
    found = l2.measure(bench, 32 * KIB, rounds=2, repeats=1)
    blocks = 2 * (1 + l2.WARM)      # launches of a block: Y and X
    assert launches[:blocks] == [(None, 0)] * blocks
    whole = Window(bench.x, 32 * KIB, 1.0), 32 * KIB
    assert launches[blocks:3 * blocks] == [whole] * (2 * blocks)
    assert gpu.set_aside_bytes == 0
    assert bench.window("policy", 100 << 20) == Window(bench.x, 100 << 20, limit / (100 << 20))
    assert bench.window("ratio 1", 100 << 20) == Window(bench.x, 100 << 20, 1.0)
    assert bench.window("policy", 1 << 30).nbytes == gpu.properties.window_limit
    assert [len(found["seconds"][name]) for name in l2.CONTENDERS] == [2, 2, 2]
    assert found["policy"].startswith("a step reads 0.04688 MiB, and L2 (50 MiB) keeps")
    assert len(l2.row(32 * KIB, found)) == len(l2.HEADER)
    bench.close()
    assert gpu.used_bytes == 0


def test_a_wrong_answer_ends_the_bench():
    bench = l2.L2Bench(EmulatedDriver(), 64 * KIB, 0, CTAS)
    bench.words[5] ^= 1
    with pytest.raises(SystemExit, match="32768 bytes, none: a wrong answer"):
        bench.block("none", 32 * KIB, 1)


def test_the_crossover():
    def gained(*ratios: float) -> dict[int, object]:
        return {nbytes: {"ratios": {"policy": [ratio]}} for nbytes, ratio in enumerate(ratios)}
    assert l2.crossover(gained(1.0, 1.2, 1.9, 1.1, 1.04)) == (1, 3)
    assert l2.crossover(gained(1.0, 0.9)) is None


def test_the_prediction_is_called_one(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert l2.main(["--model", "--arch", "sm_80", "--plot", str(tmp_path / "l2.png")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PREDICTED, not measured: A100 SXM 80GB, 80 MiB of other memory between reads\n")
    assert (tmp_path / "l2.png").stat().st_size > 5000
    gains = [float(line.split()[-1]) for line in out.splitlines()[2:]]
    assert gains[0] == max(gains) > 2
    assert gains == sorted(gains, reverse=True), "the longer X is, the less of it stays"
    # nothing between: L2 holds X by itself up to its size
    assert l2.main(["--model", "--arch", "sm_80", "--between", "0"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert {float(row[-1]) for row in rows if float(row[0]) <= 40} == {1.0}
    assert all(float(row[-1]) > 1 for row in rows if float(row[0]) > 40)


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_api, "missing", lambda ordinal: "no NVIDIA GPU")
    assert l2.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ("nothing was measured, a GPU is needed: no NVIDIA GPU. --model shows what the "
                            "policy predicts\n")


def test_all_of_a_gpu_run_but_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "bench" / "results")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    monkeypatch.setattr(l2, "CTAS_OF_SM", 1)
    monkeypatch.setattr(l2, "WARM_S", 0.0)
    monkeypatch.setattr(l2, "sizes", lambda limits, points: [4 * KIB, 16 * KIB][:points])
    with installed():
        assert l2.main(["--between", "0", "--points", "2", "--rounds", "1", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split()[:2] == ["X", "MiB"]
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "bench" / "results").glob("*.json"))
    assert record["gpu"] == "emulated sm_90a"
    assert record["between_bytes"] == 0
    assert set(record["results"]) == {"4096", "16384"}
    assert set(record["results"]["4096"]["seconds"]) == set(l2.CONTENDERS)
    assert list((tmp_path / "bench" / "results").glob("*.png"))


def test_a_gpu_that_sets_nothing_aside(capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch):
    with installed():
        made = replace(CUDADriver().properties, persisting_l2_limit=0)
        monkeypatch.setattr(cuda, "_properties", lambda gpu: made)
        assert l2.main([]) == 2
    assert capsys.readouterr().err == "nothing was measured: emulated sm_90a sets no L2 aside\n"
