"""DEV=EMU: reductions, scans, sorts, matmuls, convolutions, and what networks make of them; gradients and
optimizer steps against PyTorch in float64. Integer-valued inputs have exact answers; others are within a
bound on |error| / (1 + |value|)."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.patterns.on_emu import emu, equal, floats, near, rng  # noqa: F401
from tinygrad_nv import Context, Tensor, TinyJit, dtypes, nn

AXES = (None, 0, 1, 2, (0, 2), (1, 2))
SHAPE = (5, 9, 6)


def whole(*shape: int) -> np.ndarray: return rng().integers(-8, 9, shape).astype(np.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_exact_reductions(axis: int | tuple[int, ...] | None):
    x = whole(*SHAPE)
    for dtype in (np.float32, np.int32, np.int8):
        t, a = Tensor(x.astype(dtype)), x.astype(dtype)
        equal(t.sum(axis, dtype=dtypes.int32) if dtype is np.int8 else t.sum(axis),
              a.sum(axis, dtype=np.int32 if dtype is np.int8 else None))
        equal(t.max(axis), a.max(axis))
        equal(t.min(axis), a.min(axis))
    equal(Tensor(x > 7).any(axis), (x > 7).any(axis))
    equal(Tensor(x > -8).all(axis), (x > -8).all(axis))
    equal(Tensor(np.sign(x + 0.5)).prod(axis), np.sign(x + 0.5).prod(axis))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_where_the_extremes_are(axis: int):
    x = whole(*SHAPE)  # with ties: the first counts
    equal(Tensor(x).argmax(axis), x.argmax(axis).astype(np.int32))
    equal(Tensor(x).argmin(axis), x.argmin(axis).astype(np.int32))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axis", AXES, ids=str)
def test_means_and_variances(axis: int | tuple[int, ...] | None):
    x = floats(*SHAPE)
    double = x.astype(np.float64)
    near(Tensor(x).mean(axis), double.mean(axis), 1e-6)
    near(Tensor(x).var(axis), double.var(axis, ddof=1), 2e-6)
    near(Tensor(x).std(axis), double.std(axis, ddof=1), 2e-6)
    if not isinstance(axis, tuple): near(Tensor(x).logsumexp(axis), np.log(np.exp(double).sum(axis)), 2e-6)


def test_a_reduction_of_several_kernels():
    x = whole(3, 40_000)
    equal(Tensor(x).sum(), x.sum())
    equal(Tensor(x).sum(1), x.sum(1))
    equal(Tensor(x).max(), x.max())


@pytest.mark.slow
def test_scans_and_sorts():
    x = whole(4, 21)
    equal(Tensor(x).cumsum(1), x.cumsum(1))
    equal(Tensor(x).cumsum(0), x.cumsum(0))
    equal(Tensor(np.sign(x + 0.5)).cumprod(1), np.sign(x + 0.5).cumprod(1))
    equal(Tensor(x).cummax(1)[0], np.maximum.accumulate(x, 1))
    equal(Tensor(x).sort(1)[0], np.sort(x, 1))
    order = Tensor(x).sort(1)[1].numpy()
    np.testing.assert_array_equal(np.take_along_axis(x, order, 1), np.sort(x, 1))
    values, where = Tensor(x).topk(5, 1)
    equal(values, -np.sort(-x, 1)[:, :5])
    np.testing.assert_array_equal(np.take_along_axis(x, where.numpy(), 1), values.numpy())


SHAPES = ((1, 1, 1), (3, 5, 7), (16, 8, 16), (33, 17, 65), (64, 64, 64), (1, 48, 96))
TYPES = (dtypes.float, dtypes.half, dtypes.bfloat16, dtypes.int32, dtypes.int8, dtypes.double)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrix_products_of_integers(shape: tuple[int, int, int], dtype):
    m, k, n = shape
    generator = rng()
    a, b = (generator.integers(-2, 3, s).astype(np.float32) for s in ((m, k), (k, n)))
    x, y = (Tensor(v).cast(dtype).contiguous().realize() for v in (a, b))
    np.testing.assert_array_equal(x.matmul(y, dtype=dtype).float().numpy(), a @ b)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "error"),
                         [(dtypes.float, 2e-6), (dtypes.half, 4e-3), (dtypes.bfloat16, 4e-2)],
                         ids=lambda d: getattr(d, "name", ""))
def test_matrix_products(dtype, error: float):
    a, b = floats(2, 3, 32, 40)[0], floats(3, 40, 24)
    x, y = (Tensor(v).cast(dtype).contiguous().realize() for v in (a, b))
    double = x.float().numpy().astype(np.float64) @ y.float().numpy().astype(np.float64)
    near(x @ y, double, error)
    near(x.float() @ y.float(), double, 5e-6)
    near((x.transpose(1, 2).contiguous().transpose(1, 2) @ y), double, error)


def test_a_half_product_runs_on_tensor_cores(monkeypatch: pytest.MonkeyPatch):
    """Of tinygrad's own lowering."""
    monkeypatch.setenv("NV_GEMM", "0")
    from tinygrad_nv import Device
    x = Tensor(floats(64, 64)).half().contiguous().realize()
    seen: list[str] = []
    device = Device["EMU"]
    load = device.driver.load
    device.driver.load = lambda image: seen.append(image.decode()) or load(image)
    try:
        with Context(CCACHE=0): near((x @ x.T + 1).float(), x.float().numpy() @ x.float().numpy().T + 1, 4e-3)
    finally: device.driver.load = load
    assert any("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in text for text in seen)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 2, "padding": 2}, {"dilation": 2},
                                     {"groups": 2, "padding": 1}], ids=str)
