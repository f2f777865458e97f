"""bench/gpu.py: rows in worker processes, what is kept, resumed and left out, contenders that are wrong."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
import gpu
import gpu_compare
import gpu_parts
import measure
import torch
from gpu_parts import Bursts, Column, NotMeasured, Timings

BENCH = Path(__file__).parents[3] / "bench"

# a part whose rows do what their names say
TOY = """
import os, sys, threading
sys.path.insert(0, {bench!r})
import gpu, gpu_parts
from gpu_parts import NotMeasured, Part

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

gpu_parts.PARTS.clear()
gpu_parts.register(Part("toy", "a toy", lambda options: {rows!r}, opened,
                        lambda rows: "TABLE " + str(len(rows)), expected_s={expected}, limit_s={limit}))
gpu_parts.register(Part("later", "what comes later", absent="no template yet"))
sys.exit(gpu.main())
"""


class Toy:
    """The command with the toy part."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.log = folder, folder / "out.json", folder / "log"

    def script(self, *rows: str, limit: float = 60, expected: float = 0.01) -> list[str]:
        path = self.folder / "toy.py"
        path.write_text(TOY.format(bench=str(BENCH), log=str(self.log), rows=list(rows), limit=limit,
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


def test_good_rows_alone_exit_with_0_and_say_where_they_are_from(toy: Toy):
    assert toy.run("good 1").returncode == 0
    record = json.loads(toy.out.read_text())
    assert record["gpu"] == "emulated sm_90a"
    assert {"driver", "torch", "triton", "tinygrad", "machine", "seed", "dirty"} <= set(record)
    row = record["parts"]["toy"]["good 1"]
    assert row["commit"] == record["commit"]
    assert row["took_s"] >= 0


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


@pytest.mark.parametrize("name", ["tinygrad_nv/tile/gemm/choose.py", "tinygrad_nv/ptx/emulator/csrc/core.h",
                                  "models/llama.py", "bench/gpu.py"])
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
    root = Path(measure.__file__).parents[1]
    assert all((root / folder).is_dir() for folder in ("tinygrad_nv", "models", "bench"))
    assert measure.sources() == measure.sources()


def test_rows_that_do_not_fit_are_left_out(toy: Toy):
    done = toy.run("good 1", "good 2", expected=40.0, options=("--minutes", "1"))
    assert done.returncode == 0
    assert toy.statuses() == {"good 1": "not measured", "good 2": "not measured"}
    assert {row["why"] for row in toy.rows().values()} == {"out of time"}
    assert not toy.log.exists()


def test_the_minutes_are_kept_whatever_a_row_does(toy: Toy):
    begun = time.monotonic()
    done = toy.run("block", "good 1", options=("--minutes", "0.05"))
    assert done.returncode == 0
    assert toy.statuses() == {"block": "not measured", "good 1": "not measured"}
    assert time.monotonic() - begun < 30


def test_what_was_measured_is_not_replaced_by_what_was_not(toy: Toy):
    toy.run("good 1")
    toy.run("good 1", options=("--minutes", "0"))
    assert toy.statuses() == {"good 1": "emulated"}


@pytest.mark.parametrize("call", gpu.CALLS)
def test_a_call_ends_within_ten_minutes_and_resumes(call: str):
    options = gpu.parsed(["--call", call])
    parts = gpu.chosen(options)
    assert list(parts.values()) == sorted(parts.values())
    assert max(parts.values()) <= 9.5
    assert (options.resume, options.seconds) == (True, gpu.CALL_SECONDS)
    assert set(parts) <= set(gpu_parts.PARTS)
    assert max(gpu.chosen(gpu.parsed(["--call", call, "--minutes", "2"])).values()) == 2
    assert gpu.parsed(["--call", call, "--seconds", "3"]).seconds == 3


def test_the_calls_have_every_part_once():
    assert sorted(name for parts in gpu.CALLS.values() for name in parts) == sorted(gpu_parts.PARTS)
    assert next(iter(gpu.CALLS["first"])) == "smoke"
    options = gpu.parsed([])
    assert (options.resume, options.seconds) == (False, gpu.SECONDS)
    assert set(gpu.chosen(options)) == set(gpu_parts.PARTS)


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


def test_what_it_does_without(tmp_path: Path):
    """The command and its worker, as on a machine that has torch and little else: every part is imported, one
    runs."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.format(names=NOT_NEEDED, said=str(tmp_path / "said")))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("--emulate", "--part", "smoke", "--only", "tensor maps", "--out", str(tmp_path / "out.json"))
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py"), *words], capture_output=True, text=True,
                          check=False, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert "emulated: as it must be" in done.stdout
    assert (tmp_path / "said").exists()


def test_rows_by_name(toy: Toy):
    toy.run("good 1", "good 2", options=("--only", "2"))
    assert list(toy.statuses()) == ["good 2"]


def test_nothing_to_measure_is_said_and_nothing_is_written(toy: Toy):
    done = toy.run("good 1", options=("--only", "best"))
    assert (done.returncode, toy.out.exists()) == (2, False)
    assert done.stderr == "nothing was measured: no row has 'best' in its name; --list shows the parts\n"
    absent = toy.run("good 1", options=("--part", "later"))
    assert (absent.returncode, toy.out.exists()) == (2, False)
    assert "later: not measured: no template yet" in absent.stdout
    assert absent.stderr == "nothing was measured; --list shows the parts\n"


# **** contenders ****

class Work:
    """A workload whose right result is 3, in each of two sets."""
    name, work, nbytes, results = "three", 6.0, 30.0, ("out",)

    def given(self, device: str) -> list[dict[str, torch.Tensor]]:
        return [{"out": torch.zeros(1)} for _ in range(2)]

    def unlike(self, one: dict[str, torch.Tensor]) -> str:
        return "" if one["out"].item() == 3 else f"{one['out'].item():g}, exactly 3"


def answers(value: int, later: int = 3, sound: int = 10**9) -> Callable[..., Callable[[int], None]]:
    """Writes `value`; `later` after `sound` runs."""
    def made(workload: Work, given: list[dict[str, torch.Tensor]], options: Namespace) -> gpu_compare.Run:
        runs = iter(range(10**9))
        return lambda i: given[i].update(out=torch.tensor([float(value if next(runs) < sound else later)]))
    return made


def absent(*arguments: Any) -> Any: raise NotMeasured("it has no such thing")


def broken(workload: Any, given: Any, options: Any) -> Any: raise RuntimeError("a library fails\nat length")


@pytest.fixture
def contenders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: dict[str, Any] = {"ours": answers(3), "torch": answers(3), "Triton": absent, "other": broken}
    monkeypatch.setitem(gpu_parts.CONTENDERS, "toy", made)
    return made


def test_contenders_that_do_not_apply_or_fail_are_named(contenders: dict[str, Any]):
    runs, notes, wrong = gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())
    assert list(runs) == ["ours", "torch"]
    assert notes == {"Triton": "it has no such thing", "other": "RuntimeError: a library fails"}
    assert wrong == []


def test_a_contender_that_is_wrong_is_not_timed(contenders: dict[str, Any]):
    contenders["torch"] = answers(4)
    runs, notes, wrong = gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())
    assert list(runs) == ["ours"]
    assert wrong == ["torch: set 0: 4, exactly 3"]
    assert notes["torch"] == "wrong: set 0: 4, exactly 3"


def test_every_set_is_compared_before_anything_is_timed(contenders: dict[str, Any]):
    contenders["torch"] = answers(3, later=4, sound=1)
    assert gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())[2] == [
        "torch: set 1: 4, exactly 3"]
    contenders["torch"] = lambda workload, given, options: lambda i: given[0]["out"].fill_(3)
    assert gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())[2] == [
        "torch: set 1: elements of out were not written"]


def test_ours_that_fails_fails_the_row(contenders: dict[str, Any]):
    contenders["ours"] = broken
    with pytest.raises(RuntimeError, match="a library fails"):
        gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())


def test_bursts_take_turns(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    def burst(name: str, seconds: float) -> Bursts:
        made = Bursts(lambda i: None, 1, 7)
        def one(meanwhile: Callable[[], Any] = lambda: None) -> float:
            order.append(name)
            meanwhile()
            return seconds
        made.seconds = one  # type: ignore[method-assign]
        return made

    row = gpu_parts.in_turns({"ours": burst("ours", 1.0), "torch": burst("torch", 2.0)}, 0.0)
    turns = order[-2 * gpu_parts.LEAST_BURSTS:]
    assert set(order[:-len(turns)]) == {"ours", "torch"}, "each is warmed"
    assert turns == ["ours", "torch", "torch", "ours"] * 2 + ["ours", "torch"], "each is first by turns"
    assert set(row["clocks"]) == {"ours", "torch"}
    assert set(row["clocks"]["ours"]) == {"sm_mhz", "watts", "temperature_c"}
    assert row["seconds"] == {"ours": [1.0] * 5, "torch": [2.0] * 5}
    assert row["count"] == {"ours": 7, "torch": 7}
    assert "sm_mhz" in row["telemetry"]


def test_the_table_says_what_is_missing(contenders: dict[str, Any]):
    rows = {"three": {"status": "measured", "work": 6e12, "nbytes": 3e9,
                      "seconds": {"ours": [1.0, 1.0, 2.0], "torch": [2.0, 3.0, 2.0]}},
            "four": {"status": "not measured", "why": "out of time"}}
    said = Timings(Column("TFLOP/s")).shown("toy", rows)
    first = said.splitlines()[1].split()
    assert first[:6] == ["three", "6.0", "3", "3.0", "-", "-"]
    assert first[6:] == ["2.000", "1.00", "…", "3.00"]
    assert "four: not measured: out of time" in said


# **** bursts ****

class Clock:
    """In place of torch.cuda: `now` is the time of its events, in ms, and goes on when work says so. Graphs
    take time and run nothing; there are none unless it `captures`."""
    now, capturing = 0.0, False

    def __init__(self, monkeypatch: pytest.MonkeyPatch, captures: bool = True) -> None:
        clock = self

        class Event:
            def __init__(self, enable_timing: bool) -> None: assert enable_timing
            def record(self) -> None: self.at = clock.now
            def synchronize(self) -> None: pass
            def elapsed_time(self, other: Any) -> float: return other.at - self.at

        class Graph:
            def replay(self) -> None: clock.now += self.took

        @contextmanager
        def graph(made: Graph, stream: object) -> Iterator[None]:
            if not captures: raise RuntimeError("no graphs here")
            begun, clock.capturing = clock.now, True
            try: yield
            finally: clock.capturing = False
            made.took = clock.now - begun
            clock.now = begun

        for name, value in {"Event": Event, "CUDAGraph": Graph, "graph": graph, "Stream": object,
                            "stream": lambda stream: nullcontext(), "synchronize": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_burst_is_a_graph_of_runs_on_all_sets(monkeypatch: pytest.MonkeyPatch):
    clock, runs = Clock(monkeypatch), list[int]()

    def run(i: int) -> None:
        clock.now += 2.0  # ms
        if clock.capturing: runs.append(i)

    burst = Bursts(run, 3).sized(0.02)
    assert burst.count == 10
    assert runs == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert burst.seconds() == pytest.approx(2e-3)
    assert burst.why_eager == ""


def test_what_cannot_be_captured_is_launched_and_said(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)

    def run(i: int) -> None:
        clock.now += 4.0
        if clock.capturing: raise RuntimeError("not while a stream is captured")

    burst = Bursts(run, 1).sized(0.02)
    assert (burst.count, burst.graph) == (5, None)
    assert burst.seconds() == pytest.approx(4e-3)
    assert burst.why_eager == "RuntimeError: not while a stream is captured"


def test_a_row_of_timings_from_beginning_to_end(contenders: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    Clock(monkeypatch, captures=False)
    monkeypatch.setitem(gpu_parts.ABOUT, "toy", lambda workload: {"schedule": "the best"})
    monkeypatch.setitem(gpu_parts.ALONE, "toy", {"tinygrad": absent, "plain": lambda *arguments: [0.5]})
    contenders["other"] = answers(4)
    row = gpu_parts.compared("toy", Work(), Namespace(seed=0, without_tinygrad=False), 0.0)
    assert (row["status"], row["why"]) == ("disagrees", "other: set 0: 4, exactly 3")
    assert row["schedule"] == "the best"
    assert row["notes"]["tinygrad"] == row["notes"]["Triton"] == "it has no such thing"
    assert set(row["seconds"]) == {"ours", "torch", "plain"}
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("later", [3, 4])
def test_what_goes_wrong_in_the_bursts_alone_is_found(contenders: dict[str, Any],
                                                      monkeypatch: pytest.MonkeyPatch, later: int):
    """Right in the runs that are compared first, and, with 4, wrong from the thousandth on."""
    Clock(monkeypatch, captures=False)
    contenders["torch"] = answers(3, later, 1000)
    row = gpu_parts.compared("toy", Work(), Namespace(seed=0, without_tinygrad=False), 0.0)
    if later == 3: assert (row["status"], set(row["seconds"])) == ("measured", {"ours", "torch"})
    else:
        assert (row["status"], row["why"]) == ("disagrees", "torch, after its bursts: set 0: 4, exactly 3")
        assert set(row["seconds"]) == {"ours"}
        assert row["notes"]["torch"] == "wrong after its bursts: set 0: 4, exactly 3"


def test_a_run_that_computes_nothing_is_not_compared(contenders: dict[str, Any]):
    contenders["torch"] = lambda *arguments: gpu_compare.Partly(lambda i: None, 0)
    contenders["Triton"] = lambda *arguments: gpu_compare.Partly(lambda i: None, 1)
    runs, _, wrong = gpu_parts.ready("toy", Work(), Work().given("cpu"), Namespace())
    assert list(runs) == ["ours", "torch"]
    assert wrong == ["Triton: set 0: elements of out were not written"]


@pytest.mark.parametrize("count", [1, 15, 16, 100, 8192])
def test_places_that_are_compared(count: int):
    """One of each 16 rows, at every place of a warp's 16."""
    places = gpu_compare.spaced(count, 16)
    assert {place // 16 for place in places} == set(range(-(-count // 16)))
    assert (places[0], places[-1]) == (0, count - 1)
    if count == 8192: assert {place % 16 for place in places} == set(range(16))
    assert gpu_compare.spaced(count, 1) == list(range(count))


def test_facts_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    options = Namespace(emulate=True, arch="sm_90a", commit="given", seed=0)
    assert gpu.facts(options)["commit"] not in ("", "given")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.facts(options)["commit"] == "given"
    assert measure.git("status") == ""


def test_matmuls_are_timed_with_the_grid_that_users_get(monkeypatch: pytest.MonkeyPatch):
    """As many clusters as the GPU says it has room for."""
    import gemm_contenders
    import gpu_gemm

    from tinygrad_nv.tile.template import GPU
    gpu = Namespace(properties=Namespace(arch="sm_90a", sm_count=132), clusters=((2, 60), (4, 28), (8, 13)))
    built = []

    def build(*given: Any) -> None:
        built.append(given)
        raise NotMeasured("built")
    monkeypatch.setattr(gemm_contenders, "device", lambda: gpu)
    monkeypatch.setattr(gemm_contenders, "TABLE", Namespace(build=build))
    with pytest.raises(NotMeasured, match="built"):
        gemm_contenders.ours(next(iter(gpu_gemm.shapes())), [], Namespace())
    assert built[0][2] == GPU("sm_90a", 132, gpu.clusters)
