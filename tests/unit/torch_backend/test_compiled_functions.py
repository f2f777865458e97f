"""Functions under torch.compile(backend="tinygrad_nv"): mutations, views, layouts, dtypes, and operators that
torch computes. Each is held against torch itself, results and arguments, with strides."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tinygrad_nv.torch
from tinygrad_nv.torch import program


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NV_STRICT", "1")
    torch.manual_seed(5)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def copies(args: tuple[Any, ...]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in args]


def run(fn: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> tinygrad_nv.torch.Report:
    """Calls a function three times, compiled, and holds the second call against torch. Returns the third's
    report."""
    compiled = torch.compile(fn, backend="tinygrad_nv")
    compiled(*copies(args))
    theirs, ours = copies(args), copies(args)
    wanted, made = fn(*theirs), compiled(*ours)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (made, wanted)), strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return tinygrad_nv.torch.explain(compiled, *copies(args))


def mutated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    z = x * 2
    x.mul_(y)
    return z


def read_then_written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = (x * 2).sum(0)
    x.copy_(y)
    return z + x


def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    held = x.clone()
    x.copy_(y)
    y.copy_(held)
    return x - y


def written_through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.t()[1:3].mul_(2)
    return y.t() + 1


@pytest.mark.parametrize("fn", [mutated, read_then_written, swapped, written_through_a_view])
def test_arguments_are_overwritten_after_they_are_read(fn: Callable[..., Any]):
    assert run(fn, torch.randn(4, 8), torch.randn(4, 8)).whole


@pytest.mark.parametrize("fn", [
    lambda x: (x.t(), x[1:3], x.reshape(2, 16), x),                     # of an argument: nothing runs
    lambda x: ((x + 1).t(), (x + 1)[1:], (x * 2).reshape(8, 4)),        # of one result
    lambda x: (x.t().contiguous() * 2, x.permute(1, 0) + 1),            # torch keeps the order of dimensions
    lambda x: (x[:0] + 1, x.sum(), torch.arange(5), torch.ones(2, 3)),  # empty, a number, constants
], ids=["argument", "result", "order", "constant"])
def test_results_have_torchs_strides(fn: Callable[..., Any]):
    assert run(fn, torch.randn(4, 8)).whole


def test_memory_is_shared_with_torch():
    weight = torch.randn(8, 8)
    compiled = torch.compile(lambda x: x @ weight, backend="tinygrad_nv")
    x = torch.randn(2, 8)
    compiled(x)
    weight.mul_(2)
    torch.testing.assert_close(compiled(x), x @ weight)
    first, second = compiled(x), compiled(x + 1)
    assert first.data_ptr() != second.data_ptr(), "a result is not written over by the next call"
    torch.testing.assert_close(first, x @ weight)
    torch.testing.assert_close(second, (x + 1) @ weight)


def test_arguments_that_cannot_be_shared_are_copied():
    x = torch.randn(9)
    assert run(lambda x: x * 2, x[1:]).whole                            # not where vectors may begin
    compiled = torch.compile(lambda x: x.add_(1), backend="tinygrad_nv")
    for _ in range(2):
        wanted = x[1:] + 1
        compiled(x[1:])
        torch.testing.assert_close(x[1:], wanted)                       # and copied back
    wide = torch.arange(3.0).expand(4, 3)
    assert run(lambda x: x + 1, wide).whole


def test_tensors_of_one_layout_with_and_without_a_copy():
    """A column of pairs can be shared where it begins at the storage's first element, the next one cannot."""
    pairs = torch.randn(4, 6, 2)
    compiled = torch.compile(lambda x: x + 1, backend="tinygrad_nv")
    # a repeated dimension is stored once, in the copy too
    wide = torch.randn(8, 2).t()[:, :, None].expand(2, 8, 3)
    for x in (pairs[..., 1], pairs[..., 0], pairs[..., 1], wide[1:], wide[:1]):
        torch.testing.assert_close(compiled(x), x + 1)


