"""`tinygrad-nv plan`: tables, JSON, models of which only the configuration is there. `tinygrad-nv launch`:
what it runs and returns, and that none of its processes outlives it."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.dist.dist_case import MARK, alive, await_none, program
from tinygrad_nv.cli import DEFAULT_MODEL

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1024, "hidden_size": 128,
          "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
DECIDED = ("--gpus", "8xH100", "--tp", "8", "--pp", "1")


def test_one_layout(command):
    done = command("plan", "llama-3.1-8b", *DECIDED, "--batch", "8").succeeded()
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[:3] == ["llama-3.1-8b on 8 x H100 SXM (NVLink 4, NVSwitch)",
                         "tp 8; 8 sequences of 1024 + 128 tokens, bf16",
                         "all times are modelled, not measured"]
    assert "layouts, the best first" not in done.out
    assert not any(line != line.rstrip() for line in lines)


def test_json_has_what_the_table_has(command):
    done = command("plan", "llama-3.1-8b", *DECIDED, "--batch", "8", "--json").succeeded()
    plan = json.loads(done.out)["plan"]
    table = command("plan", "llama-3.1-8b", *DECIDED, "--batch", "8").succeeded().out
    assert f"{plan['tokens_per_s']:,.0f}" in table
    assert plan["cluster"]["gpus"] == 8
    assert sum(plan["memory"]["parts"].values()) == plan["memory"]["total"] <= plan["memory"]["limit"]


def test_training_of_two_nodes(command):
    done = command("plan", "llama-3.1-8b", "--gpus", "8xH100", "--nodes", "2", "--net", "200G", "--train",
                   "--tp", "1", "--pp", "1", "--zero", "3", "--recompute", "selective", "--microbatch", "1",
                   "--json").succeeded()
    plan = json.loads(done.out)["plan"]
    assert plan["layout"] == {"tp": 1, "pp": 1, "dp": 16, "ep": 1, "sp": False}
    assert plan["cluster"]["net"] == "200 Gb/s"
    assert 0.2 < plan["mfu"] < 0.6


def test_a_directory_with_its_configuration_alone(command, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for model in (tmp_path, DEFAULT_MODEL):
        done = command("plan", model, "--gpus", "2xL40S", "--tp", "2", "--pp", "1", "--batch", "1")
        done.succeeded()
        assert "on 2 x L40S (PCIe 4 x16)" in done.out


def test_training_before_it_runs(command, tmp_path: Path):
    """Of a directory without weights, and without data."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = command("train", "--plan", tmp_path, "--max-length", "64", "--per-device-train-batch-size", "2",
                   "--gradient-checkpointing").succeeded()
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == (f"{tmp_path}: sft, float32, adamw_torch, rows of 64 tokens, 2 x 1 a step, "
                        "checkpointing full")
    assert any(line.startswith("peak ") for line in lines)
    assert any(line.startswith("tokens, at most") and line.endswith("128") for line in lines)
    assert not any(line != line.rstrip() for line in lines)


SCRIPT = Path(sys.executable).with_name("tinygrad-nv")


def test_a_command_runs_as_several_ranks(command):
    text = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK, $MASTER_ADDR"
    done = command("launch", "-n", "2", "sh", "-c", text).succeeded()
    assert sorted(done.out.splitlines()) == [f"[rank {rank}] {rank} of 2, {rank} of 2, 0, 127.0.0.1"
                                             for rank in range(2)]


@pytest.mark.parametrize("words", [("echo", "-n", "--max_model_len=3", "--", "x"),
                                   ("--", "echo", "-n", "--max_model_len=3", "--", "x")])
def test_options_behind_the_command_are_its_own(words: tuple[str, ...], command):
    assert command("launch", "-n", "1", *words).succeeded().out == "[rank 0] --max_model_len=3 -- x\n"


def test_the_status_of_the_rank_that_failed_first(command):
    text = "[ $RANK = 0 ] && sleep 60; echo no; exit 7"
    done = command("launch", "--nproc-per-node", "2", "sh", "-c", text)
    assert done.code == 7
    assert "tinygrad-nv launch: rank 1 (process" in done.err
    assert "exited with status 7; the other ranks were ended\n  its last lines:\n  | no\n" in done.err


def test_ranks_that_are_started_again(command, tmp_path: Path):
    """All of them, each time; the last failure counts."""
    text = f"echo ${{TORCHELASTIC_RESTART_COUNT:-0}} >> {tmp_path}/$RANK; [ $RANK = 0 ] && sleep 60; exit 7"
    done = command("launch", "-n", "2", "--max-restarts", "2", "sh", "-c", text)
    assert done.code == 7
    for again in (1, 2): assert f"exited with status 7; all are started again ({again} of 2)" in done.err
    assert "exited with status 7; the other ranks were ended" in done.err
    assert (tmp_path / "1").read_text().split() == ["0", "1", "2"]
    done = command("launch", "-n", "1", "--max-restarts", "2", "sh", "-c",
                   f"[ -e {tmp_path}/there ] || {{ touch {tmp_path}/there; kill -9 $$; }}").succeeded()
    assert "was killed by SIGKILL; all are started again (1 of 2)" in done.err


def test_logs(command, tmp_path: Path):
    done = command("launch", "-n", "2", "--quiet", "--log-dir", tmp_path / "new" / "logs", "sh", "-c",
                   "echo out $RANK; echo err $RANK >&2").succeeded()
    assert (done.out, done.err) == ("[rank 0] out 0\n", "[rank 0] err 0\n")
    assert [sorted((tmp_path / "new" / "logs" / f"rank-{rank}.log").read_text().splitlines())
            for rank in range(2)] == [[f"err {rank}", f"out {rank}"] for rank in range(2)]


@pytest.mark.parametrize(("number", "code"), [
    pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)])
def test_signals(number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No rank is left when a terminal, a service manager or the kernel ends the command."""
    monkeypatch.setenv(MARK, mark := str(tmp_path))
    path = program(tmp_path, "print('started', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen([str(SCRIPT), "launch", "-n", "2", "--grace", "0.5", str(path)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[rank 0] started\n", "[rank 1] started\n"]
    assert len(alive(mark)) >= 3
    began = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert await_none(mark, 60) == []
    assert time.monotonic() - began < 8
    assert not [line for line in err.splitlines() if not line.startswith("[rank ")], "of the launcher"


@pytest.mark.slow
def test_a_closed_pipe_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(MARK, mark := str(tmp_path))
    path = program(tmp_path, "while True: print('y' * 1000, flush=True)")
    done = subprocess.run(f"{SCRIPT} launch -n 2 {path} | head -c 100", shell=True, capture_output=True,
                          text=True, timeout=30, check=False, env=dict(os.environ))
    assert done.returncode == 0
    assert await_none(mark, 60) == []
