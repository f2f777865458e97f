"""DEV=EMU: gradients and optimizer steps against PyTorch in float64.

Bounds are |error| / (1 + |value|); some hundred float32 operations stand between input and gradient.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.patterns.on_emu import emu, floats, near, rng  # noqa: F401
from tinygrad_nv import Context, Tensor, TinyJit, dtypes, nn

LABELS = np.array([0, 3, 1, 2, 3])
F = torch.nn.functional
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: (x.softmax() * x).sum(), lambda x: (x.softmax(-1) * x).sum()),
    "layernorm": (lambda x: (x.layernorm() * x.sin()).sum(),
                  lambda x: (F.layer_norm(x, (4,)) * x.sin()).sum()),
    "cross entropy": (lambda x: x.sparse_categorical_crossentropy(Tensor(LABELS)),
                      lambda x: F.cross_entropy(x, torch.tensor(LABELS))),
    "gelu": (lambda x: x.gelu().square().mean(), lambda x: F.gelu(x, approximate="tanh").square().mean()),
    "matmul": (lambda x: (x @ x.T).tanh().sum(), lambda x: (x @ x.T).tanh().sum()),
    "max": (lambda x: (x.max(1) * x.sum(1)).sum(), lambda x: (x.max(1).values * x.sum(1)).sum()),
    "movement": (lambda x: x.pad(((1, 0), (0, 2))).flip(0)[1:4].cumsum(1).square().sum(),
                 lambda x: F.pad(x, (0, 2, 1, 0)).flip(0)[1:4].cumsum(1).square().sum()),
    "gather": (lambda x: x[Tensor(LABELS)].square().sum(), lambda x: x[torch.tensor(LABELS)].square().sum()),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str):
    ours, theirs = LOSSES[name]
    x, y = Tensor(floats(5, 4)), torch.tensor(floats(5, 4)).double().requires_grad_()
    near(ours(x).gradient(x)[0],
         torch.autograd.grad(theirs(y), y)[0].numpy(), 2e-5)


@pytest.mark.slow
def test_gradients_of_a_convolution():
    x, w = floats(2, 3, 6, 6), floats(4, 3, 3, 3)
    a, b = Tensor(x), Tensor(w)
    c, d = (torch.tensor(t).double().requires_grad_() for t in (x, w))
    wanted = torch.autograd.grad(torch.conv2d(c, d, padding=1).square().sum(), (c, d))
    found = a.conv2d(b, padding=1).square().sum().gradient(a, b)
    for one, other in zip(found, wanted, strict=True): near(one, other.numpy(), 1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "error"),
                         [(dtypes.float, 1e-5), (dtypes.half, 1e-2), (dtypes.bfloat16, 8e-2)],
                         ids=lambda d: getattr(d, "name", ""))
def test_gradients_of_attention(dtype, error: float):
    given = floats(3, 1, 2, 12, 8)
    ours = [Tensor(t).cast(dtype).contiguous().realize() for t in given]
    theirs = [torch.tensor(t).double().requires_grad_() for t in given]
    loss = ours[0].scaled_dot_product_attention(*ours[1:], is_causal=True).float().square().sum()
    reference = F.scaled_dot_product_attention(*theirs, is_causal=True).square().sum()
    for found, wanted in zip(loss.gradient(*ours), torch.autograd.grad(reference, theirs), strict=True):
        near(found, wanted.numpy(), error)


OPTIMIZERS: dict[str, tuple[Callable[[list[Tensor]], nn.optim.Optimizer],
                            Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (lambda p: nn.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "adam": (lambda p: nn.optim.Adam(p, lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adamw": (lambda p: nn.optim.AdamW(p, lr=0.05), lambda p: torch.optim.AdamW(p, lr=0.05)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_network_learns_as_in_pytorch(name: str, jit: bool):
    """Five steps of two layers, gelu, layer norm and cross entropy. Adam divides small numbers by their own
    size, which costs digits: 1e-4."""
    generator = rng()
    weights = [generator.standard_normal(s).astype(np.float32) * 0.3 for s in ((6, 10), (10, 4))]
    inputs = generator.standard_normal((5, 5, 6)).astype(np.float32)
    ours = [Tensor(w).contiguous().realize() for w in weights]
    theirs = [torch.tensor(w).double().requires_grad_() for w in weights]
    make, make_theirs = OPTIMIZERS[name]
    optimizer, reference = make(ours), make_theirs(theirs)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = ((x @ ours[0]).gelu() @ ours[1]).layernorm()
        loss = out.sparse_categorical_crossentropy(Tensor(LABELS)).backward()
        return loss.realize(*optimizer.schedule_step())

    run = TinyJit(step) if jit else step
    for x in inputs:
        with Context(TRAINING=1): loss = run(Tensor(x).realize()).item()
        reference.zero_grad()
        out = F.layer_norm(F.gelu(torch.tensor(x).double() @ theirs[0], approximate="tanh") @ theirs[1], (4,))
        wanted = F.cross_entropy(out, torch.tensor(LABELS))
        wanted.backward()
        reference.step()
        assert abs(loss - wanted.item()) < 1e-4
    for found, one in zip(ours, theirs, strict=True): near(found, one.detach().numpy(), 1e-4)
