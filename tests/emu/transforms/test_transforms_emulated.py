"""Transforms on the emulated GPU: a batch is one kernel with the bits of a loop, and captures replay."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv import explain
from tinygrad_nv.functional import scaled_dot_product_attention
from tinygrad_nv.transforms import grad, jit, vmap

RNG = np.random.default_rng(0)

def heads() -> Tensor:
    """Of two examples, bf16."""
    x = Tensor(RNG.standard_normal((2, 1, 2, 16, 64)).astype(np.float32))
    return x.cast(dtypes.bfloat16).to("EMU").realize()


Q, K, V = heads(), heads(), heads()


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor: return (attended(q, k, v).float() ** 2).sum()


def test_a_batch_of_attentions():
    out = vmap(attended)(Q, K, V)
    assert [one.template for one in explain(out).kernels] == ["flash_wgmma"]
    want = np.stack([attended(Q[i], K[i], V[i]).float().numpy() for i in range(2)])
    np.testing.assert_array_equal(out.float().numpy(), want)


def test_gradients_of_each_example_under_jit():
    step = jit(vmap(grad(loss)))
    want = np.stack([grad(loss)(Q[i], K[i], V[i]).float().numpy() for i in range(2)])
    for _ in range(3): np.testing.assert_array_equal(step(Q, K, V).float().numpy(), want)