@pytest.mark.parametrize(("fn", "args"), [
    (lambda i: (i // 2, i % 3, i / 2, -i, i * 1.5, i + True), (torch.arange(-5, 6),)),
    (lambda x, i: (x + i[:, None], (i > 1) + i, x * torch.tensor(2.0, dtype=torch.float64)),
     (torch.randn(3, 2), torch.arange(3))),
    # 0.1 in bfloat16 is more than in float32, which a number's dtype must not decide
    (lambda x, y: x > y, (torch.full((3,), 0.1, dtype=torch.bfloat16), torch.tensor(0.1))),
    (lambda x: x.double().exp().sum(-1), (torch.randn(4, 8),)),
    (lambda x: torch.softmax(x, -1) + torch.log_softmax(x, 0), (torch.randn(4, 8),)),
    (lambda x: (x.amax(0), x.argmax(1), x.var(1), (x > 0).all(1), x.max(1).values, x.cumsum(1)),
     (torch.randn(4, 8),)),
    (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x)), (torch.randn(4, 8),)),
    (lambda x, w: F.conv2d(x, w, padding=1, stride=2), (torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3))),
    (lambda x, i: (x[i - 4], x.index_put((i - 4,), x[:3]), x.index_add(0, i, x[:3])),
     (torch.randn(4, 8), torch.tensor([3, 0, 2]))),
    (lambda x: (x.masked_fill(x > 0, -1.0).tril(), torch.where(x > 0, x, 0.0), F.pad(x, (1, 2), value=3.0)),
     (torch.randn(4, 8),)),
    (lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
     (torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8))),
    (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), (torch.randn(1, 2, 5, 8),)),
    (lambda x, i: F.cross_entropy(x, i), (torch.randn(3, 8), torch.tensor([1, 0, 7]))),
    (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x <= y, x >= y, x.relu(), x.sign(), x % y,
                   F.elu(x), F.leaky_relu(x), F.hardtanh(x), x.clamp(min=y)),
     (torch.tensor([float("nan"), 1, -1, 0, 5]), torch.tensor([1, float("nan"), float("inf"), 2, -3]))),
    (lambda x: (x.norm(dim=1), x.logsumexp((0, 1)), 1 - x.sum(), x[:0].softmax(1)), (torch.randn(4, 8),)),
    (lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (3, 3)),
                F.batch_norm(x, torch.zeros(4), torch.ones(4)), F.group_norm(x, 2)),
     (torch.randn(2, 4, 6, 6),)),
], ids=["integers", "promotion", "comparison", "double", "softmax", "reductions", "activations",
        "convolution", "indices", "masks", "shared heads", "causal", "loss", "NaN", "norms", "images"])
def test_operators(fn: Callable[..., Any], args: tuple[Any, ...]):
    assert run(fn, *args, tolerance=2e-5).whole


@pytest.mark.parametrize("fn", [torch.log1p, torch.expm1, torch.tanh, torch.erf, torch.atan, F.softplus],
                         ids=["log1p", "expm1", "tanh", "erf", "atan", "softplus"])
def test_digits_near_zero(fn: Callable[..., Any]):
    x = torch.tensor([1e-30, -1e-9, 3e-5, -0.3, 0.1, 0.5])
    made = torch.compile(fn, backend="tinygrad_nv")(x)
    torch.testing.assert_close(made.double(), fn(x.double()), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_floats(dtype: torch.dtype):
    x, y = torch.randn(4, 8).to(dtype), torch.randn(8, 8).to(dtype)
    step = 2 * torch.finfo(dtype).eps
    assert run(lambda x, y: (F.layer_norm(x @ y, (8,)), F.silu(x)), x, y, tolerance=step).whole


# **** what torch computes ****

def test_operators_without_a_kernel_are_torchs(caplog: pytest.LogCaptureFixture):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x @ x.t() + 9 * torch.eye(4)) * 2 + x.sum()
    report = run(fn, torch.randn(4, 8))
    (graph,) = report.graphs
    assert not report.whole
    assert graph.programs
    assert any(name.startswith("aten.linalg_cholesky_ex.default") for name in graph.refused)
    assert "torch computes aten.linalg_cholesky_ex.default" in caplog.text
    assert "no function of tinygrad_nv computes it" in str(report)


