"""bench/gpu/run.py: rows in worker processes, what is kept, resumed and left out, contenders that are
wrong."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import parts as gpu_parts
from bench.gpu import run as gpu
from bench.lib import measure

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "bench" / "gpu" / "run.py")

# a part whose rows do what their names say
TOY = """
import os, sys, threading
sys.path.insert(0, {root!r})
from bench.gpu import parts, run
from bench.gpu.parts import NotMeasured, Part

def opened(options):
    def measure(name, budget_s):
        with open({log!r}, "a") as log: print(name, file=log)
        word = name.split()[0]
        if word == "hang" or (word == "block" and "FREE" not in os.environ): threading.Event().wait()
        if word == "die": os._exit(3)
        if word == "fail": raise ValueError("no such thing")
        if word == "apart": raise NotMeasured("it does not apply")
        print("what a library prints")
        if word == "wrong": return {{"status": "disagrees", "why": "1 is not 2"}}
        return {{"status": "emulated", "value": 1}}
    return measure

parts.PARTS.clear()
parts.register(Part("toy", "a toy", lambda options: {rows!r}, opened,
                        lambda rows: "TABLE " + str(len(rows)), expected_s={expected}, limit_s={limit}))
parts.register(Part("later", "what comes later", absent="no template yet"))
sys.exit(run.main())
"""


class Toy:
    """The command with the toy part."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.log = folder, folder / "out.json", folder / "log"

    def script(self, *rows: str, limit: float = 60, expected: float = 0.01) -> list[str]:
        path = self.folder / "toy.py"
        path.write_text(TOY.format(root=str(ROOT), log=str(self.log), rows=list(rows), limit=limit,
                                   expected=expected))
        return [sys.executable, str(path), "--emulate", "--out", str(self.out)]

    def run(self, *rows: str, options: tuple[str, ...] = (), limit: float = 60, expected: float = 0.01,
            **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.script(*rows, limit=limit, expected=expected), *options],
                              capture_output=True, text=True, check=False, timeout=120,
                              env={**os.environ, **environment})

    def rows(self) -> dict[str, Any]: return json.loads(self.out.read_text())["parts"]["toy"]

    def statuses(self) -> dict[str, str]: return {name: row["status"] for name, row in self.rows().items()}

    def done(self) -> list[str]: return self.log.read_text().splitlines()


@pytest.fixture
def toy(tmp_path: Path) -> Toy: return Toy(tmp_path)


def test_every_end_of_a_row_is_reported_and_the_rest_goes_on(toy: Toy):
    done = toy.run("good 1", "hang", "good 2", "die", "fail", "apart", "wrong", "good 3", limit=0.4)
    assert done.returncode == 1, done.stderr
    assert toy.statuses() == {"good 1": "emulated", "hang": "hung", "good 2": "emulated", "die": "died",
                              "fail": "failed", "apart": "not measured", "wrong": "disagrees",
                              "good 3": "emulated"}
    rows = toy.rows()
    assert rows["die"]["why"] == "its process ended with exit code 3"
    assert rows["fail"]["why"] == "ValueError: no such thing"
    assert rows["apart"]["why"] == "it does not apply"
    assert "2 s" in rows["hang"]["why"]
    assert rows["good 1"]["value"] == 1
    assert "TABLE 8" in done.stdout
    assert "later: not measured: no template yet" in done.stdout
    assert "what a library prints" not in done.stdout


@pytest.mark.slow
def test_good_rows_alone_exit_with_0_and_say_where_they_are_from(toy: Toy):
    assert toy.run("good 1").returncode == 0
    record = json.loads(toy.out.read_text())
    assert record["gpu"] == "emulated sm_90a"
    assert {"driver", "torch", "triton", "tinygrad", "machine", "seed", "dirty"} <= set(record)
    row = record["parts"]["toy"]["good 1"]
    assert row["commit"] == record["commit"]
    assert row["took_s"] >= 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_where_it_was(toy: Toy):
    process = subprocess.Popen(toy.script("good 1", "good 2", "block", "good 3"))
    until(lambda: toy.log.exists() and "block" in toy.log.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert toy.statuses() == {"good 1": "emulated", "good 2": "emulated"}
    done = toy.run("good 1", "good 2", "block", "good 3", options=("--resume",), FREE="1")
    assert done.returncode == 0, done.stderr
    assert toy.done() == ["good 1", "good 2", "block", "block", "good 3"]
    assert list(toy.statuses()) == ["good 1", "good 2", "block", "good 3"]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(toy: Toy):
    process = subprocess.Popen(toy.script("block"))
    until(lambda: toy.log.exists() and "block" in toy.log.read_text())
    worker, = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not alive(worker))


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try: return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError: return False


def children(pid: int) -> list[int]:
    """Of a process."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(holds: Callable[[], bool]) -> None:
    """Looks again and again, for a minute."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_rows_of_other_sources_are_measured_again(toy: Toy):
    """Also where there is no git, and of a file that knew of no digest."""
    nowhere = str(toy.folder / "empty")
    toy.run("good 1", "good 2", "good 3", PATH=nowhere)
    record = json.loads(toy.out.read_text())
    assert record["commit"] == ""
    assert record["parts"]["toy"]["good 1"]["sources"] == record["sources"] != ""
    record["parts"]["toy"]["good 2"]["sources"] = "of yore"
    del record["parts"]["toy"]["good 3"]["sources"]
    toy.out.write_text(json.dumps(record))
    toy.run("good 1", "good 2", "good 3", options=("--resume",), PATH=nowhere)
    assert toy.done() == ["good 1", "good 2", "good 3", "good 2", "good 3"]


