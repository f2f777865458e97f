"""`tinygrad-nv plan`: tables, JSON, and models of which only the configuration is there."""
from __future__ import annotations

import json
from pathlib import Path

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
