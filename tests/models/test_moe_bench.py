"""What `tinygrad-nv bench` says of mixtures of experts: bytes of weights that a step reads."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tinygrad_nv.benchmarks.speed import describe_weights
from tinygrad_nv.cli import main
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.functional import Policy
from tinygrad_nv.models.layer_config import MoEConfig


@pytest.mark.parametrize(("experts", "k", "tokens"), [
    (8, 2, 1), (8, 2, 4), (7, 1, 3), (128, 8, 64), (5, 5, 9)])
def test_distinct_experts_are_those_of_random_choices(experts: int, k: int, tokens: int):
    draw, runs = np.random.default_rng(0), 400
    found = [len({int(i) for _ in range(tokens) for i in draw.permutation(experts)[:k]}) for _ in range(runs)]
    expected = MoEConfig(experts, 1, Policy(k), (True,)).distinct(tokens)
    assert abs(np.mean(found) - expected) <= 4 * np.std(found) / runs ** 0.5 + 1e-9
    assert tokens > 1 or expected == pytest.approx(k)


@pytest.mark.parametrize("case", ["qwen2-moe", "qwen3-moe"])
def test_bytes_of_a_step_are_those_of_its_experts(hf_model: Callable[[str], Path], case: str):
    stored = load_file(hf_model(case) / "model.safetensors")
    experts = sum(x.nbytes for name, x in stored.items() if ".mlp.experts." in name)
    rest = sum(x.nbytes for name, x in stored.items()) - experts
    llm = LLM(hf_model(case), device="CPU", max_num_seqs=2, max_model_len=32)
    try:
        moe = llm.config.moe
        assert moe is not None
        if not llm.config.tied: rest -= stored["model.embed_tokens.weight"].nbytes
        assert llm.streamed_bytes == rest + experts * moe.policy.k // moe.experts
        weights = describe_weights(llm, 3)
        missed = (1 - moe.policy.k / moe.experts) ** 3
        assert weights.experts is not None
        assert weights.experts.streamed == pytest.approx(rest + experts * (1 - missed), abs=4)
        assert weights.streamed == weights.unquantised == llm.streamed_bytes
        assert llm.step_weight_bytes(10_000) == rest + experts
        assert f"{moe.policy.k} of {moe.experts} for each token" in str(weights)
        assert weights.record()["experts"]["expected_bytes_per_step"] == weights.experts.streamed
    finally: llm.close()


@pytest.mark.slow
def test_commands(hf_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of a directory with experts, also beside transformers."""
    model, path = str(hf_model("qwen3-moe")), tmp_path / "made.json"
    lengths = ["--input-len", "6", "--output-len", "4", "--device", "CPU", "--max-model-len", "32"]
    assert main(["bench", "speed", model, *lengths, "-r", "1", "--output-json", str(path)]) == 0
    assert json.loads(path.read_text())["weights"]["experts"]["expected_distinct_experts"] == pytest.approx(8)
    assert main(["bench", "latency", model, *lengths, "--batch-size", "3", "--num-iters", "1",
                 "--num-iters-warmup", "1", "--against", "transformers", "--output-json", str(path)]) == 0
    made = json.loads(path.read_text())
    assert made["weights"]["experts"]["sequences"] == 3
    assert made["transformers"]["avg_latency"] > 0
    assert main(["bench", "throughput", model, *lengths, "--num-prompts", "3", "--num-iters", "1"]) == 0
    assert main(["bench", "serve", model, "--random-input-len", "6", "--random-output-len", "4",
                 "--num-prompts", "2", "--device", "CPU", "--max-model-len", "32",
                 "--output-json", str(path)]) == 0
    assert json.loads(path.read_text())["completed"] == 2
    said = capsys.readouterr().out
    assert "Experts: 8 of 12 for each token, in 2 layers" in said
    assert "for a batch of 3" in said