@pytest.mark.parametrize("name", ["tinygrad_nv/tile/choose.py", "tinygrad_nv/ptx/emulator/csrc/core.h",
                                  "models/llama.py", "bench/report.py", "bench/gpu/run.py"])
def test_the_digest_is_of_package_models_and_benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     name: str):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("one")
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "bench" / "results")
    before = measure.sources()
    path.with_suffix(".json").write_text("no source")
    assert measure.sources() == before
    path.write_text("two")
    assert measure.sources() != before


def test_the_digest_is_of_files_there_are():
    root = Path(measure.__file__).parents[2]
    assert all((root / folder).is_dir() for folder in ("tinygrad_nv", "models", "bench"))
    assert measure.sources() == measure.sources()


@pytest.mark.slow
def test_rows_that_do_not_fit_are_left_out(toy: Toy):
    done = toy.run("good 1", "good 2", expected=40.0, options=("--minutes", "1"))
    assert done.returncode == 0
    assert toy.statuses() == {"good 1": "not measured", "good 2": "not measured"}
    assert {row["why"] for row in toy.rows().values()} == {"out of time"}
    assert not toy.log.exists()


@pytest.mark.slow
def test_the_minutes_are_kept_whatever_a_row_does(toy: Toy):
    begun = time.monotonic()
    done = toy.run("block", "good 1", options=("--minutes", "0.05"))
    assert done.returncode == 0
    assert toy.statuses() == {"block": "not measured", "good 1": "not measured"}
    assert time.monotonic() - begun < 30


@pytest.mark.slow
def test_what_was_measured_is_not_replaced_by_what_was_not(toy: Toy):
    toy.run("good 1")
    toy.run("good 1", options=("--minutes", "0"))
    assert toy.statuses() == {"good 1": "emulated"}


@pytest.mark.parametrize("call", gpu.CALLS)
def test_a_call_ends_within_ten_minutes_and_resumes(call: str):
    options = gpu.parse_args(["--call", call])
    parts = gpu.choose_parts(options)
    assert list(parts.values()) == sorted(parts.values())
    assert max(parts.values()) <= 9.5
    assert (options.resume, options.seconds) == (True, gpu.CALL_SECONDS)
    assert set(parts) <= set(gpu_parts.PARTS)
    assert max(gpu.choose_parts(gpu.parse_args(["--call", call, "--minutes", "2"])).values()) == 2
    assert gpu.parse_args(["--call", call, "--seconds", "3"]).seconds == 3


def test_the_calls_have_every_part_once():
    assert sorted(name for parts in gpu.CALLS.values() for name in parts) == sorted(gpu_parts.PARTS)
    assert next(iter(gpu.CALLS["first"])) == "smoke"
    options = gpu.parse_args([])
    assert (options.resume, options.seconds) == (False, gpu.SECONDS)
    assert set(gpu.choose_parts(options)) == set(gpu_parts.PARTS)


BLOCK = """
import pathlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}: raise ModuleNotFoundError("no " + name, name=name)
sys.meta_path.insert(0, Blocked())
pathlib.Path({said!r}).write_text("blocked")
"""
NOT_NEEDED = ("starlette", "uvicorn", "llguidance", "httpx", "nvtx", "prometheus_client", "rich", "jinja2",
              "tokenizers", "safetensors", "transformers", "pytest", "matplotlib")


@pytest.mark.slow
def test_what_it_does_without(tmp_path: Path):
    """The command and its worker, as on a machine that has torch and little else: every part is imported, one
    runs."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=NOT_NEEDED, said=str(tmp_path / "said")))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("--emulate", "--part", "smoke", "--only", "tensor maps", "--out", str(tmp_path / "out.json"))
    done = subprocess.run([sys.executable, RUN, *words], capture_output=True, text=True,
                          check=False, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "emulated: as it must be" in done.stdout
    assert (tmp_path / "said").exists()


@pytest.mark.slow
def test_rows_by_name(toy: Toy):
    toy.run("good 1", "good 2", options=("--only", "2"))
    assert list(toy.statuses()) == ["good 2"]


@pytest.mark.slow
def test_nothing_to_measure_is_said_and_nothing_is_written(toy: Toy):
    done = toy.run("good 1", options=("--only", "best"))
    assert (done.returncode, toy.out.exists()) == (2, False)
    assert done.stderr == "nothing was measured: no row has 'best' in its name; --list shows the parts\n"
    absent = toy.run("good 1", options=("--part", "later"))
    assert (absent.returncode, toy.out.exists()) == (2, False)
    assert "later: not measured: no template yet" in absent.stdout
    assert absent.stderr == "nothing was measured; --list shows the parts\n"


def test_facts_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    options = Namespace(emulate=True, arch="sm_90a", commit="given", seed=0)
    assert gpu.facts(options)["commit"] not in ("", "given")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.facts(options)["commit"] == "given"
    assert measure.git("status") == ""
