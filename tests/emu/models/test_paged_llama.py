"""DEV=EMU, checks on: LLaMA over pages, by kv_append and paged_attention, next to its contiguous cache; and
a training step, as near to float64 as that of the CPU."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.graphs.pool_case import device
from tinygrad_nv import Tensor, TinyJit, Variable, dtypes, explain
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.patterns.kv_append.named import kv_append
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec

SIZE, PAGES, VOCAB = 8, 4, 64  # tokens of a page, pages of a request
PROMPTS = ([3, 9, 27, 50, 11, 33, 2], [])
FOLLOWING = ([7, 60, 31, 12], [5, 40, 21, 33])


@pytest.fixture(scope="module", params=["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def gpu(request: pytest.FixtureRequest) -> NVDevice:
    """A device of each architecture."""
    return device(arch=request.param)


def network(name: str) -> Llama:
    """Two layers of random parameters, the second with a window; 4 query heads over 2 key heads."""
    config = ModelConfig("LlamaForCausalLM", VOCAB, 64, 96, 2, 4, 2, 16, SIZE * PAGES,
                         (RopeConfig("default", 10000.0, 16, SIZE * PAGES),) * 2, windows=(None, 6))
    made = Llama(config, dtypes.float16, name)
    random = np.random.default_rng(0)
    def fill(x: Tensor, scale: float, mean: float = 0.0) -> None:
        numbers = (random.standard_normal(x.shape) * scale + mean).astype(np.float16)
        x.assign(Tensor(numbers, device=name)).realize()
    for x in (made.embedding, made.head): fill(x, 1.0)
    fill(made.norm.weight, 0.1, 1.0)
    for block in made.blocks:
        attention, forward = block.attention, block.feed_forward
        for linear in (attention.qkv, attention.output, forward.gate_up, forward.down):
            fill(linear.weight, 0.15)
        for norm in (block.attention_norm, block.feed_forward_norm): fill(norm.weight, 0.1, 1.0)
    return made


class Paged:
    """The same network over pages."""

    def __init__(self, network: Llama, pages: int) -> None:
        self.network, config, name = network, network.config, network.device
        shape = (pages, SIZE, config.num_kv_heads, config.head_dim)
        self.pages = [tuple(Tensor.full(shape, float("nan"), dtype=dtypes.float16, device=name)
                            .contiguous().realize() for _ in range(2)) for _ in network.blocks]

    def __call__(self, tokens: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """Float32 logits [B, vocab] of the last of T new tokens [B, T] of each request."""
        net, c = self.network, self.network.config
        batch, rows = tokens.shape
        cos, sin = net.rope_tables[0]
        x = net.embedding[tokens]
        for block, (k_pages, v_pages) in zip(net.blocks, self.pages, strict=True):
            attention = block.attention
            heads = attention.qkv(block.attention_norm(x)).reshape(batch, rows, -1, c.head_dim)
            q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)
            *_, q = kv_append(k_pages, v_pages, k, v, table, lengths, cos=cos, sin=sin, q=q)
            out = paged_attention(q, k_pages, v_pages, table, lengths, window=attention.window)
            x = x + attention.output(out.reshape(batch, rows, -1))
            x = (x + block.feed_forward(block.feed_forward_norm(x))).contiguous()
        return (net.norm(x)[:, -1] @ net.head.T).float()


def tokens(rows: Any, net: Llama) -> Tensor:
    return Tensor(np.array(rows, np.int32), device=net.device).realize()


def contiguous(net: Llama, prompt: list[int], following: list[int]) -> np.ndarray:
    """Logits [steps, vocab] of what follows a prompt, with a cache of its own."""
    cache = DenseKVCache.create(net.config, SIZE * PAGES, dtypes.float16, device=net.device)
    if prompt: net.step(tokens([prompt], net), 0, cache, len(prompt) - 1).realize()
    at = Variable("start", 0, SIZE * PAGES - 1)
    return np.stack([net.step(tokens([[token]], net), at.bind(start), cache).numpy()[0]
                     for start, token in enumerate(following, len(prompt))])


def test_pages_and_a_contiguous_cache_agree(gpu: NVDevice):
    net = network(gpu.device)
    wanted = np.stack([contiguous(net, *each) for each in zip(PROMPTS, FOLLOWING, strict=True)], 1)
    paged = Paged(net, 2 * PAGES)
    tables = [[6, 1, 4, 0], [2, 7, 3, 5]]
    paged(tokens(PROMPTS[:1], net), tokens(tables[:1], net), tokens([len(PROMPTS[0])], net)).realize()
    table = tokens(tables, net)
    step = TinyJit(lambda new, lengths: paged(new, table, lengths).realize())  # both requests at once
    got = np.stack([step(tokens([[token] for token in new], net),
                         tokens([len(prompt) + i for prompt in PROMPTS], net)).numpy()
                    for i, new in enumerate(zip(*FOLLOWING, strict=True), 1)])
    np.testing.assert_allclose(got, wanted, atol=2**-8 * abs(wanted).max())
    gpu.synchronize()


def test_one_append_and_one_attention_for_each_layer(gpu: NVDevice):
    paged = Paged(network(gpu.device), 4)
    net = paged.network
    lowered = explain(paged(tokens([[3]], net), tokens([[0, 1, 2, 3]], net), tokens([7], net)))
    templates = [kernel.template for kernel in lowered.kernels]
    ours = [each for each in templates if each in ("kv_append", "decode", "combine")]
    assert ours == ["kv_append", "decode"] * 2


CONFIG = {"architectures": ["MistralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
          "vocab_size": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 10000.0,
          "sliding_window": 20, "tie_word_embeddings": False}


def trained(device: str, dtype: object) -> tuple[Llama, Tensor, list[Tensor]]:
    """A model of given weights, its loss, and the gradients of its first layer's attention."""
    model = Llama(parse_config(CONFIG), dtype, device)  # type: ignore[arg-type]
    random = np.random.default_rng(3)
    weights = [model.embedding, model.head, model.norm.weight]
    for block in model.blocks:
        weights += [block.attention.qkv.weight, block.attention.output.weight, block.attention_norm.weight,
                    block.feed_forward.gate_up.weight, block.feed_forward.down.weight,
                    block.feed_forward_norm.weight]
    for weight in weights:
        values = random.normal(1.0 if len(weight.shape) == 1 else 0.0, 0.15, weight.shape)
        weight.replace(Tensor(values.astype(np.float32)).to(device).cast(dtype).contiguous().realize())
    tokens = Tensor(random.integers(0, 32, (2, 41)).astype(np.int32), device=device)
    logits = model(tokens[:, :-1]).float()
    loss = logits.sparse_categorical_crossentropy(tokens[:, 1:])
    first = model.blocks[0].attention
    return model, loss, loss.gradient(first.qkv.weight, first.output.weight)


