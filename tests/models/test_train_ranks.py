"""`tinygrad-nv train` over ranks: the bits of one rank, whatever is killed on the way."""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.models.train_ranks_case import (
    COMMAND,
    USUAL,
    Make,
    apart,
    described,
    log,
    same,
    token_ids,
    trained,
    weights,
)
from tinygrad_nv.cli import DEFAULT_MODEL


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_ids(tmp_path_factory.mktemp("data"))


def test_two_ranks_have_the_bits_of_one(data: Path, tmp_path: Path) -> None:
    """One micro-batch on each of two ranks, and two on one. Rank 0 alone writes."""
    model = described(tmp_path)
    trained(model, data, tmp_path / "one", "--from-scratch", "--gradient-accumulation-steps", "2")
    told = trained(model, data, tmp_path / "two", "--from-scratch", "-dp", "2")
    same(tmp_path / "two", tmp_path / "one")
    assert told.count("parameters to train over 2 ranks") == 1
    assert f"{tmp_path / 'two'}: 4 steps in" in told


@pytest.mark.slow
def test_scales_of_fp8_are_of_all_ranks(data: Path, tmp_path: Path) -> None:
    """Delayed scaling has the largest magnitudes, and the counts, of both ranks: the bits of one rank."""
    model, given = described(tmp_path), ("--from-scratch", "--precision", "fp8_delayed")
    trained(model, data, tmp_path / "one", *given, "--gradient-accumulation-steps", "2")
    trained(model, data, tmp_path / "two", *given, "-dp", "2")
    same(tmp_path / "two", tmp_path / "one")
    for one, two in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        counts = {name: each for name, each in one.items() if name.startswith("fp8_flushed")}
        assert len(counts) == 3
        assert {name: two[name] for name in counts} == counts


@pytest.mark.parametrize("options", [
    ("--eval-data", "DATA", "--eval-batches", "2"),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (
        ("--gradient-accumulation-steps", "2", "--gradient-checkpointing"), ("--dtype", "bfloat16"),
        ("--gradient-checkpointing", "--gradient-checkpointing-policy", "0.5"), ("--optim", "adamw_8bit"),
        ("--optim", "paged_adamw_32bit")))], ids=lambda each: each[-1])
