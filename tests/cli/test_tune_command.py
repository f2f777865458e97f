"""`tinygrad-nv tune`: what it prints, what it keeps, what it refuses."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from tinygrad.helpers import Context

from tinygrad_nv.cli import main
from tinygrad_nv.tile import database, tune
from tinygrad_nv.tile.attention import dense as attention
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.database import Entry
from tinygrad_nv.tile.decode import dense as decode
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

WORDS = ["tune", "96", "80", "512", "--arch", "sm_80", "--sm-count", "100", "--beam", "1"]  # none has so many
SPEC = dense(96, 80, 512)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    monkeypatch.setattr(database, "_noted", set())
    monkeypatch.setattr(tune, "PER_BEAM", 2)
    return tmp_path / "schedules.json"


def entry(spec=SPEC, schedule: Mma = Mma().block(64, 64)) -> Entry:  # noqa: B008 (frozen)
    return Entry(spec, "sm_80", database.toolchain(), schedule, 1e-5)


# **** a matmul ****

def test_the_winner_is_first_and_kept(file: Path, command):
    done = command(*WORDS).succeeded()
    lines = done.out.splitlines()
    winner = database.entries()[0]
    assert lines[0].split("  ")[0] == "schedule"
    assert "predicted us  counted us" in lines[0]
    assert len(lines) == 1 + 3 + 4
    assert lines[1].startswith(str(winner.schedule))
    assert f"96x80x512 bf16 NT → bf16 on sm_80: {winner.schedule}" in lines
    assert lines[-2].endswith(f"kept in {file}")
    assert "by the cost model" in lines[-2]
    assert choose(SPEC, GPU("sm_80")) == winner.schedule
    assert done.err == ""
    assert command(*WORDS).out == done.out


@pytest.mark.slow
def test_columns_end_below_each_other(command):
    rows = command(*WORDS).out.splitlines()[:4]
    ends = {line.index("us", line.index("predicted")) + 2 for line in rows[:1]}
    assert {line.rindex(".", 0, max(ends)) for line in rows[1:]} == {max(ends) - 3}


def test_words_make_the_product(command):
    done = command(*WORDS, "--dtype", "f16", "--out", "f32", "--majors", "TN", "--batch", "2x3", "--epilogue",
                   "bias+gelu", "--json").succeeded()
    said = json.loads(done.out)
    assert said["spec"] == "2x3x96x80x512 f16 TN → f32, bias+gelu"
    assert (said["arch"], said["flops"]) == ("sm_80", 2 * 6 * 96 * 80 * 512)
    spec = dense(96, 80, 512, "f16", "f32", "TN", (2, 3), "bias+gelu")
    assert database.lookup(spec, "sm_80") == TABLE.read("gpu", said["candidates"][0]["schedule"])
    best = said["candidates"][0]
    assert best["counted_s"] > 0
    assert best["predicted_s"] > 0
    assert best["bound"]
    assert best["registers"] > 0
    assert best["smem_bytes"] > 0


def test_a_symbolic_product_of_two_parts(command):
    done = command("tune", "64", "64", "256", "--epilogue", "gate", "--symbolic", "--sm-count", "16",
                   "--beam", "1")
    assert "≤64x64x256 bf16 NT → bf16, gate on sm_90a" in done.succeeded().out


@pytest.mark.slow
def test_candidates_that_are_out_say_why(command, monkeypatch):
    from tinygrad_nv.ptx.assemble import Assembly, Resources
    monkeypatch.setattr(tune, "assemble", lambda text, arch, flags: Assembly(
        arch, b"", {"gemm_mma": Resources(255, 16, 16, 0, 0, 1)}, ()))
    done = command(*WORDS)
    assert done.code == 2
    assert "spills 32 B" in done.out
    assert "no candidate can be used" in done.err
    assert database.entries() == []


# **** by the timing model ****

HOPPER = ["--beam", "1", "--json"]


@pytest.mark.slow
def test_what_is_modelled_is_told_as_that_and_for_which_gpu(file: Path, command):
    words = ["tune", "256", "512", "256", "--beam", "1"]
    done = command(*words).succeeded()
    winner = database.entries()[0]
    lines = done.out.splitlines()
    assert "predicted us  modelled us" in lines[0]
    assert "measured" not in lines[0]
    assert lines[-2].endswith(f"TFLOP/s modelled for h100, not measured; kept in {file}")
    assert lines[-1].startswith("the timing model: 4.8% off in mean on an H100 (119 kernels), whose ")
    assert (winner.how, winner.gpu) == ("modelled", "h100")
    said = json.loads(command(*words, "--gpu", "h800", "--json").succeeded().out)
    assert (said["how"], said["gpu"]) == ("modelled", "h800")
    assert said["candidates"][0]["modelled_s"] != winner.seconds
    assert "measured_s" not in said["candidates"][0]
    shown = command("tune", "--list").succeeded().out.splitlines()
    assert [line.split("  ")[-2] for line in shown[1:]] == ["modelled for h100", "modelled for h800"]
    assert choose(dense(256, 512, 256), GPU("sm_90a", 132)) == winner.schedule


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("words", "spec"), [
    (["--attention", "1x4x256x64", "--causal", "--kv-heads", "2"],
     attention.dense(1, 4, 256, 64, causal=True, kv_heads=2)),
    (["--attention", "1x2x128x64", "--backward", "--layout", "BSHD", "--dtype", "f16"],
     attention.gradient(attention.dense(1, 2, 128, 64, "f16", layout="BSHD"))),
    (["--decode", "2x4x256x64", "--kv-heads", "1", "--kv-dtype", "e4m3", "--page-size", "32"],
     decode.dense(2, 4, 256, 64, kv_heads=1, kv_dtype="e4m3", page_size=32))])
def test_attentions_are_tuned(words: list[str], spec: object, command):
    said = json.loads(command("tune", *words, *HOPPER).succeeded().out)
    assert said["spec"] == str(spec)
    assert said["how"] == "modelled"
    best = said["candidates"][0]
    assert best["modelled_s"] > 0
    assert best["registers"] > 0
    assert best["predicted_s"] is None
    assert TABLE.choose(spec, GPU("sm_90a", 132)) == TABLE.read("gpu", best["schedule"])


def test_with_a_gpu_the_best_by_the_model_are_measured(command, monkeypatch: pytest.MonkeyPatch):
    from tinygrad_nv.patterns import target
    times = iter((2e-5, 1e-5))
    class GPUClock:
        how, clusters = "measured", ()
        def conditions(self): return {"driver": "580.1", "throttled": False}
        def seconds(self, made, spec, assembled=()): return next(times)
    there = GPU("sm_90a", 132, clock=GPUClock(), model="h100")
    monkeypatch.setattr(target, "target_of", lambda device: there if device == "CUDA" else None)
    with Context(DEV="CUDA"): done = command("tune", "--attention", "1x4x256x64", "--beam", "1").succeeded()
    head, first, second, *others = done.out.splitlines()
    assert head.split()[:5] == ["schedule", "modelled", "us", "measured", "us"]
    assert ("10.00" in first, "20.00" in second) == (True, True)
    assert "modelled slower than what was m…" in others[0]
    assert "TFLOP/s measured; kept in" in done.out
    assert [entry.how for entry in database.entries()] == ["measured"]


# **** the database ****

def test_list(file: Path, command):
    assert command("tune", "--list").succeeded().out == f"no schedules in {file}\n"
    database.store([entry(), entry(dense(64, 64, 64, epilogue="bias+gelu"))])
    lines = command("tune", "--list").succeeded().out.splitlines()
    assert lines[0].split() == ["spec", "arch", "toolchain", "schedule", "us", "bound", "how",
                                "origin"]
    assert lines[1].startswith("96x80x512 bf16 NT → bf16 ")
    assert "mma 64x64x32, 2x2 warps, 3 stages" in lines[1]
    assert "…" in lines[2]
    said = json.loads(command("tune", "--list", "--json").succeeded().out)
    assert said["path"] == str(file)
    assert [Entry.from_json(one) for one in said["entries"]] == database.entries()


def test_export_clear_import(tmp_path: Path, command):
    database.store([entry(), entry(dense(64, 64, 64))])
    before, out = database.entries(), str(tmp_path / "out.json")
    assert command("tune", "--export", out).succeeded().out == f"2 schedules written to {out}\n"
    assert command("tune", "--clear").succeeded().out == "2 schedules forgotten\n"
    assert database.entries() == []
    database.store([entry(dense(32, 32, 32))])
    assert command("tune", "--import", out).succeeded().out.startswith("2 schedules added to ")
    assert database.entries() == [entry(dense(32, 32, 32)), *before]


def test_what_cannot_be_is_not_imported(tmp_path: Path, command):
    impossible = entry(schedule=Mma().block(100, 64))
    (tmp_path / "in.json").write_text(database.dump([entry(), impossible]))
    done = command("tune", "--import", str(tmp_path / "in.json")).succeeded()
    assert done.out.startswith("1 schedules added")
    assert done.err.startswith("note: mma 100x64x32, 2x2 warps, 3 stages is ignored for 96x80x512 bf16 NT → "
                               "bf16: block_m=100")


def test_a_corrupt_database_is_a_note(file: Path, command):
    file.write_text("{")
    done = command("tune", "--list").succeeded()
    assert done.err.startswith("note: ")
    assert "set aside as schedules.json.corrupt-1" in done.err


# **** what is refused ****

@pytest.mark.parametrize(("words", "said"), [
    ([], "0 numbers"), (["1", "2"], "2 numbers"), (["1", "2", "3", "4"], "4 numbers"),
    (["1", "2", "3", "--list"], "3 numbers"), (["8", "8", "8", "--epilogue", "bias+nonsense"], "'nonsense'"),
    (["64", "64", "64", "--dtype", "f32"], "no template takes 64x64x64 f32 NT → f32 on sm_90a: "),
    (["64", "64", "64", "--batch", "2x2x2x2"], "4 dimensions of batch"),
    (["64", "64", "64", "--gpu", "h900"], "no figures of a GPU 'h900'\n  expected: one of a100, h100, h200"),
    (["64", "64", "64", "--gpu", "h100", "--arch", "sm_80"], "--gpu h100 with another --arch or --sm-count"),
    (["64", "64", "64", "--gpu", "h100", "--arch", "cpu"], "--gpu on a CPU"),
    (["64", "64", "64", "--causal"], "--causal of a matmul"),
    (["--attention", "1x4x64x64", "--page-size", "16"], "--page-size of an attention"),
    (["--decode", "1x4x64x64", "--backward"], "--backward of a decode attention"),
    (["--decode", "1x4x64x64", "--attention", "1x4x64x64"], "--attention and --decode"),
    (["--attention", "1x4x64x64", "--kv-heads", "3"], "4 heads of 3 key heads"),
    (["--attention", "1x4x64x64", "--dtype", "s8"], "operands of dtype 's8'"),
    (["--attention", "1x4x64x64", "64"], "1 numbers"),
    (["--attention", "1x4x64x64", "--arch", "cpu"], "attentions have one schedule there"),
    (["--attention", "1x4x64x64", "--sm-count", "100"], "nothing times attention kernels on sm_90a"),
    (["--import", "missing.json"], "missing.json cannot be read"),
    (["--export", "/proc/nowhere/x.json"], "the system refused")])
def test_refused(words: list[str], said: str, command):
    command("tune", *words).refused(said)


def test_a_file_that_is_no_export_is_refused(tmp_path: Path, command):
    for content in ("{", "[]", '{"format": "other", "entries": []}'):
        (tmp_path / "in.json").write_text(content)
        done = command("tune", "--import", str(tmp_path / "in.json"))
        done.refused("in.json is no ", "that --export wrote")
    assert (tmp_path / "in.json").exists()


@pytest.mark.parametrize("words", [["0", "1", "1"], ["a", "1", "1"], ["1", "1", "1", "--beam", "0"],
                                   ["1", "1", "1", "--dtype", "f8"], ["1", "1", "1", "--majors", "XX"],
                                   ["1", "1", "1", "--batch", "2xx"], ["--attention", "1x2x3"],
                                   ["1", "1", "1", "--arch", "sm_70"],
                                   ["--list", "--clear"], ["1", "1", "1", "--what"]])
def test_words_that_are_wrong(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_: main(["tune", *words])
    assert exit_.value.code == 2
    assert "usage: tinygrad-nv" in capsys.readouterr().err


@pytest.mark.parametrize("words", [WORDS, ["tune", "--list"], ["tune", "--clear"]])
def test_a_directory_for_a_database_is_refused_before_anything_is_tried(
        words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command):
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path))
    command(*words).refused(f"{tmp_path} is a directory", f"NV_SCHEDULES={tmp_path / 'schedules.json'}")


def test_a_matmul_is_written_in_one_word_too(capsys: pytest.CaptureFixture[str]):
    from tinygrad_nv import cli
    from tinygrad_nv.cli import tune
    tuned: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_tune", lambda arguments: tuned.append(arguments.extents))
        for words in (["64", "32", "16"], ["64x32x16"], ["--gemm", "64x32x16"], ["64X32", "16"]):
            assert cli.main(["tune", *words]) == 0
    assert tuned == [[64, 32, 16]] * 4
    with pytest.raises(SystemExit): cli.main(["tune", "--gemm", "64x32"])
    assert "'64x32' is not MxNxK; write 512x512x512" in capsys.readouterr().err