@pytest.fixture(scope="module")
def exact() -> list[np.ndarray]:
    _, loss, gradients = trained("CPU", dtypes.float32)
    return [each.numpy().astype(np.float64) for each in (loss, *gradients)]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_step(arch: str, exact: list[np.ndarray], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", arch)
    device = f"EMU:{ {'sm_80': 80, 'sm_90a': 90}[arch]}"
    _, loss, gradients = trained(device, dtypes.bfloat16)
    kernels = explain(loss, *gradients).kernels
    assert len(kernels) <= 62
    assert len(explain(loss).kernels) <= 27
    assert sum(isinstance(kernel.spec, AttentionSpec) for kernel in kernels) == 2
    assert sum(isinstance(kernel.spec, BackwardSpec) for kernel in kernels) == 2
    Tensor.realize(loss, *gradients)
    _, usual_loss, usual = trained("CPU", dtypes.bfloat16)
    for got, plain, want in zip((loss, *gradients), (usual_loss, *usual), exact, strict=True):
        found, by_plain = (each.float().numpy().astype(np.float64) for each in (got, plain))
        bound = 2 * np.abs(by_plain - want).max() + 2.0**-8 * np.abs(want)
        assert (np.abs(found - want) <= bound).all()


def test_kernels_of_a_step_on_a_cpu():
    _, loss, gradients = trained("CPU", dtypes.float32)
    kernels = explain(loss, *gradients).kernels
    assert len(kernels) <= 60
    assert len(explain(loss).kernels) <= 27
    assert sum(isinstance(kernel.spec, AttentionSpec) for kernel in kernels) == 2
    assert sum(isinstance(kernel.spec, BackwardSpec) for kernel in kernels) == 2
