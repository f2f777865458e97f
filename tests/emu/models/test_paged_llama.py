"""DEV=EMU, checks on: LLaMA over pages, by kv_append and paged_attention, next to its contiguous cache.

The paged network shares the parameters of the other, and serves requests of different lengths in one step.
Its rotations are not rounded between multiplications, so logits agree as far as float16 does.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.graphs.pool_case import device
from tinygrad_nv import Tensor, TinyJit, Variable, dtypes, explain
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.patterns.kv_append.named import kv_append
from tinygrad_nv.runtime.device import NVDevice

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
