"""Tuning on a CPU: which schedules there are, that all of them compute the same, and what becomes of the
winner."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context
from tinygrad.tensor import Tensor

from tests.support.tile.gemm_case import TORCH, arguments, product, reference, view
from tinygrad_nv import explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.attention.flash import CPUFlash
from tinygrad_nv.cpu.gemm import tune
from tinygrad_nv.cpu.gemm.schedules import Amx, CPUGemm, CPUGemv, default, starts
from tinygrad_nv.cpu.gemm.templates import choose
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX512, AVX512_BF16, ISA, PORTABLE
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.errors import ScheduleError, ToolchainError
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile import database
from tinygrad_nv.tile.database import Entry, ScheduleWarning
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.templates import TABLE

EMULATED = ISA("amx", bf16=True, vnni=True, emulated=True)
KINDS = (PORTABLE, AVX2, AVX512, AVX512_BF16, AMX)
SPEC = dense(4, 96, 256, "f32")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    monkeypatch.setattr(database, "_noted", set())
    monkeypatch.setattr(tune, "ENOUGH_SECONDS", 0.0)
    return tmp_path / "schedules.json"


@pytest.fixture
def here() -> CPU:
    """This machine with small caches, so that operands have few copies."""
    return replace(host(), threads=2, l3_bytes=1 << 16)


# **** schedules ****

@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spec", [
    dense(1, 4096, 4096, "f32"), dense(16, 512, 300, "bf16"), dense(512, 512, 512, "f32"),
    dense(100, 70, 90, "bf16", majors="NN", epilogue="gate"), dense(64, 64, 4096, "s8"),
    dense(300, 8, 64, "f16", batch=(2,))], ids=str)
def test_what_is_near_is_legal_and_different(kind: ISA, spec: GemmSpec):
    here = CPU(kind, 4)
    first = starts(spec, here)
    assert first[0] == default(spec, here)
    for start in first:
        assert not TABLE.problems(spec, start, here)
        near = tune.near(spec, here, start)
        assert len(near) >= 3
        assert start not in near
        assert len(set(near)) == len(near)
        assert not any(TABLE.problems(spec, one, here) for one in near)
        assert {one.template for one in near} == {start.template}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "spec"), [
    (isa.of_level(isa.best()), product(5, 70, 90, dtypes.float32)),
    (isa.of_level(isa.best()), product(50, 70, 90, dtypes.float32, majors="KM")),
    (isa.of_level(isa.best()), product(40, 33, 150, dtypes.int8)),
    (EMULATED, product(50, 41, 97))], ids=["gemv", "gemm", "bytes", "amx"])
def test_schedules_near_to_the_default_compute_the_same(kind: ISA, spec: GemmSpec):
    here = CPU(kind, 2)
    given = arguments(spec)
    want = reference(spec, given)
    start = starts(spec, here)[0]
    for one in (start, *tune.near(spec, here, start)[:5]):
        out = torch.zeros(given["out"].shape, dtype=TORCH[spec.out.dtype])
        run = load(TABLE.build(spec, one, here))
        run(*(x.view(torch.uint8).numpy() for x in (out, given["a"], given["b"])))
        got = view(out, (spec.m, spec.n), (spec.out.m, spec.out.n), 0).double()
        assert torch.equal(got, want), one


GEMM = dense(64, 64, 256, "f32")
REFUSED = [
    (SPEC, {"isa": PORTABLE}, "for portable, here is avx2"), (SPEC, {"parts": 0}, "0 parts, 1 to 4096"),
    (SPEC, {"parts": 5000}, "5000 parts"), (SPEC, {"rows": -1}, "rows -1"), (SPEC, {"rows": 0}, "rows 0"),
    (SPEC, {"block_n": 12}, "block_n 12, a multiple of 8"), (SPEC, {"rows": 128}, "256 sums in registers"),
    (SPEC, {"block_n": 1 << 18}, "bytes of sums on a stack"), (SPEC, {"block_m": 0}, "block_m 0"),
    (GEMM, {"columns": 12}, "columns 12, a multiple of 8"), (GEMM, {"rows": 0}, "rows 0, a multiple of 1"),
    (GEMM, {"rows": 6, "columns": 24, "block_m": 66, "block_n": 72}, "takes 22 registers, 16 there are"),
    (GEMM, {"rows": 4, "columns": 16, "block_m": 4096, "block_n": 4096}, "bytes on a stack, at most 1048576"),
    (GEMM, {"block_m": 1 << 21}, "block_m 2097152"),
    (dense(64, 64, 512, "s8"), {"block_k": 512}, "sums of 512 products of bytes in float32, at most 256")]


@pytest.mark.parametrize(("spec", "change", "why"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_a_schedule(spec: GemmSpec, change: dict, why: str):
    here = CPU(AVX2, 2)
    start = next(s for s in starts(spec, here) if spec is SPEC or s.template == "gemm")
    assert any(why in words for words in TABLE.problems(spec, replace(start, **change), here))


@pytest.mark.parametrize(("s", "why"), [
    (Amx(AVX2, 1, 64, 64, 64), "no tiles on avx2"), (CPUGemv(AVX2, 1, 8, 64), "64 rows, at most 16"),
    (CPUGemm(PORTABLE), "for portable, here is avx2")], ids=str)
def test_what_cannot_be_is_not_built(s: CPUSchedule, why: str):
    assert why in "; ".join(TABLE.problems(GEMM, s, CPU(AVX2, 2)))
    with pytest.raises(ScheduleError, match=why): TABLE.build(GEMM, s, CPU(AVX2, 2))


def test_a_template_of_other_specs():
    assert TABLE.problems(GEMM, CPUFlash(AVX2), CPU(AVX2, 2)) == ["flash is no template of a GemmSpec"]


@pytest.mark.parametrize("s", [CPUGemm(kind, 3, 1, 2, 4, 5, 6) for kind in KINDS], ids=str)
def test_a_schedule_survives_json(s: CPUGemm):
    assert TABLE.read("cpu", json.loads(json.dumps(s.to_json()))) == s


@pytest.mark.parametrize("change", [
    {"template": 3}, {"template": "gemx"}, {"parts": "2"}, {"rows": 1.0}, {"isa": {"level": "mmx"}},
    {"isa": None}, {"isa": {"level": "avx2", "bf16": 1}}, {"isa": {"name": 1}}, {"block_m": None},
    {"stream": 0}, {"template": "amx", "rows": 4}])
def test_plain_data_that_is_no_schedule(change: dict):
    with pytest.raises(ScheduleError): TABLE.read("cpu", {**CPUGemm(AVX2).to_json(), **change})


@pytest.mark.parametrize("data", [None, [], {}, {"template": "gemm"}])
def test_plain_data_that_is_nothing(data):
    with pytest.raises(ScheduleError): TABLE.read("cpu", data)


OLD = {"parts": 3, "block_m": 32, "block_n": 64, "block_k": 96, "rows": 0, "columns": 0}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("template", "said", "want"), [
    ("gemv", {"rows": 4, "columns": 16}, lambda isa: CPUGemv(isa, 3, 32, 64, 96, 4, 16)),
    ("gemm", {"rows": 4, "columns": 16}, lambda isa: CPUGemm(isa, 3, 32, 64, 96, 4, 16)),
    ("amx", {}, lambda isa: Amx(isa, 3, 32, 64, 96))], ids=["gemv", "gemm", "amx"])
def test_entries_of_before_are_read(here: CPU, kind: ISA, template: str, said: dict, want):
    """Those that were written when all templates had the same fields."""
    isa = {"level": kind.level, "bf16": kind.bf16, "vnni": kind.vnni, "emulated": False}
    data = {**stored(here).to_json(), "arch": f"cpu {kind}, 2 threads",
            "schedule": {"template": template, "isa": isa, **OLD, **said}}
    read = Entry.from_json(json.loads(json.dumps(data)))
    assert read.schedule == want(kind)
    assert Entry.from_json(json.loads(json.dumps(read.to_json()))) == read


@pytest.mark.parametrize(("template", "said", "why"), [
    ("amx", {"rows": 4}, "rows=4 is of another template than amx"),
    ("flash", {"template": "flash_mma"}, "template 'flash_mma'")])
def test_entries_of_before_that_are_none(here: CPU, template: str, said: dict, why: str):
    data = {**stored(here).to_json(), "schedule": {
        "template": template, "isa": {"level": here.isa.level}, **OLD, **said}}
    with pytest.raises(ScheduleError, match=why): Entry.from_json(data)


# **** tuning ****

def test_the_winner_is_kept_and_used(here: CPU, file: Path):
    seen: list[tuple[int, int]] = []
    tried = tune.tune(SPEC, here, 1, lambda done, count: seen.append((done, count)))
    assert seen == [(i + 1, tune.PER_BEAM) for i in range(len(tried))]
    assert len(tried) <= tune.PER_BEAM
    assert default(SPEC, here) in [one.schedule for one in tried]
    final = [one.seconds for one in tried[:tune.FINALISTS]]
    assert final == sorted(final)
    entry, = database.entries()
    assert (entry.schedule, entry.how) == (tried[0].schedule, "measured")
    assert entry.arch == f"cpu {here.isa}, 2 threads"
    assert choose(SPEC, here) == tried[0].schedule
    # not for other threads or another instruction set
    for other in (replace(here, threads=3), replace(here, isa=PORTABLE)):
        assert choose(SPEC, other) == default(SPEC, other)


def test_search_goes_to_what_is_faster(here: CPU, monkeypatch: pytest.MonkeyPatch):
    """By a clock that likes GEMV, few columns in a chunk and few at a time."""
    def clock(self: tune.Arrays, schedules: list[CPUSchedule]) -> list[float]:
        return [s.block_n / 100 + s.rows / 10 + 9 * (s.template == "gemm") for s in schedules]
    monkeypatch.setattr(tune.Arrays, "in_turns", clock)
    monkeypatch.setattr(TABLE, "build", lambda spec, s, target: s)
    monkeypatch.setattr("tinygrad_nv.runtime.cpu.program.load", lambda kernel: kernel)
    few, many = (tune.tune(SPEC, here, beam)[0].schedule for beam in (1, 9))
    assert many.rows == 1
    assert many.block_n == here.isa.lanes
    assert clock(None, [many]) < clock(None, [few])


def test_the_default_is_timed_again_beside_the_fastest(here: CPU, monkeypatch: pytest.MonkeyPatch):
    """By a clock that was slow when the default had its turn."""
    first = default(SPEC, here)

    def clock(self: tune.Arrays, schedules: list[CPUSchedule]) -> list[float]:
        return [(9.0 if len(schedules) == 1 else 0.1) if s == first else 1 + s.rows / 10 for s in schedules]
    monkeypatch.setattr(tune.Arrays, "in_turns", clock)
    monkeypatch.setattr(TABLE, "build", lambda spec, s, target: s)
    monkeypatch.setattr("tinygrad_nv.runtime.cpu.program.load", lambda kernel: kernel)
    tried = tune.tune(SPEC, here)
    assert len(tried) > tune.FINALISTS
    assert tried[0].schedule == first


def test_what_does_not_compile_is_out(here: CPU, monkeypatch: pytest.MonkeyPatch):
    def build(spec: GemmSpec, s: CPUSchedule, target: CPU):
        if s == default(spec, here): return made(spec, s, target)
        raise ToolchainError("a compiler said no")
    made = TABLE.build
    monkeypatch.setattr(TABLE, "build", build)
    tried = tune.tune(SPEC, here, 1)
    assert [one.why for one in tried] == ["", *["a compiler said no"] * (len(tried) - 1)]
    assert database.entries()[0].schedule == default(SPEC, here)


def test_beam_tunes_what_a_graph_needs(file: Path, monkeypatch: pytest.MonkeyPatch):
    count = []
    found = tune.tune
    monkeypatch.setattr(tune, "tune", lambda *args: count.append(args) or found(*args))
    monkeypatch.setattr(tune, "PER_BEAM", 3)
    x, w = (Tensor.empty(rows, 64, device="CPU") for rows in (2, 48))
    usual = explain(x @ w.T).kernels[0].schedule
    with Context(BEAM=1): first = explain(x @ w.T).kernels[0].schedule
    assert (len(count), count[0][2]) == (1, 1)
    assert first == database.entries()[0].schedule
    assert isinstance(usual, CPUSchedule)
    with Context(BEAM=1): assert explain(x @ w.T).kernels[0].schedule == first
    assert explain(x @ w.T).kernels[0].schedule == first
    assert len(count) == 1


def test_a_database_that_cannot_be_written(here: CPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_text("")
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "a" / "schedules.json"))
    monkeypatch.setattr(tune, "PER_BEAM", 1)
    with Context(BEAM=1), pytest.warns(ScheduleWarning, match="cannot be written"):
        assert choose(SPEC, here) == default(SPEC, here)


# **** the database ****

def stored(here: CPU, **change) -> Entry:
    start = default(SPEC, here)
    assert start is not None
    entry = Entry(SPEC, here.arch, database.toolchain("cpu"),
                  replace(start, **change), 1e-5, "measured")
    database.store([entry])
    return entry


def test_another_compiler_finds_nothing(here: CPU, monkeypatch: pytest.MonkeyPatch):
    entry = stored(here, parts=1)
    assert choose(SPEC, here) == entry.schedule
    monkeypatch.setattr(database, "toolchain", lambda kind: "another")
    assert choose(SPEC, here) == default(SPEC, here)


def test_an_illegal_entry_is_ignored_with_a_note(here: CPU):
    stored(here, rows=4096)
    with pytest.warns(ScheduleWarning, match="is ignored for 4x96x256 f32.*sums in registers, at most 64"):
        assert choose(SPEC, here) == default(SPEC, here)


@pytest.mark.parametrize(("change", "why"), [
    ({"arch": "cpu avx2"}, "an entry of 'cpu avx2'"), ({"arch": "cpu mmx, 2 threads"}, "in an entry of"),
    ({"arch": "cpu mmx, 0 threads"}, "an entry of"), ({"arch": 3}, "an entry of 3"),
    ({"schedule": {"template": "gemv"}}, "isa=None"), ({"seconds": -1}, "an entry of")])
def test_a_corrupt_entry_is_ignored_with_a_note(here: CPU, file: Path, change: dict, why: str):
    stored(here)
    data = json.loads(file.read_text())
    data["entries"][0].update(change)
    file.write_text(json.dumps(data))
    with pytest.warns(ScheduleWarning, match=f"entry 0 of .* is ignored: .*{why}"):
        assert choose(SPEC, here) == default(SPEC, here)


# **** the command ****

WORDS = ("tune", "4", "96", "256", "--dtype", "f32", "--beam", "1")


def test_the_command_tunes_for_this_machine(command, file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "PER_BEAM", 3)
    lines = command(*WORDS, "--arch", "cpu").succeeded().out.splitlines()
    entry, = database.entries()
    assert lines[0].split("  ")[0] == "schedule"
    assert lines[0].endswith("predicted us  measured us")
    assert lines[1].startswith(str(entry.schedule))
    assert lines[-2] == f"4x96x256 f32 NT → f32 on {entry.arch}: {entry.schedule}"
    assert lines[-1].endswith(f"GFLOP/s; kept in {file}")
    with Context(DEV="CPU"): said = json.loads(command(*WORDS, "--json").succeeded().out)
    assert said["arch"] == entry.arch
    assert {"schedule", "predicted_s", "measured_s", "why"} == set(said["candidates"][0])
    listed = command("tune", "--list").succeeded().out
    assert entry.arch in listed
    assert "measured" in listed


def test_winners_are_exported_and_imported(command, here: CPU, tmp_path: Path, file: Path):
    entry = stored(here)
    command("tune", "--export", tmp_path / "out.json").succeeded()
    file.unlink()
    command("tune", "--import", tmp_path / "out.json").succeeded()
    assert database.entries() == [entry]
    file.unlink()
    text = (tmp_path / "out.json").read_text().replace('"rows": ', '"rows": 9')
    (tmp_path / "out.json").write_text(text)
    done = command("tune", "--import", tmp_path / "out.json").succeeded()
    assert "is ignored for 4x96x256 f32" in done.err
    assert database.entries() == []


def test_what_cannot_be_tuned(command):
    command(*WORDS, "--arch", "cpu", "--sm-count", "4").refused("--sm-count on a CPU", "leave it out")
    command("tune", "4", "96", "256", "--epilogue", "swish", "--arch", "cpu").refused("epilogue 'swish'")
