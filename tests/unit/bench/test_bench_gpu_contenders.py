"""bench/gpu/parts.py: contenders that are wrong, fail or do not apply; bursts as graphs or in turns. And
FlashAttention-3 as a contender: how it is built, what its kernel is given, and what is said without it."""
from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import compare as gpu_compare
from bench.gpu import fa3
from bench.gpu import parts as gpu_parts
from bench.gpu.attention import Forward
from bench.gpu.parts import Column, NotMeasured, Timings
from bench.gpu.turns import LEAST_BURSTS, Bursts, in_turns
from tinygrad_nv.toolchain import find_compiler


class Work:
    """A workload whose right result is 3, in each of two sets."""
    name, work, nbytes, results = "three", 6.0, 30.0, ("out",)

    def make_inputs(self, device: str) -> list[dict[str, torch.Tensor]]:
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


def make_ready() -> Any:
    """Returns what the part's contenders come to on its workload."""
    return gpu_parts.ready(gpu_parts.CONTENDERS["toy"], Work(), Work().make_inputs("cpu"), Namespace())


def test_contenders_that_do_not_apply_or_fail_are_named(contenders: dict[str, Any]):
    runs, notes, wrong = make_ready()
    assert list(runs) == ["ours", "torch"]
    assert notes == {"Triton": "it has no such thing", "other": "RuntimeError: a library fails"}
    assert wrong == []


def test_a_contender_that_is_wrong_is_not_timed(contenders: dict[str, Any]):
    contenders["torch"] = answers(4)
    runs, notes, wrong = make_ready()
    assert list(runs) == ["ours"]
    assert wrong == ["torch: set 0: 4, exactly 3"]
    assert notes["torch"] == "wrong: set 0: 4, exactly 3"


def test_every_set_is_compared_before_anything_is_timed(contenders: dict[str, Any]):
    contenders["torch"] = answers(3, later=4, sound=1)
    assert make_ready()[2] == [
        "torch: set 1: 4, exactly 3"]
    contenders["torch"] = lambda workload, given, options: lambda i: given[0]["out"].fill_(3)
    assert make_ready()[2] == [
        "torch: set 1: elements of out were not written"]


def test_ours_that_fails_fails_the_row(contenders: dict[str, Any]):
    contenders["ours"] = broken
    with pytest.raises(RuntimeError, match="a library fails"):
        make_ready()


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

    row = in_turns({"ours": burst("ours", 1.0), "torch": burst("torch", 2.0)}, 0.0)
    turns = order[-2 * LEAST_BURSTS:]
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
    said = Timings(Column("TFLOP/s")).render("toy", rows)
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

    burst = Bursts(run, 3).set_size(0.02)
    assert burst.count == 10
    assert runs == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert burst.seconds() == pytest.approx(2e-3)
    assert burst.why_eager == ""


def test_what_cannot_be_captured_is_launched_and_said(monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)

    def run(i: int) -> None:
        clock.now += 4.0
        if clock.capturing: raise RuntimeError("not while a stream is captured")

    burst = Bursts(run, 1).set_size(0.02)
    assert (burst.count, burst.graph) == (5, None)
    assert burst.seconds() == pytest.approx(4e-3)
    assert burst.why_eager == "RuntimeError: not while a stream is captured"


