"""scaled_dot_product_attention with sinks, forward and backward, against float64."""
from __future__ import annotations

import pytest
import torch

from tinygrad_nv import Context, Tensor, dtypes, explain, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import scaled_dot_product_attention

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