def test_gathered_layers(data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Stage 3 has the bits of stage 2, which adds up the same parts in the same order, whatever layers keep:
    of a model with a head of its own, clipped, evaluated on the way."""
    model = described(tmp_path, num_hidden_layers=2, num_key_value_heads=1, tie_word_embeddings=False)
    more = [str(data) if each == "DATA" else each for each in (*options, "--max-grad-norm", "0.5")]
    plain = [each for each in more if "checkpointing" not in each and each != "0.5"] + ["0.5"]
    for stage, given in (("2", plain), ("3", more)):
        trained(model, data, tmp_path / stage, "--from-scratch", "-dp", "2", "--zero-stage", stage, *given)
    same(tmp_path / "3", tmp_path / "2")
    assert weights(tmp_path / "3")["lm_head.weight"].shape == (300, 32)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [(), ("--zero-stage", "3")], ids=str)
def test_preferences(tmp_path: Path, zero: tuple[str, ...]) -> None:
    """DPO over two ranks: the bits of one, and with parts, whose squares are added up in another order, as
    near as numbers of float32 are."""
    rows = [{"chosen": [5 + i, 7, 9, 11 + i], "rejected": [8, 6 + i, 4]} for i in range(16)]
    (pairs := tmp_path / "pairs.jsonl").write_text("".join(
        json.dumps({"prompt": "a fox", **{key: " ".join(map(str, each)) for key, each in row.items()}}) + "\n"
        for row in rows))
    dpo = ("--method", "dpo")
    trained(Path(DEFAULT_MODEL), pairs, tmp_path / "one", *dpo, "--gradient-accumulation-steps", "2")
    trained(Path(DEFAULT_MODEL), pairs, tmp_path / "two", *dpo, "-dp", "2", *zero)
    if not zero: same(tmp_path / "two", tmp_path / "one")
    for one, two in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        for key in ("loss", "rewards/margins"): assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_evaluations(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """Each rank has its batches, and all are in the mean; an uneven number, and fewer than ranks."""
    for name, count in (("all", "0"), ("one", "1")):
        more = ("--eval-data", str(data), "--eval-batches", count)
        trained(hf_model("llama"), data, tmp_path / name, *more, "--gradient-accumulation-steps", "2")
        trained(hf_model("llama"), data, tmp_path / f"{name}-two", *more, "-dp", "2")
        assert "eval_loss" in log(tmp_path / name)[-1]
        same(tmp_path / f"{name}-two", tmp_path / name)


@pytest.mark.slow
def test_sums_in_another_order(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """Two micro-batches on each of two ranks, sharded or not: as near to one rank's four as one rank's rows
    in two larger micro-batches are, times 4. Clipping has the norm of all ranks' parts."""
    # an epsilon above gradients that are nothing but rounding: Adam makes whole steps of these
    few = ("--adam-epsilon", "1e-3", "--gradient-accumulation-steps", "2")
    model, four = hf_model("llama"), (*few[:-1], "4")
    trained(model, data, tmp_path / "four", *four)
    trained(model, data, tmp_path / "large", *few, "--per-device-train-batch-size", "4")
    bound = 4 * apart(tmp_path / "large", tmp_path / "four")
    assert 0 < bound < 1e-3
    for stage in "0123":
        trained(model, data, output := tmp_path / stage, *few, "-dp", "2", "--zero-stage", stage)
        assert apart(output, tmp_path / "four") <= bound, stage
        for one, two in zip(log(output), log(tmp_path / "four"), strict=True):
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
            assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_adapters_and_dropout(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """Dropout is drawn by the number of the micro-batch among those of all ranks."""
    lora = ("--use-peft", "--lora-r", "2", "--lora-dropout", "0.2")
    trained(hf_model("llama"), data, tmp_path / "one", *lora, "--gradient-accumulation-steps", "2")
    trained(hf_model("llama"), data, tmp_path / "two", *lora, "-dp", "2")
    same(tmp_path / "two", tmp_path / "one")


def started(model: Path, data: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    """The command, over two ranks, with a checkpoint after each step; it marks its processes."""
    words = (*COMMAND, str(model), str(data), *USUAL, "--output-dir", str(output), "-dp", "2",
             "--save-strategy", "steps", "--save-steps", "1", "--max-steps", "40", *options)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "TRAIN_TEST_MARK": str(output)})


def rank_of(output: Path, rank: int) -> int:
    """The process of a rank; 0 where there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        try: words = (folder / "environ").read_bytes().split(b"\0")
        except OSError: continue
        if f"TRAIN_TEST_MARK={output}".encode() in words and f"RANK={rank}".encode() in words:
            return int(folder.name)
    return 0


def killed_after(output: Path, step: int, rank: int, running: subprocess.Popen[str]) -> None:
    """Kills a rank when a checkpoint of this step or a later one is there."""
    end = time.monotonic() + 240
    def newest() -> int:
        return max((int(path.name.split("-")[1]) for path in output.glob("checkpoint-*")
                    if path.name.split("-")[1].isdigit()), default=0)
    while newest() < step:
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(rank_of(output, rank), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "options"), [(1, ()), (0, ()), (1, ("--zero-stage", "1")),
                                              (1, ("--zero-stage", "3"))], ids=str)
def test_a_killed_rank(hf_model: Make, data: Path, tmp_path: Path, rank: int,
                       options: tuple[str, ...]) -> None:
    """All end, are started again, and go on from the last checkpoint: the bits of a run never stopped."""
    model = hf_model("llama")
    whole = started(model, data, tmp_path / "whole", *options)
    assert whole.wait(300) == 0
    running = started(model, data, tmp_path / "killed", *options, "--max-restarts", "1")
    killed_after(tmp_path / "killed", 3, rank, running)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 0, told
    assert re.search(rf"tinygrad-nv train: rank {rank} \(process \d+\) was killed by SIGKILL; all are "
                     r"started again \(1 of 1\)", told)
    assert "; steps 1 to" not in told.split("started again")[1]
    same(tmp_path / "killed", tmp_path / "whole")
    assert [row["step"] for row in log(tmp_path / "killed")] == list(range(1, 41))


@pytest.mark.slow
def test_a_killed_rank_without_restarts(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """All end; a run with one rank goes on from their checkpoint, with the same batch."""
    running = started(hf_model("llama"), data, tmp_path / "out")
    killed_after(tmp_path / "out", 2, 1, running)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 137
    assert "was killed by SIGKILL; the other ranks were ended" in told
    assert not rank_of(tmp_path / "out", 0)
    told = trained(hf_model("llama"), data, tmp_path / "out", "--gradient-accumulation-steps", "2",
                   "--resume-from-checkpoint", "latest", "--max-steps", "40")
    assert "; steps 1 to" not in told
    assert [row["step"] for row in log(tmp_path / "out")] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "optim"), [("1", "adamw_torch"), ("2", "adamw_8bit"),
                                              ("3", "adamw_torch")])
def test_parts_of_other_numbers_of_ranks(data: Path, tmp_path: Path, stage: str, optim: str) -> None:
    """A run over two ranks goes on with one, then with four, and comes to the weights of the run over two:
    nothing is clipped, and the sums of four micro-batches differ in their order alone."""
    model, out = described(tmp_path, num_hidden_layers=2), tmp_path / "out"
    fixed = ("--from-scratch", "--zero-stage", stage, "--optim", optim, "--max-grad-norm", "0",
             "--per-device-train-batch-size", "1", "--save-strategy", "steps", "--save-steps", "1",
             "--save-total-limit", "9", "--adam-epsilon", "1e-3")
    trained(model, data, tmp_path / "whole", *fixed, "--gradient-accumulation-steps", "2", "-dp", "2")
    trained(model, data, out, *fixed, "--gradient-accumulation-steps", "2", "-dp", "2")
    for step, accumulated, ranks in (("1", "4", "1"), ("2", "1", "4")):
        for path in out.glob("checkpoint-*"):
            if int(path.name.split("-")[1]) > int(step): shutil.rmtree(path)
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", out / f"checkpoint-{step}",
                        dirs_exist_ok=True)
        told = trained(model, data, out, *fixed, "--gradient-accumulation-steps", accumulated, "-dp", ranks,
                       "--resume-from-checkpoint", "latest")
        assert f"; steps {int(step) + 1} to 4" in told
        assert apart(out, tmp_path / "whole") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_other_launchers(data: Path, tmp_path: Path, launcher: str) -> None:
    """Under mpiexec, whose order of sums is its own (of two numbers it does not matter), and with torchrun's
    variables: the bits of one rank."""
    model = described(tmp_path)
    trained(model, data, tmp_path / "one", "--from-scratch", "--gradient-accumulation-steps", "2")
    words = (*COMMAND, str(model), str(data), *USUAL, "--from-scratch", "--output-dir", str(tmp_path / "two"))
    if launcher == "mpiexec":
        found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert found is not None, "the wheel mpich has one"
        started_ = [subprocess.Popen([found, "-n", "2", *words])]
    else:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = str(taken.getsockname()[1])
        started_ = [subprocess.Popen(words, env={
            **os.environ, "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}) for rank in "01"]
    assert [each.wait(300) for each in started_] == [0] * len(started_)
    same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_launchers(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """Under a launcher the command is one of its ranks; with Ctrl-C all stop after the same step."""
    words = (sys.executable, "-m", "tinygrad_nv", "launch", "--quiet", "-n", "2", *COMMAND,
             str(hf_model("llama")), str(data), *USUAL)
    done = subprocess.run([*words, "--output-dir", str(tmp_path / "two")], capture_output=True, text=True,
                          timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'two'}: 4 steps in" in done.stdout
    done = subprocess.run([*words, "-dp", "3", "--output-dir", str(tmp_path / "three")], capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "--data-parallel-size 3, and a launcher has started 2 ranks" in done.stderr
    running = started(hf_model("llama"), data, tmp_path / "stopped", "--max-steps", "4000")
    while not (tmp_path / "stopped" / "checkpoint-2").exists(): time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=120)
    assert running.returncode == 130, told
    found = re.search(r"stopped after step (\d+)", told)
    assert found is not None
    step = int(found[1])
    assert (tmp_path / "stopped" / f"checkpoint-{step}" / "manifest.json").exists()