def test_a_row_of_timings_from_beginning_to_end(contenders: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    Clock(monkeypatch, captures=False)
    monkeypatch.setitem(gpu_parts.ABOUT, "toy", lambda workload: {"schedule": "the best"})
    monkeypatch.setitem(gpu_parts.ALONE, "toy", {"tinygrad": absent, "plain": lambda *arguments: [0.5]})
    contenders["other"] = answers(4)
    row = gpu_parts.compare("toy", Work(), Namespace(seed=0, without_tinygrad=False), 0.0)
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
    row = gpu_parts.compare("toy", Work(), Namespace(seed=0, without_tinygrad=False), 0.0)
    if later == 3: assert (row["status"], set(row["seconds"])) == ("measured", {"ours", "torch"})
    else:
        assert (row["status"], row["why"]) == ("disagrees", "torch, after its bursts: set 0: 4, exactly 3")
        assert set(row["seconds"]) == {"ours"}
        assert row["notes"]["torch"] == "wrong after its bursts: set 0: 4, exactly 3"


def test_a_run_that_computes_nothing_is_not_compared(contenders: dict[str, Any]):
    contenders["torch"] = lambda *arguments: gpu_compare.Partly(lambda i: None, 0)
    contenders["Triton"] = lambda *arguments: gpu_compare.Partly(lambda i: None, 1)
    runs, _, wrong = make_ready()
    assert list(runs) == ["ours", "torch"]
    assert wrong == ["Triton: set 0: elements of out were not written"]


@pytest.mark.parametrize("count", [1, 15, 16, 100, 8192])
def test_places_that_are_compared(count: int):
    """One of each 16 rows, at every place of a warp's 16."""
    places = gpu_compare.spread_numbers(count, 16)
    assert {place // 16 for place in places} == set(range(-(-count // 16)))
    assert (places[0], places[-1]) == (0, count - 1)
    if count == 8192: assert {place % 16 for place in places} == set(range(16))
    assert gpu_compare.spread_numbers(count, 1) == list(range(count))


def test_matmuls_are_timed_with_the_grid_that_users_get(monkeypatch: pytest.MonkeyPatch):
    """As many clusters as the GPU says it has room for."""
    from bench.gpu import gemm as gpu_gemm
    from bench.gpu import gemm_contenders
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


# writes its arguments, in order, into `out`
ATTEND = """
int attend(void *out, void *q, void *k, void *v, void *lse, void *semaphore, int b, int h, int hk, int tokens,
           int causal, float scale, int sms, void *stream)
{
    typedef unsigned short u16;
    double all[] = {*(u16 *)q, *(u16 *)k, *(u16 *)v, b, h, hk, tokens, causal, scale, sms,
                    (unsigned long long)stream};
    for (int i = 0; i < 11; i++) ((double *)out)[i] = all[i];
    return lse && semaphore ? 0 : 1;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What the build looks for: of FlashAttention, and of CUTLASS in its place beside it."""
    hopper = tmp_path / "hopper"
    for name in ("flash.h", "flash_fwd_launch_template.h", "../csrc/cutlass/include/cutlass/cutlass.h"):
        path = (hopper / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return hopper


def nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An nvcc that notes how it was called."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/log\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return folder / "log"


TO_OUT = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


def test_a_library_is_built_once(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    log = nvcc(tmp_path, monkeypatch, TO_OUT)
    out = tmp_path / "cache"
    for _ in range(2): assert fa3.build(sources, None, 128, out) == out / "fa3_128.so"
    line, = log.read_text().splitlines()
    for words in ("-DHEAD_DIM=128", "arch=compute_90a,code=[sm_90a,compute_90a]", f"-I{sources}",
                  "csrc/cutlass/include", str(fa3.WRAPPER), "-DFLASHATTENTION_DISABLE_VARLEN"):
        assert words in line
    assert fa3.build(out, None, 128) == out / "fa3_128.so", "a folder of libraries"
    os.utime(sources / "flash.h", (2**33, 2**33))
    fa3.build(sources, None, 128, out)
    assert len(log.read_text().splitlines()) == 2, "sources that are newer"


def test_what_is_missing_is_said(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotMeasured, match=r"has neither fa3_64\.so nor FlashAttention-3's sources"):
        fa3.build(tmp_path, None, 64)
    nvcc(tmp_path, monkeypatch, 'echo "x.h(3): error: no such type" >&2; exit 1')
    with pytest.raises(NotMeasured, match=r"does not build FlashAttention-3: x\.h\(3\): error: no such type"):
        fa3.build(sources, None, 64, tmp_path / "cache")
    with pytest.raises(NotMeasured, match=r"no cutlass/cutlass\.h in"):
        fa3.build(sources, tmp_path / "elsewhere", 64, tmp_path / "cache")
    monkeypatch.setattr(fa3.shutil, "which", lambda *given, **named: None)
    with pytest.raises(NotMeasured, match="needs nvcc"): fa3.build(sources, None, 64, tmp_path / "cache")
    with pytest.raises(NotMeasured, match="flash_attn_interface is not installed"):
        fa3.contender(Forward(1, 1, 64, 64, True), [], Namespace(fa3=None))


def test_the_command(tmp_path: Path):
    done = subprocess.run([sys.executable, fa3.__file__, str(tmp_path)], capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has neither fa3_64.so nor" in done.stderr


def test_what_the_kernel_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = find_compiler()
    (tmp_path / "attend.c").write_text(ATTEND)
    subprocess.run([*compiler.command, "-shared", "-fPIC", "-O1", str(tmp_path / "attend.c"), "-o",
                    str(tmp_path / "fa3_64.so")], check=True, env=compiler.environment())
    empty, zeros = torch.empty, torch.zeros
    for name, value in {"get_device_capability": lambda: (9, 0),
                        "get_device_properties": lambda i: SimpleNamespace(multi_processor_count=132),
                        "current_stream": lambda: SimpleNamespace(cuda_stream=0x77)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *given, device=None, **named: empty(*given, **named))
    monkeypatch.setattr(torch, "zeros", lambda *given, device=None, **named: zeros(*given, **named))
    workload = Forward(2, 4, 16, 64, True, 2)
    given = [{name: torch.full((2, 4, 16, 64), i + j, dtype=torch.bfloat16) for i, name in
              enumerate(("q", "k", "v", "out"))} for j in range(2)]
    run = fa3.contender(workload, given, Namespace(fa3=tmp_path, cutlass=None))
    words = [int(given[1][name].view(-1).view(torch.int16)[0]) for name in "qkv"]
    run(1)
    found = given[1]["out"].view(-1).view(torch.float64)[:11].tolist()
    assert found == [*words, 2, 4, 2, 16, 1, pytest.approx(1 / math.sqrt(64)), 132, 0x77]
    assert (given[0]["out"] == 3).all()


@pytest.mark.parametrize("pair", [True, False], ids=["with lse", "alone"])
def test_the_package_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, pair: bool):
    made: Any = ModuleType("flash_attn_interface")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2).double() for each in (q, k, v)), is_causal=causal, enable_gqa=True)
        return (out.transpose(1, 2).bfloat16(), None) if pair else out.transpose(1, 2).bfloat16()

    made.flash_attn_func = attend
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made)
    monkeypatch.setattr(fa3, "find_spec", lambda name: object())
    workload = Forward(2, 4, 24, 64, True, 2)
    given = workload.make_inputs("cpu")
    run = fa3.contender(workload, given, Namespace(fa3=None))
    assert gpu_compare.wrong(workload, given, run) == ""
