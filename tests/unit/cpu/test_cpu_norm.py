"""Rows on the CPU: norms, softmax and argmax by every instruction set against float64, found in graphs."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, Variable, dtypes, nn

from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.programs import CPUProgramSchedule
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.expression import Apply, Constant, Load, Position, Sum
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.templates import TABLE

F32, S32 = dtypes.float32, dtypes.int32
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
EPS = 1e-5
pytestmark = pytest.mark.usefixtures("cpu_device")


def rms(m: int, n: int, pitch: int) -> NormSpec:
    """x / √(mean x² + eps) · w, of rows `pitch` apart."""
    x, w = Load(0, F32, pitch, 1), Load(1, F32, 0, 1)
    scale = Apply("sqrt", (Sum() * (1 / n) + EPS,), F32).reciprocal()
    return NormSpec(m, n, (Statistic("add", x * x),), (Computed(Result(F32, n, 1), x * scale * w),))


def softmax(m: int, n: int, pitch: int) -> NormSpec:
    x = Load(0, F32, pitch, 1)
    e = ((x - Sum()) * 1.4426950408889634).exp2()
    return NormSpec(m, n, (Statistic("max", x), Statistic("add", e)),
                    (Computed(Result(F32, n, 1), e * Sum(part=1).reciprocal()),))


def argmax(m: int, n: int, pitch: int) -> NormSpec:
    x = Load(0, F32, pitch, 1)
    differs = Apply("not_equal", (x, Sum()), dtypes.bool)
    at = Apply("where", (differs, Constant(0, S32), Position("n") * -1 + n), S32)
    return NormSpec(m, n, (Statistic("max", x), Statistic("max", at)),
                    (Computed(Result(S32, 1, 0), Sum(S32, 1) * -1 + n),))


def run(spec: NormSpec, level: isa.ISA, outs: list[np.ndarray], *given: np.ndarray | int) -> list[np.ndarray]:
    """The results of a spec, the same bits by 1 to 3 parts in any order."""
    made, target = [], replace(host(), isa=level)
    chosen = TABLE.choose(spec, target)
    assert isinstance(chosen, CPUProgramSchedule)
    for parts, order in ((1, None), (2, (1, 0)), (3, (2, 0, 1))):
        fresh = [np.full_like(out, 77) for out in outs]
        load(TABLE.build(spec, replace(chosen, parts=parts), target))(*fresh, *given, order=order)
        made.append(fresh)
    for other in made[1:]:
        for a, b in zip(made[0], other, strict=True): np.testing.assert_array_equal(a, b)
    return made[0]


def rows(m: int, n: int, seed: int = 0) -> np.ndarray:
    """Rows with NaN beyond their ends."""
    x = np.full((m, n + 3), np.nan, np.float32)
    x[:, :n] = np.random.default_rng(seed).standard_normal((m, n)).astype(np.float32)
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("n", [5, 131])
def test_rms_and_softmax_are_as_exact_as_float32(level: isa.ISA, n: int):
    x, w = rows(7, n), rows(1, n, 1)[0, :n].copy()
    exact = x[:, :n].astype(np.float64)
    plain = x[:, :n] / np.sqrt((x[:, :n] ** 2).mean(-1, keepdims=True) + np.float32(EPS)) * w
    wanted = exact / np.sqrt((exact ** 2).mean(-1, keepdims=True) + EPS) * w
    got, = run(rms(7, n, n + 3), level, [plain], x, w)
    assert np.abs(got - wanted).max() <= 2 * np.abs(plain - wanted).max() + 1e-7
    wanted = torch.tensor(exact).softmax(-1).numpy()
    plain = torch.tensor(x[:, :n]).softmax(-1).numpy()
    got, = run(softmax(7, n, n + 3), level, [plain], x)
    assert np.abs(got - wanted).max() <= 2 * np.abs(plain - wanted).max() + 2e-8


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_argmax_is_the_first_of_the_largest_and_no_nan(level: isa.ISA):
    n = 70
    x = rows(6, n)
    x[0, [3, 40, 69]] = 9.0
    x[1, 69] = np.inf
    x[2, 5] = np.nan
    x[3, :n] = np.nan
    x[4, :n] = -np.inf
    got, = run(argmax(6, n, n + 3), level, [np.zeros(6, np.int32)], x)
    assert list(got) == [3, 69, np.nanargmax(x[2, :n]), n, 0, x[5, :n].argmax()]


def test_whole_numbers_are_exact_and_rows_may_be_fewer():
    n, most = 50, 9
    x = np.random.default_rng(0).integers(-9, 9, (2, most, n)).astype(np.float32)
    each, batch = Load(0, F32, n, 1, (most * n,)), (most * n,)
    spec = NormSpec(most, n, (Statistic("add", each),), (Computed(Result(F32, n, 1, batch), each + Sum()),),
                    (2,), True)
    for m in (1, 4, most):
        got, = run(spec, LEVELS[-1], [np.zeros((2, most, n), np.float32)], x, m)
        np.testing.assert_array_equal(got[:, :m], (x + x.sum(-1, keepdims=True))[:, :m])
        assert (got[:, m:] == 77).all()


def test_which_rows_have_a_kernel():
    """A vocabulary has; a batch that is more programs than a grid's axis has stays tinygrad's."""
    assert TABLE.choose(softmax(2, 151936, 151936), host()) is not None
    each = Load(0, F32, 8, 1, (32,))
    result = Computed(Result(F32, 8, 1, (32,)), each + Sum())
    spec = NormSpec(4, 8, (Statistic("add", each),), (result,), (70000,))
    assert TABLE.choose(spec, host()) is None


def test_rows_of_a_program_on_a_cpu():
    target = replace(host(), threads=2)
    chosen = [TABLE.choose(rms(m, n, n), target) for m, n in ((64, 128), (9, 128), (1, 128), (64, 8192))]
    assert [getattr(each, "rows", None) for each in chosen] == [8, 2, 1, 1]


def test_specs_that_cannot_be_are_refused():
    x = Load(0, F32, 4, 1)
    out = Computed(Result(F32, 4, 1), x)
    for fails in (lambda: NormSpec(0, 4, (), (out,)), lambda: NormSpec(2, 4, (), ()),
                  lambda: NormSpec(2, 4, (Statistic("add", Sum()),), (out,)),
                  lambda: Statistic("add", x.cast(dtypes.bfloat16)),
                  lambda: NormSpec(2, 4, (), (Computed(Result(S32, 4, 1), x),))):
        with pytest.raises(SpecError): fails()


# **** in graphs ****

X = np.random.default_rng(3).standard_normal((3, 5, 64)).astype(np.float32)


def llama(x: Tensor, w: Tensor) -> Tensor:
    f = x.float()
    f = f * (f.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return f.cast(x.dtype) * w


def gemma(x: Tensor, w: Tensor) -> Tensor:
    f = x.float()
    f = f * (f.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (f * (w.float() + 1)).cast(x.dtype)


def with_weights(module: Any, w: Tensor) -> Any:
    for name in nn.state.get_state_dict(module): setattr(module, name, w)
    return module


def of(x: np.ndarray, dtype: Any = F32) -> Tensor: return Tensor(x).cast(dtype).contiguous().realize()


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "RMSNorm": lambda x, w: with_weights(nn.RMSNorm(64), w)(x),
    "LayerNorm": lambda x, w: with_weights(nn.LayerNorm(64), w)(x),
    "LayerNorm of two": lambda x, w: nn.LayerNorm((5, 64), elementwise_affine=False)(x),
    "llama": llama, "gemma": gemma, "residual": lambda x, w: llama(x + x[0], w),
    "view": lambda x, w: llama(x[:, 1:4], w), "heads": lambda x, w: llama(x.transpose(0, 1), w),
    "softmax": lambda x, w: x.softmax(-1), "logsumexp": lambda x, w: x.float().logsumexp(-1),
    "argmax": lambda x, w: x.argmax(-1), "argmax of all": lambda x, w: x.argmax()}


IN_BFLOAT16 = ("llama", "gemma", "softmax", "LayerNorm")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dtype"), [*((name, F32) for name in CASES),
                                             *((name, dtypes.bfloat16) for name in IN_BFLOAT16)])
def test_rows_in_a_graph_are_one_kernel_that_gives_what_tinygrad_gives(name: str, dtype: Any):
    x, w = of(X, dtype), of(X[0, 0], dtype)
    made = [k.template for k in explain(CASES[name](x, w)).kernels]
    ours = CASES[name](x, w).float().numpy()
    with disabled(): theirs = CASES[name](x, w).float().numpy()
    assert made == ["norm"]
    # a rounding of bfloat16 may fall the other way where float32 sums differ in the last bit; that of a mean
    # is as large as what is left of an element that is nearly the mean
    atol = 0.07 if dtype != F32 and name == "LayerNorm" else 1e-6
    np.testing.assert_allclose(ours, theirs, rtol=1e-2 if dtype != F32 else 2e-6, atol=atol)


def test_positions_may_begin_anywhere():
    """Of a slice of positions with steps, and of positions that fall."""
    x = np.random.default_rng(1).normal(size=(6, 64)).astype(np.float32)
    for places, wanted in ((Tensor.arange(0, 195, 3)[1:], np.arange(3, 195, 3)),
                           (Tensor.arange(64).flip(0) * 2, np.arange(126, -2, -2))):
        made = (Tensor(x) * (places * 0.01)).softmax(-1)
        assert "norm" in {kernel.template for kernel in explain(made).kernels}
        right = torch.tensor(x.astype(np.float64) * wanted * 0.01).softmax(-1)
        np.testing.assert_allclose(made.numpy(), right, rtol=1e-5)


def test_symbolic_rows_are_found():
    x, w = of(X[0]), of(X[0, 0])
    for rows in (1, 3):
        length = Variable("length", 1, 5).bind(rows)
        part = llama(x[:length], w)
        assert any(k.template == "norm" for k in explain(part).kernels)
        wanted = llama(x, w).numpy()[:rows]
        np.testing.assert_array_equal(llama(x[:length], w).contiguous()[:rows].numpy()[:rows], wanted)


def templates(*y: Tensor) -> list[str | None]: return [k.template for k in explain(*y).kernels]


def test_what_is_not_along_a_row_stays_tinygrads(monkeypatch: pytest.MonkeyPatch):
    x = of(X)
    for y in (x.softmax(1), x.sum(-1), x.max(-1), x * 2):
        assert "norm" not in templates(y)
    assert "norm" in templates(x.softmax(-1))
    monkeypatch.setenv("NV_NORM", "0")
    assert "norm" not in templates(x.softmax(-1))


def test_sums_of_what_is_not_in_memory_stay_one_kernel_of_tinygrads():
    """Our template would have the padded values written first: three kernels instead of one."""
    x = Tensor(np.arange(12, dtype=np.float32).reshape(4, 3)).realize()
    above, below = x.pad(((1, 1), (0, 0))), x.pad(((0, 2), (0, 0)))
    both = above.sum(1) + below.sum(1)
    assert templates(both) == [None]
    np.testing.assert_array_equal(both.numpy(), [3, 15, 33, 51, 30, 0])
    assert templates(x.sum(1) + x.max(1)) == ["norm"]


def test_what_is_stored_between_is_read_from_there():
    """A sum that others use too is computed once, and a norm of it reads it."""
    x, w = of(X[0]), of(X[0, 0])
    h = (x + x * 2).contiguous()
    lowering = explain(llama(h, w), h)
    assert sorted(k.template or "-" for k in lowering.kernels) == ["-", "norm"]
    np.testing.assert_allclose(llama(h, w).numpy(), llama(of(X[0] * 3), w).numpy(), rtol=2e-6)


# **** elements ****

def gated(x: Tensor, act: Callable[[Tensor], Tensor] = Tensor.silu) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (act(gate) * up).contiguous()


WIDE = np.random.default_rng(5).standard_normal((6, 2 * 70)).astype(np.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("act", [Tensor.silu, Tensor.gelu, lambda x: 0.5 * x * (1 + (x * 0.5 ** 0.5).erf())])
def test_silu_mul_standing_alone_is_one_kernel(dtype: Any, act: Callable[[Tensor], Tensor]):
    x = of(WIDE, dtype)
    assert templates(gated(x, act)) == ["elements"]
    ours = gated(x, act).float().numpy()
    with disabled(): theirs = gated(x, act).float().numpy()
    # of bfloat16 each step is rounded, where 2^x differs in the last bit perhaps to another side; 1 + tanh of
    # large negative numbers is all rounding
    rtol, atol = (4e-6, 1e-6) if dtype == F32 else (3e-2, 8e-3)
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def test_gradients_of_a_gate_are_elements():
    gate, up = (of(WIDE[:, i:i + 70]) for i in (0, 70))
    made = (gate.contiguous_backward().silu() * up.contiguous_backward()).gradient(
        gate, up, gradient=of(WIDE[:, :70]))
    assert templates(*made) == ["elements"] * 2
    ours = [each.numpy() for each in made]
    g, u = (torch.tensor(each.numpy(), requires_grad=True) for each in (gate, up))
    (torch.nn.functional.silu(g) * u).backward(torch.tensor(WIDE[:, :70].copy()))
    for a, b in zip(ours, (g, u), strict=True): np.testing.assert_allclose(a, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("act", [Tensor.log_softmax, Tensor.softplus, Tensor.elu, Tensor.logsigmoid])
@pytest.mark.parametrize("dtype", [F32, dtypes.bfloat16], ids=str)
def test_whole_numbers_among_floats_are_floats(dtype: Any, act: Callable[[Tensor], Tensor]):
    """The gradient of a sum is a tensor of ones, which has neither a device nor storage."""
    x = of(WIDE[:, :70], dtype)
    (made,) = act(x).sum().gradient(x)
    assert {"norm", "elements"}.intersection(templates(made.contiguous()))
    wide = torch.tensor(x.float().numpy(), requires_grad=True)
    functional: Any = torch.nn.functional
    {Tensor.log_softmax: lambda x: x.log_softmax(-1), Tensor.softplus: functional.softplus,
     Tensor.elu: functional.elu, Tensor.logsigmoid: functional.logsigmoid}[act](wide).sum().backward()
    np.testing.assert_allclose(made.float().numpy(), wide.grad, rtol=2e-6 if dtype == F32 else 3e-2,
                               atol=2e-6 if dtype == F32 else 2e-2)


def test_elements_that_stay_where_they_were(monkeypatch: pytest.MonkeyPatch):
    """Without exponentials, of short rows, with a reduction along something else, and a product's own."""
    x, w = of(WIDE), of(np.zeros((140, 140), np.float32))
    for y in ((x * 2 + 1).contiguous(), x[:, :40].silu().contiguous(), (x.silu() * x.sum(0)).contiguous()):
        assert "elements" not in templates(y)
    assert "elements" not in templates(gated(x @ w))
    assert "elements" not in templates((x + (x @ w)).softmax(-1))
    assert templates(gated(x)) == ["elements"]
    monkeypatch.setenv("NV_NORM", "0")
    assert "elements" not in templates(gated(x))
