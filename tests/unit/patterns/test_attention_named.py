"""Attention by name on a device without kernels: its bodies, against tinygrad's own and torch in float64.
scaled_dot_product_attention with sinks, forward and backward, against float64."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad.uop.ops import Ops

from tinygrad_nv import Context, Tensor, Variable, dtypes, explain, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import scaled_dot_product_attention
from tinygrad_nv.patterns.attention import named as attention_named
from tinygrad_nv.patterns.attention.functions import method
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.patterns.attention.operands import arrange_operands

Operands = tuple[Tensor, Tensor, Tensor]


def made(*, heads: int = 4, kv: int = 2, rows: int = 5, keys: int = 9, d: int = 8, seed: int = 0) -> Operands:
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(2, n, m, d)).astype(np.float32) for n, m in
               ((heads, rows), (kv, keys), (kv, keys)))
    return Tensor(q).realize(), Tensor(k).realize(), Tensor(v).realize()


def wide(x: Tensor) -> torch.Tensor: return torch.tensor(x.numpy()).double()


def close(got: Tensor, right: torch.Tensor, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(got.numpy(), right.detach().numpy(), rtol=tolerance, atol=tolerance)


def keys(y: Tensor) -> list[bytes]: return [call.src[0].key for call in y.schedule_linear().src]


# **** the body is tinygrad's own arithmetic ****

@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_are_those_of_the_library(causal: bool, dtype: dtypes):
    q, k, v = (x.cast(dtype).contiguous().realize() for x in made())
    with hooks.disabled():
        right = keys(q.scaled_dot_product_attention(k, v, is_causal=causal, enable_gqa=True))
        assert keys(attention_named.forward(FlashAttention(causal), q, k, v)[0]) == right
        assert keys(scaled_dot_product_attention(q, k, v, None, 0.0, causal, True)) == right


def test_a_device_without_kernels_gets_the_library_s_method(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    q, k, v = made(kv=4)
    y = q.scaled_dot_product_attention(k, v)
    assert not any(node.op is Ops.FUNCTION for node in y.uop.toposort())
    assert method(lambda *given: given, q, k, v) == (q, k, v, None, 0.0, False, False)


def test_symbolic_extents_are_the_library_s():
    q, k, v = made(kv=4)
    n = Variable("n", 1, 9).bind(7)
    assert arrange_operands(q, k[:, :, :n], v[:, :, :n], None) is None
    got = scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n])
    seen = wide(k)[:, :, :7], wide(v)[:, :, :7]
    close(got, torch.nn.functional.scaled_dot_product_attention(wide(q), *seen))


# **** what torch's does ****

@pytest.mark.parametrize("seed", range(4))
def test_scale_and_mask(seed: int):
    q, k, v = made(seed=seed)
    mask = Tensor(np.random.default_rng(seed).normal(size=(2, 1, 5, 9)).astype(np.float32))
    right = torch.nn.functional.scaled_dot_product_attention(*map(wide, (q, k, v, mask)), scale=0.2,
                                                             enable_gqa=True)
    close(scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True), right)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_windows(window: int, causal: bool):
    q, k, v = made(kv=4, rows=9)
    apart = torch.arange(9)[:, None] - torch.arange(9)[None, :]
    shown = (apart.abs() < window) & ((apart >= 0) if causal else True)
    right = torch.nn.functional.scaled_dot_product_attention(*map(wide, (q, k, v)), shown)
    close(scaled_dot_product_attention(q, k, v, is_causal=causal, window=window), right)


def test_soft_cap():
    q, k, v = made(kv=4)
    s = 2 * torch.tanh(wide(q) @ wide(k).transpose(-1, -2) / 8**0.5 / 2)
    close(scaled_dot_product_attention(q, k, v, softcap=2.0), torch.softmax(s, -1) @ wide(v))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("lead_q", "lead_k", "mask"), [
    ((), (), None), ((3,), (3,), None), ((3,), (), (9,)), ((), (3,), None), ((2, 3, 4), (3, 1), None),
    ((2, 3, 4), (2, 3, 4), (3, 1, 5, 9)), ((2, 3, 4), (4,), (2, 1, 4, 5, 1)), ((2, 4), (2, 4), (1, 1, 1, 9))])
def test_shapes_are_broadcast_as_torch_does(lead_q: tuple, lead_k: tuple, mask: tuple | None):
    random = np.random.default_rng(2)
    shapes = [(*lead_q, 5, 8), (*lead_k, 9, 8), (*lead_k, 9, 8)] + ([] if mask is None else [mask])
    given = [Tensor(random.normal(size=shape).astype(np.float32)) for shape in shapes]
    right = torch.nn.functional.scaled_dot_product_attention(*map(wide, given))
    got = scaled_dot_product_attention(*given)
    assert got.shape == right.shape
    close(got, right)
    assert arrange_operands(*given[:3], given[3] if mask else None) is not None


def test_a_mask_that_enlarges_the_result_is_the_library_s():
    q, k, v = (x[0] for x in made(kv=4))
    mask = Tensor.ones(3, 1, 5, 9)
    assert arrange_operands(q, k, v, mask) is None
    assert scaled_dot_product_attention(q, k, v, mask).shape == (3, 4, 5, 8)


def test_dropout_in_training():
    q, k, v = made(kv=4, keys=64)
    same = scaled_dot_product_attention(q, k, v)
    close(scaled_dot_product_attention(q, k, v, dropout_p=0.5), wide(same))
    with Context(TRAINING=1):
        Tensor.manual_seed(3)
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.5, scale=8**-0.5)
        Tensor.manual_seed(3)
        right = q.scaled_dot_product_attention(k, v, dropout_p=0.5)
        close(dropped, wide(right))
        assert np.abs(dropped.numpy() - same.numpy()).max() > 0.1


# **** gradients of the bodies ****

def gradients(what: FlashAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
              grad: np.ndarray) -> list[torch.Tensor]:
    """Of q, k, v and mask, in float64."""
    leaves = [wide(x).requires_grad_() for x in (q, k, v, mask) if x is not None]
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in leaves[1:3])
    s = leaves[0] @ wide_k.transpose(-1, -2) * (q.shape[-1]**-0.5 if what.scale is None else what.scale)
    if what.softcap: s = what.softcap * torch.tanh(s / what.softcap)
    if mask is not None: s = s + leaves[3]
    apart = torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])[None, :]
    if what.causal: s = torch.where(apart >= 0, s, -torch.inf)
    if what.window: s = torch.where(apart.abs() < what.window, s, -torch.inf)
    return list(torch.autograd.grad(torch.softmax(s, -1) @ wide_v, leaves, torch.tensor(grad).double()))


WHATS = [FlashAttention(), FlashAttention(causal=True), FlashAttention(softcap=1.5, scale=0.7),
         FlashAttention(window=5), FlashAttention(causal=True, window=3)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", WHATS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_by_formulas(what: FlashAttention, masked: bool):
    q, k, v = made(seed=3)
    mask = Tensor(np.random.default_rng(4).normal(size=(1, 4, 1, 9)).astype(np.float32)) if masked else None
    grad = np.random.default_rng(5).normal(size=q.shape).astype(np.float32)
    y = attend(what, q, k, v, mask)
    leaves = [x for x in (q, k, v, mask) if x is not None]
    got = y.gradient(*leaves, gradient=Tensor(grad))
    for one, right in zip(got, gradients(what, q, k, v, mask, grad), strict=True): close(one, right, 5e-5)


@pytest.mark.slow
def test_gradients_of_gradients():
    q, k, v = (x[:1].contiguous().realize() for x in made(heads=1, kv=1, rows=2, keys=4, d=4))
    leaves = [wide(x).requires_grad_() for x in (q, k, v)]
    y = attend(FlashAttention(True), q, k, v)
    (first,) = (y * y).sum().gradient(k)
    (got,) = (first * first).sum().gradient(q)
    hidden = torch.ones(2, 4).triu(1) > 0
    s = torch.where(hidden, -torch.inf, leaves[0] @ leaves[1].transpose(-1, -2) / 2)
    right_y = torch.softmax(s, -1) @ leaves[2]
    (right_first,) = torch.autograd.grad((right_y * right_y).sum(), leaves[1], create_graph=True)
    (right,) = torch.autograd.grad((right_first * right_first).sum(), leaves[:1])
    close(got, right, 1e-3)


@pytest.mark.slow
def test_rows_that_see_nothing_have_no_part_in_gradients():
    q, k, v = made(kv=4)
    hidden = np.zeros((1, 1, 5, 9), dtype=bool)
    hidden[:, :, 2] = True
    y = attend(FlashAttention(), q, k, v, Tensor(~hidden))
    grad = np.ones(q.shape, dtype=np.float32)
    grad[:, :, 2] = 0
    got = [one.numpy() for one in y.gradient(k, v, gradient=Tensor(grad))]
    shown = [0, 1, 3, 4]
    right = attend(FlashAttention(), q[:, :, shown], k, v).gradient(k, v, gradient=Tensor(grad[:, :, shown]))
    for one, other in zip(got, right, strict=True): np.testing.assert_allclose(one, other.numpy(), atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("columns", "named"), [(1, False), (1, True), (3, False), (3, True)])
def test_rows_that_see_nothing_are_zeros(columns: int, named: bool):
    q, k, v = (x[:1].contiguous().realize() for x in made(heads=1, kv=1, keys=columns))
    hidden = np.zeros((1, 1, 5, columns), dtype=bool)
    hidden[:, :, 1:3] = True
    leaves = [wide(x).requires_grad_() for x in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*leaves, torch.tensor(~hidden))
    assert not right[:, :, 1:3].any()
    mask = Tensor(np.where(hidden, -np.inf, 0).astype(np.float32) if columns == 1 else ~hidden)
    y = attend(FlashAttention(), q, k, v, mask) if named else scaled_dot_product_attention(q, k, v, mask)
    close(y, right)
    for one, wanted in zip(y.sum().gradient(q, k, v), torch.autograd.grad(right.sum(), leaves), strict=True):
        close(one, wanted)


def test_rows_beyond_a_window_are_zeros():
    q, k, v = made(kv=4, keys=3)
    y = scaled_dot_product_attention(q, k, v, window=1)
    close(y[:, :, :3], wide(v))
    assert not y[:, :, 3:].numpy().any()


UNIT = 2.0**-24


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor,
          window: int) -> torch.Tensor:
    """As transformers spells it: a column of logits that is dropped after the softmax."""
    group, places = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    seen = (places <= places[:, None]) & (places > places[:, None] - window)
    s = torch.where(seen, s, -torch.inf)
    both = torch.cat([s, sinks.reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return both.softmax(-1)[..., :-1] @ v


def operands(rows: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and sinks of every size, and a gradient of the result."""
    random = torch.Generator().manual_seed(0)
    def normal(heads: int) -> torch.Tensor: return torch.randn(2, heads, rows, 16, generator=random).double()
    sinks = torch.tensor([0.5, -torch.inf, 3.0, 1e30]).double()
    return [each.requires_grad_() for each in (normal(4), normal(2), normal(2), sinks)], normal(4)