def test_a_dtype_that_tinygrad_does_not_have_is_torchs():
    report = run(lambda x: torch.fft.fft(x * 2).abs() + 1, torch.randn(4, 8))
    assert "tinygrad has no torch.complex64" in report.graphs[0].refused.values()
    assert report.graphs[0].programs == 2


def test_random_numbers_are_torchs():
    def fn(x: torch.Tensor) -> torch.Tensor: return F.dropout(x * 2, 0.5) + 1
    compiled, x = torch.compile(fn, backend="tinygrad_nv"), torch.randn(64)
    torch.manual_seed(1)
    made = compiled(x)
    torch.manual_seed(1)
    torch.testing.assert_close(made, fn(x))


def test_a_graph_that_does_not_compile_is_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_STRICT", "0")
    def broken(*args: Any) -> None: raise ValueError("no such kernel")
    monkeypatch.setattr(program, "Captured", broken)
    report = run(swapped, torch.randn(4, 8), torch.randn(4, 8))
    assert report.graphs[0].reasons == ("no such kernel",)
    assert "torch, all of a program: no such kernel" in str(report)


def test_more_shapes_than_captures_are_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program, "LIMIT", 2)
    compiled = torch.compile(lambda x: x * 2 + 1, backend="tinygrad_nv", dynamic=True)
    for n in (3, 4, 5, 4): torch.testing.assert_close(compiled(x := torch.randn(n)), x * 2 + 1)
    (graph,) = tinygrad_nv.torch.explain(compiled, torch.randn(5)).graphs
    assert graph.captures == 2
    assert graph.reasons == ("more than 2 sets of shapes",)


def test_nothing_ran():
    assert "no graph of this backend ran" in str(tinygrad_nv.torch.explain(lambda: None))


# **** gradients ****

def test_gradients_of_gradients_are_refused_by_torch():
    x = torch.randn(3, requires_grad=True)
    made = torch.compile(lambda x: (x**3).sum(), backend="tinygrad_nv")(x)
    (grad,) = torch.autograd.grad(made, x, create_graph=True)
    torch.testing.assert_close(grad, 3 * x**2)
    with pytest.raises(RuntimeError, match="double backward"): grad.sum().backward()


def test_a_step_of_training():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.GELU(),
                                torch.nn.LayerNorm(8), torch.nn.Linear(8, 11))
    compiled = torch.compile(model, backend="tinygrad_nv")
    tokens, targets = torch.randint(11, (2, 5)), torch.randint(11, (10,))
    losses = []
    for called in (model, compiled):
        torch.manual_seed(2)
        for layer in model:
            if hasattr(layer, "reset_parameters"): layer.reset_parameters()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(called(tokens).reshape(10, 11), targets)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]), rtol=1e-5, atol=1e-5)
    assert losses[1][-1] < losses[1][0]


def test_gradients_of_pooling():
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    def pooled(x: torch.Tensor) -> torch.Tensor: return F.max_pool2d(x, 3, 2, 1) * F.avg_pool2d(x, 2)
    compiled = torch.compile(pooled, backend="tinygrad_nv")
    made = [torch.autograd.grad(fn(x).sum(), x)[0] for fn in (compiled, pooled)]
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)
    assert tinygrad_nv.torch.explain(compiled, x).whole


def test_the_backend_is_found_by_its_name():
    import tomllib
    from importlib import import_module
    from pathlib import Path
    assert "tinygrad_nv" in torch.compiler.list_backends()
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["tinygrad_nv"].partition(":")
    assert getattr(import_module(module), name) is tinygrad_nv.torch.backend


def test_calls_from_several_threads():
    from concurrent.futures import ThreadPoolExecutor
    compiled = torch.compile(lambda x: (x * 2).sum(-1) + x[..., 0], backend="tinygrad_nv")
    compiled(torch.zeros(64, 64))
    given = [torch.full((64, 64), float(i)) for i in range(64)]
    with ThreadPoolExecutor(8) as pool: made = list(pool.map(compiled, given))
    for i, each in enumerate(made): assert each.tolist() == [129.0 * i] * 64
