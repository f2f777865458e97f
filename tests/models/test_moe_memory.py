"""Mixtures of experts: memory of a step, bytes that `bench` says it reads, and tinygrad's own models with
experts."""
from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tinygrad import GlobalCounters, Tensor, dtypes, nn
from tinygrad.device import Buffer
from tinygrad.helpers import Context

from tinygrad_nv import disabled, explain
from tinygrad_nv.benchmarks.speed import describe_weights
from tinygrad_nv.cli import main
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.memory_planning import step_bytes
from tinygrad_nv.functional import Policy
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.layer_config import MoEConfig
from tinygrad_nv.models.rope import RopeConfig

HIDDEN, WIDTH, K = 128, 48, 8


def config(experts: int) -> ModelConfig:
    """Like Qwen3-MoE, one layer."""
    moe = MoEConfig(experts, WIDTH, Policy(K, renormalize=True), (True,))
    return ModelConfig("Qwen3MoeForCausalLM", 320, HIDDEN, 3 * HIDDEN, 1, 4, 2, 32, 4096,
                       (RopeConfig("default", 1e6, 32, 4096),), windows=(None,), moe=moe)


def peak_bytes(tokens: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that are allocated at a time while a layer computes, beside its weights and input."""
    made, random = config(experts), np.random.default_rng(0)
    assert made.moe is not None
    layer = MixtureOfExperts(made, made.moe, dtypes.float32, "CPU")
    def normal(*shape: int) -> Tensor:
        return Tensor(random.standard_normal(shape).astype(np.float32), device="CPU").realize()
    layer.router, layer.gate_up, layer.down = (normal(*each.shape)
                                               for each in (layer.router, layer.gate_up, layer.down))
    x = normal(1, tokens, HIDDEN)
    gc.collect()  # what tests before have left would be freed, and counted, in the middle
    before = most = GlobalCounters.mem_used
    plain = Buffer.allocate
    def allocate(buffer: Buffer, *args: object, **more: object) -> Buffer:
        nonlocal most
        made = plain(buffer, *args, **more)
        most = max(most, GlobalCounters.mem_used)
        return made
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "allocate", allocate)
        layer(x).realize()
    return most - before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [64, 512, pytest.param(2048, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_tokens_times_experts(tokens: int, monkeypatch: pytest.MonkeyPatch):
    """Beside the router's logits."""
    few, many = (peak_bytes(tokens, experts, monkeypatch) for experts in (8, 128))
    rows = tokens * (K * (WIDTH + HIDDEN) + HIDDEN) * 4     # of the tokens' experts, and the sum
    assert rows * 0.9 <= few <= rows * 1.5
    logits = tokens * (128 - 8) * 4
    assert many - few <= 1.25 * logits + 256 * 128
    for experts, found in ((8, few), (128, many)):
        assert found <= step_bytes(config(experts), dtypes.float32, tokens, 1)


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


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """tinygrad.llm.model. The wheel of 0.14 lacks tinygrad/llm/kernels: kernels for AMD GPUs, and Linear."""
    package, kernels = ModuleType("tinygrad.llm.kernels"), ModuleType("tinygrad.llm.kernels.amd")
    package.__path__ = []
    vars(kernels).update(Linear=nn.Linear, amd_custom_kernels_supported=lambda device: False,
                         gated_delta_prefill=None, flash_attention=None)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.delitem(sys.modules, "tinygrad.llm.model", raising=False)
    from tinygrad.llm import model
    with Context(DEV="CPU"): yield model
    sys.modules.pop("tinygrad.llm.model", None)


def sizes(llm: Any, gating: int, normalized: bool) -> Any:
    """As of a tiny Qwen3-MoE, or OLMoE without normalized weights."""
    return llm.TransformerConfig(
        num_blocks=1, dim=32, hidden_dim=48, n_heads=4, n_kv_heads=2, norm_eps=1e-5, vocab_size=64,
        head_dim=8, rope_theta=10000.0, rope_dim=8, v_head_dim=8, max_context=48, qk_norm=8, num_experts=6,
        num_experts_per_tok=2, norm_topk_prob=normalized, expert_gating_func=llm.ExpertGating(gating))


def filled(module: Any, seed: int) -> Any:
    """Random weights."""
    random = np.random.default_rng(seed)
    for each in nn.state.get_parameters(module):
        values = random.normal(size=each.shape) / (each.shape[-1]**.5 if each.ndim > 1 else 1)
        each.replace(Tensor(values.astype(np.float32)).realize())
    return module


@pytest.mark.slow
@pytest.mark.parametrize(("gating", "normalized"), [(1, True), (1, False), (2, True)])
def test_a_feed_forward_block(llm: Any, gating: int, normalized: bool):
    """Three grouped matmuls after one sort; within 1e-5 of the largest of tinygrad's."""
    block = filled(llm.FFNBlock(sizes(llm, gating, normalized)), 0)
    x = Tensor(np.random.default_rng(1).normal(size=(1, 5, 32)).astype(np.float32)).realize()
    names = [each.template for each in explain(block._feed_forward(x)).kernels]
    assert (names.count("grouped_gemm"), names.count("router")) == (3, 1)
    got = block._feed_forward(x).numpy()
    with disabled(): wanted = block._feed_forward(x).numpy()
    assert np.abs(got - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.slow
def test_the_same_tokens(llm: Any):
    """A prompt in two chunks of symbolic lengths, then 6 tokens from captured steps."""
    def generated() -> list[int]:
        tokens = filled(llm.Transformer(sizes(llm, 1, True)), 2).generate(list(range(1, 12)), chunk_size=8)
        return [next(tokens) for _ in range(6)]
    ours = generated()
    with disabled(): assert ours == generated()
