"""Batched functions: the same numbers as a loop, in one graph, through kernels, and in other transforms.
Examples over devices of one process, and over ranks (pmap_program.py)."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tests.support import SUPPORT
from tests.support.transforms.transform_case import RNG, close, random
from tinygrad_nv import explain
from tinygrad_nv.dist.mesh import mesh
from tinygrad_nv.errors import TransformError
from tinygrad_nv.functional import (
    document_attention,
    embedding,
    gate_up,
    rotate_heads,
    scaled_dot_product_attention,
)
from tinygrad_nv.transforms import grad, jvp, pmap, vjp, vmap

N = 3



X, W = random(N, 4, 6), random(6, 5)

# of one example [4, 6]: every kind of node
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elements": lambda x: (x.sin() + 1) * x.relu(),
    "broadcast": lambda x: x.sum(0) + x * W[:, 0],
    "scalar": lambda x: x.sum(),
    "matmul": lambda x: x @ W,
    "left": lambda x: W.T[:, :4] @ x,
    "both": lambda x: x @ x.T,
    "einsum": lambda x: Tensor.einsum("ab,bc->ca", x, W),
    "reshape": lambda x: x.reshape(2, 12).permute(1, 0),
    "pad": lambda x: x.pad(((1, 2), (0, 1))),
    "flip": lambda x: x.flip(1),
    "slices": lambda x: x[1:3, ::2],
    "stack": lambda x: Tensor.stack(x, W[:4, :1].expand(4, 6), dim=1),
    "cat": lambda x: x.cat(W.T[:, :6], dim=0),
    "expand": lambda x: x[0].expand(3, 6),
    "repeat": lambda x: x.repeat(2, 2),
    "max": lambda x: x.max(0),
    "prod": lambda x: x.prod(1),
    "argmax": lambda x: x.argmax(1),
    "softmax": lambda x: x.softmax(0),
    "norm": lambda x: x.layernorm(),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1)[0],
    "where": lambda x: (x > 0).where(x, 2),
    "gather": lambda x: x.gather(1, (x[:, :2] > 0).cast(dtypes.int)),
    "rows": lambda x: W[(x[:, 0] > 0).cast(dtypes.int)],
    "conv": lambda x: x.reshape(1, 1, 4, 6).conv2d(W[:3, :3].reshape(1, 1, 3, 3)),
    "pool": lambda x: x.reshape(1, 1, 4, 6).max_pool2d(),
    "cast": lambda x: x.half().bitcast(dtypes.uint16),
    "constant": lambda x: Tensor(3.0),
    "outside": lambda x: W * 2,
    "contiguous": lambda x: (x * 2).contiguous().detach() + x,
    "tril": lambda x: x.tril(),
    "one hot": lambda x: x[:, 0].cast(dtypes.int).one_hot(4),
    "identity": lambda x: x,
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_is_a_loop(name: str):
    fn = FUNCTIONS[name]
    out = vmap(fn)(X)
    want = np.stack([fn(X[i]).numpy() for i in range(N)])
    assert out.dtype == fn(X[0]).dtype or name == "constant"
    close(out, want)


def test_axes_and_trees():
    def fn(p: dict[str, Tensor], x: Tensor, k: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x @ p["w"] + p["b"], {"k": k * 2, "b": p["b"] * 1}
    w, b = random(6, N, 5), random(5)
    mapped = vmap(fn, ({"w": 1, "b": None}, 0, None), (1, {"k": None, "b": 0}))
    y, more = mapped({"w": w, "b": b}, X, Tensor(2.0))
    assert y.shape == (4, N, 5)
    close(y.numpy()[:, 1], (X[1] @ w[:, 1] + b))
    assert (more["k"].item(), more["b"].shape) == (4.0, (N, 5))
    assert vmap(lambda x, y: x * y, (-1, 0), -1)(random(2, N), random(N)).shape == (2, N)
    assert vmap(lambda *, x: x.sum())(x=X).shape == (N,)


def test_batches_of_batches():
    x, y = random(N, 6), random(5, 6)
    table = vmap(vmap(lambda a, b: (a * b).sum(), (None, 0)), (0, None))(x, y)
    close(table, (x @ y.T))


def test_there_is_no_loop():
    def nodes(n: int) -> int:
        return len(vmap(lambda x: (x @ W).softmax(-1).sum())(random(n, 4, 6)).uop.toposort())
    assert nodes(2) == nodes(50)


# **** with other transforms ****

def loss(w: Any, x: Any) -> Any: return ((x @ w).tanh() ** 2).sum()


def test_gradients_of_each_sample_are_torchs():
    tw, tx = torch.tensor(W.numpy()), torch.tensor(X.numpy())
    want = torch.func.vmap(torch.func.grad(loss), (None, 0))(tw, tx).numpy()
    close(vmap(grad(loss), (None, 0))(W, X), want, rtol=1e-4, atol=1e-5)
    # their sum is the gradient of the sum
    total = grad(lambda w: vmap(loss, (None, 0))(w, X).sum())(W).numpy()
    close(total, want.sum(0), rtol=1e-4, atol=1e-5)


def test_jvp_and_vjp_commute_with_vmap():
    v = random(*X.shape)
    one = vmap(lambda x, v: jvp(lambda x: x.softmax(-1), (x,), (v,))[1])(X, v).numpy()
    close(jvp(vmap(lambda x: x.softmax(-1)), (X,), (v,))[1], one)
    two = vmap(lambda x, v: vjp(lambda x: x.softmax(-1), x)[1](v)[0])(X, v).numpy()
    close(two, one, rtol=1e-4, atol=1e-6)      # its Jacobian is symmetric


# **** functions of ours ****

def kernels(*given: Tensor) -> list[str | None]:
    """The templates of what will run."""
    return [each.template for one in given for each in explain(one).kernels if each.template]


Q, K, V = (random(N, 2, 4, 16, 32) for _ in range(3))


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def test_matmuls_are_one_kernel():
    x, w = random(N, 64, 128), random(128, 96)
    assert kernels(vmap(lambda x: x @ w)(x)) == ["gemm"]
    each = vmap(grad(lambda w, x: ((x @ w) ** 2).sum()), (None, 0))(w, x)
    assert kernels(each) == ["gemm", "gemm"]        # x @ w of all rows, then one batched for the gradients
    close(each, 2 * x.transpose(1, 2) @ (x @ w), rtol=1e-4, atol=1e-3)      # of sums of 64 numbers around 100


def test_attention_is_one_kernel():
    out = vmap(attended)(Q, K, V)
    assert kernels(out) == ["flash"]
    want = np.stack([attended(Q[i], K[i], V[i]).numpy() for i in range(N)])
    np.testing.assert_array_equal(out.numpy(), want)


def test_gradients_of_attention_are_one_kernel():
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor: return (attended(q, k, v) ** 2).sum()
    found = vmap(grad(fn, (0, 1, 2)))(Q, K, V)
    assert sorted(set(kernels(*found))) == ["flash", "flash_backward"]
    want = grad(fn, (0, 1, 2))(Q[1], K[1], V[1])
    for own, other in zip(found, want, strict=True):
        close(own.numpy()[1], other)
    # the gradient of a batch, of which queries are the same for all
    q = grad(lambda q: (vmap(attended, (None, 0, 0))(q, K, V) ** 2).sum())(Q[0])
    want = sum(grad(fn)(Q[0], K[i], V[i]).numpy() for i in range(N))
    close(q, want, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(1, 1, 16, 16), (2, 1, 16, 16), (2, 4, 16, 16)])
@pytest.mark.parametrize("batched", [True, False])
def test_masks(shape: tuple[int, ...], batched: bool):
    mask = random(N, *shape) if batched else random(*shape)
    def fn(q: Tensor, k: Tensor, m: Tensor) -> Tensor: return scaled_dot_product_attention(q, k, k, m)
    out = vmap(fn, (0, None, 0 if batched else None))(Q, K[0], mask)
    want = np.stack([fn(Q[i], K[0], mask[i] if batched else mask).numpy() for i in range(N)])
    close(out, want)
    assert kernels(out) == kernels(fn(Q[0], K[0], mask[0] if batched else mask)) != []


@pytest.mark.slow
def test_sinks_of_each_example_and_documents():
    sinks = random(N, 4)
    def fn(q: Tensor, s: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, q, q, is_causal=True, sinks=s)
    want = np.stack([fn(Q[i], sinks[i]).numpy() for i in range(N)])
    close(vmap(fn)(Q, sinks), want)
    first = Tensor([[0] * 5 + [5] * 11, [0] * 16], dtype=dtypes.int32)
    end = Tensor([[5] * 5 + [16] * 11, [16] * 16], dtype=dtypes.int32)
    def packed(q: Tensor) -> Tensor: return document_attention(q, q, q, first, end)
    want = np.stack([packed(Q[i]).numpy() for i in range(N)])
    close(vmap(packed)(Q), want)


@pytest.mark.slow
def test_rows_rotations_and_gates():
    table, ids = random(9, 8), Tensor([[1, 2], [8, 0], [2, 2]])
    rows = vmap(embedding, (None, 0))(table, ids).numpy()
    np.testing.assert_array_equal(rows, embedding(table, ids).numpy())
    each = vmap(grad(lambda t, i: (embedding(t, i) ** 2).sum()), (None, 0))(table, ids).numpy()
    close(each[2], grad(lambda t: (embedding(t, ids[2]) ** 2).sum())(table), rtol=1e-6)
    qkv, cos, sin = random(N, 2, 5, 4 * 8), random(5, 4), random(5, 4)
    def turned(x: Tensor, c: Tensor, s: Tensor) -> list[Tensor]: return list(rotate_heads(x, c, s, 2, 1))
    found, want = vmap(turned, (0, None, None))(qkv, cos, sin), [turned(qkv[i], cos, sin) for i in range(N)]
    for i, own in enumerate(found):
        close(own, np.stack([one[i].numpy() for one in want]))
    def weight(x: Tensor) -> Tensor: return sum((each * each.sin()).sum() for each in turned(x, cos, sin))
    close(vmap(grad(weight))(qkv).numpy()[1], grad(weight)(qkv[1]), rtol=1e-4, atol=1e-5)
    def silu(x: Tensor) -> Tensor: return gate_up(x, "silu")
    out = vmap(silu)(X)
    assert kernels(out) == kernels(silu(X))
    close(out, silu(X), rtol=1e-6)


ROOT = Path(__file__).resolve().parents[3]
EXAMPLES, WEIGHTS = (RNG.integers(-4, 5, shape).astype(np.float32) for shape in ((4, 3), (3, 2)))
DEVICES = ("CPU:0", "CPU:1")


def layer(x: Tensor, w: Tensor) -> Tensor: return (x @ w).relu()


def test_devices_of_a_process():
    with mesh(DEVICES, axes={"dp": 2}):
        out = pmap(layer, (0, None))(Tensor(EXAMPLES), Tensor(WEIGHTS))
    assert set(out.device) == {"CPU", "CPU:1"}
    assert out.uop.axis == 0
    np.testing.assert_array_equal(out.numpy(), np.maximum(EXAMPLES @ WEIGHTS, 0))


def test_gradients_over_devices_and_of_each_example():
    over = mesh(DEVICES, axes={"dp": 2})
    x, w = Tensor(EXAMPLES), Tensor(WEIGHTS)
    found = grad(lambda w: pmap(layer, (0, None), mesh=over)(x, w).sum())(w)
    np.testing.assert_array_equal(found.numpy(), EXAMPLES.T @ (EXAMPLES @ WEIGHTS > 0))
    each = pmap(grad(lambda x, w: layer(x, w).sum(), 1), (0, None), mesh=over)(x, w)
    np.testing.assert_array_equal(each.numpy(), EXAMPLES[:, :, None] * (EXAMPLES @ WEIGHTS > 0)[:, None])


def test_trees_and_other_axes():
    over = mesh(DEVICES, axes={"dp": 2})
    out = pmap(lambda p: {"y": p["x"] * 2, "w": p["w"] + 1}, ({"x": 1, "w": None},), mesh=over)(
        {"x": Tensor(EXAMPLES.T.copy()), "w": Tensor([1.0])})
    np.testing.assert_array_equal(out["y"].numpy(), EXAMPLES * 2)
    assert out["w"].numpy().tolist() == [[2.0]] * 4


def test_examples_that_do_not_divide():
    with pytest.raises(TransformError, match="pmap of 3 examples over 2 devices"):
        pmap(layer, (0, None), mesh=mesh(DEVICES, axes={"dp": 2}))(Tensor(EXAMPLES[:3]), Tensor(WEIGHTS))


def test_ranks():
    program = SUPPORT / "transforms" / "pmap_program.py"
    command = ("-m", "tinygrad_nv", "launch", "-n", "2", sys.executable, str(program))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True,
                          check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2, done.stdout