@pytest.mark.parametrize("kernels", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sinks_and_their_gradients(kernels: bool):
    """Within 64 roundings of the largest: sums of 40 products of two roundings each, and a few."""
    given, up = operands(40)
    wanted = exact(*given, 7)
    grads = torch.autograd.grad((wanted * up).sum(), given)
    q, k, v, sinks = tensors = [Tensor(x.detach().float().numpy(), device="CPU").realize() for x in given]
    with Context() if kernels else hooks.disabled():
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, window=7, sinks=sinks)
        assert ("flash" in [kernel.template for kernel in explain(out).kernels]) == kernels
        found = (out * Tensor(up.float().numpy(), device="CPU")).sum().gradient(*tensors)
        for ours, theirs in zip([out, *found], [wanted.detach(), *grads], strict=True):
            error = (torch.from_numpy(ours.numpy()).double() - theirs).abs().max()
            assert error <= 64 * UNIT * theirs.abs().max()
        assert not out.numpy()[:, 3].any()


def test_sinks_on_a_gpu():
    """The result of a flash kernel, rounded twice to bfloat16."""
    given, _ = operands(64)
    narrow = [x.detach().bfloat16() for x in given[:3]]
    wanted = exact(*(x.double() for x in narrow), given[3].detach(), 64)
    q, k, v = (Tensor(x.float().numpy(), device="EMU").cast(dtypes.bfloat16).realize() for x in narrow)
    sinks = Tensor(given[3].detach().float().numpy(), device="EMU").realize()
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, sinks=sinks)
    assert any(str(kernel.template).startswith("flash") for kernel in explain(out).kernels)
    error = (torch.from_numpy(out.float().numpy()).double() - wanted).abs()
    assert (error <= 3 * 2.0**-8 * wanted.abs() + 2.0**-8).all()


def test_sinks_of_another_shape_are_refused():
    q = Tensor.ones(1, 2, 8, 16)
    with pytest.raises(SpecError, match=r"sinks of f32 \(4,\)"):
        scaled_dot_product_attention(q, q, q, sinks=Tensor.ones(4))
