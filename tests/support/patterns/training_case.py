"""Attentions that are trained, for tests on the emulator: gradients in float64, those of a plain
implementation, and what a training step's kernels have in memory.

Protocol: `gradients(operands, scores, grad)` are dq, dk, dv of softmax(scores(q kᵀ)) v by torch in float64;
`plain(...)` those with sums and softmax in float32, and p, ds and the result rounded to the operands' dtype,
by the formulas of FlashAttention-2. `near` holds a tensor's gradients against them: off by twice the plain
one's largest error, and by the rounding of the result.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from tinygrad.dtype import DType
from tinygrad.helpers import to_tuple
from tinygrad.uop.ops import UOp

from tests.support.tile.gemm_case import TORCH
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}
HIDDEN = -torch.inf
Scores = Callable[[torch.Tensor], torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normal(*shape: int, seed: int = 0, dtype: DType = BF16) -> torch.Tensor:
    """Normal numbers that the dtype holds."""
    random = torch.Generator().manual_seed(seed * 1000 + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).to(TORCH[dtype])


def made(b: int = 1, heads: int = 2, kv: int = 2, rows: int = 40, keys: int = 150, d: int = 32,
         dtype: DType = BF16, seed: int = 0, d_v: int = 0) -> Three:
    """q, k and v: 150 keys are more blocks than any ring here has stages, and two more."""
    k, v = (normal(b, kv, keys, width, seed=seed + i, dtype=dtype) for i, width in ((1, d), (2, d_v or d)))
    return normal(b, heads, rows, d, seed=seed, dtype=dtype), k, v


def stored(x: torch.Tensor, device: str, dtype: DType = BF16) -> Tensor:
    """A tensor in memory."""
    return Tensor(x.float().numpy(), device=device).cast(dtype).contiguous().realize()


def scaled(d: int = 32) -> Scores: return lambda x: x / d**0.5


def seen(rows: int, keys: int, condition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
         d: int = 32) -> Scores:
    """Scaled scores, hidden where the condition does not hold."""
    mask = condition(torch.arange(rows)[:, None], torch.arange(keys)[None, :])
    return lambda x: torch.where(mask, x / d**0.5, HIDDEN)


def causal(rows: int, keys: int, d: int = 32) -> Scores: return seen(rows, keys, lambda r, c: c <= r, d)


# **** gradients ****

def _repeated(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """softmax(scores(q kᵀ)) v; rows that see nothing are 0."""
    s = scores(q @ _repeated(q, k).transpose(-1, -2))
    hidden = (s == HIDDEN).all(-1, keepdim=True)
    return torch.where(hidden, 0.0, torch.softmax(torch.where(hidden, 0.0, s), -1)) @ _repeated(q, v)


def gradients(operands: Three, scores: Scores, grad: torch.Tensor) -> Three:
    """dq, dk and dv in float64."""
    leaves = [x.double().requires_grad_() for x in operands]
    q, k, v = leaves
    dq, dk, dv = torch.autograd.grad(attended(q, k, v, scores), leaves, grad.double())
    return dq, dk, dv


def plain(operands: Three, scores: Scores, grad: torch.Tensor) -> Three:
    """dq, dk and dv with sums and softmax in float32."""
    def narrow(x: torch.Tensor) -> torch.Tensor: return x.to(operands[0].dtype).float()
    q, k, v = (x.float() for x in operands)
    k, v, g = _repeated(q, k), _repeated(q, v), grad.float()
    x = (q @ k.transpose(-1, -2)).requires_grad_()
    s = scores(x)
    p = torch.nan_to_num(torch.softmax(s.detach(), -1), nan=0.0)
    delta = (g * narrow(narrow(p) @ v)).sum(-1, keepdim=True)
    ds = narrow(torch.autograd.grad(s, x, p * (g @ v.transpose(-1, -2) - delta))[0])
    def over(of: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        b, heads, keys, d = kv.shape
        return of.reshape(b, heads, -1, keys, d).sum(2).double()
    dk, dv = ds.transpose(-1, -2) @ q, narrow(p).transpose(-1, -2) @ g
    return (ds @ k).double(), over(dk, operands[1]), over(dv, operands[2])


def near(got: list[Tensor], operands: Three, scores: Scores, grad: torch.Tensor, c: float = 2) -> None:
    """Compares gradients; `c` is of the plain implementation's error."""
    exact, approximate = gradients(operands, scores, grad), plain(operands, scores, grad)
    for name, one, right, rough in zip(("dq", "dk", "dv"), got, exact, approximate, strict=True):
        value = torch.tensor(one.float().numpy()).double()
        assert value.shape == right.shape
        error = (rough - right).abs().max()
        worst = ((value - right).abs() - c * error - UNIT[one.dtype] * right.abs()).max()
        assert worst <= 1e-30, f"{name}: {worst:g} above the bound, a plain one is off by {error:g}"


# **** kernels ****

def templates(*tensors: Tensor) -> list[str | None]:
    """Which templates a step's kernels have."""
    return [kernel.template for kernel in explain(*tensors).kernels]


def specs(*tensors: Tensor) -> tuple[AttentionSpec, BackwardSpec]:
    """The specs of the one forward and the one backward kernel of a step."""
    found = [kernel.spec for kernel in explain(*tensors).kernels]
    (forward,) = [spec for spec in found if isinstance(spec, AttentionSpec)]
    (backward,) = [spec for spec in found if isinstance(spec, BackwardSpec)]
    assert forward.lse
    return forward, backward


def largest(*tensors: Tensor) -> int:
    """Elements of the largest thing in memory that a step's kernels read or write."""
    calls = UOp.sink(*(call for tensor in tensors[:1] for call in tensor.schedule_linear(*tensors[1:]).src))
    return max(arg.max_numel() for call in calls.src for arg in call.src[1:] if to_tuple(arg.device))