def test_convolutions(options: dict[str, int]):
    groups = options.get("groups", 1)
    x, w, b = whole(2, 4, 9, 8), whole(6, 4 // groups, 3, 3), whole(6)
    wanted = torch.conv2d(*map(torch.tensor, (x, w, b)), **options)
    equal(Tensor(x).conv2d(Tensor(w), Tensor(b), **options), wanted.numpy())


def test_other_convolutions_and_pools():
    x, w = whole(2, 4, 8, 8), whole(4, 3, 3, 3)
    wanted = torch.conv_transpose2d(torch.tensor(x), torch.tensor(w), stride=2)
    equal(Tensor(x).conv_transpose2d(Tensor(w), stride=2), wanted.numpy())
    equal(Tensor(x[0]).unsqueeze(0).max_pool2d(2), torch.max_pool2d(torch.tensor(x[:1]), 2).numpy())
    near(Tensor(x).avg_pool2d(2), torch.nn.functional.avg_pool2d(torch.tensor(x).double(), 2).numpy(), 1e-6)
    line, kernel = whole(2, 3, 20), whole(5, 3, 4)
    equal(Tensor(line).conv2d(Tensor(kernel)), torch.conv1d(torch.tensor(line), torch.tensor(kernel)).numpy())


NETWORK: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: x.softmax(-1), lambda x: x.softmax(-1)),
    "log_softmax": (lambda x: x.log_softmax(1), lambda x: x.log_softmax(1)),
    "layernorm": (lambda x: x.layernorm(), lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])),
    "rms": (lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
            lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()),
    "einsum": (lambda x: Tensor.einsum("abc,dbc->ad", x, x), lambda x: torch.einsum("abc,dbc->ad", x, x)),
}


@pytest.mark.parametrize("name", NETWORK)
def test_parts_of_networks(name: str):
    ours, theirs = NETWORK[name]
    x = floats(*SHAPE)
    near(ours(Tensor(x)), theirs(torch.tensor(x).double()).numpy(), 5e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "error"),
                         [(dtypes.float, 2e-6), (dtypes.half, 4e-3), (dtypes.bfloat16, 3e-2)],
                         ids=lambda d: getattr(d, "name", ""))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_attention(causal: bool, dtype, error: float):
    q, k, v = (torch.tensor(x) for x in floats(3, 1, 4, 17, 8))
    k, v = k[:, :2], v[:, :2]
    x, y, z = (Tensor(t.contiguous().numpy()).cast(dtype).realize() for t in (q, k, v))
    found = x.scaled_dot_product_attention(y, z, is_causal=causal, enable_gqa=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(),
                                                              is_causal=causal, enable_gqa=True)
    near(found, wanted.numpy(), error)


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
