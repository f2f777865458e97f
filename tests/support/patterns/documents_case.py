"""Attention within documents for tests: bounds of documents, operands, and float64 by the formulas."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.functional import document_attention

Lengths = list[list[int]]
TORCH = {dtypes.float32: torch.float32, dtypes.bfloat16: torch.bfloat16, dtypes.float16: torch.float16}


def bounds(lengths: Lengths, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """first and end, int32 [rows, tokens]."""
    first = np.tile(np.arange(tokens, dtype=np.int32), (len(lengths), 1))
    end = first.copy()
    for row, counts in enumerate(lengths):
        for at, n in zip(np.cumsum([0, *counts]), counts, strict=False):
            first[row, at:at + n], end[row, at:at + n] = at, at + n
    return first, end


@dataclass(frozen=True)
class Documents:
    """q, k, v and the result's gradient, [rows, heads, tokens, d], of values of `dtype` in float64."""
    lengths: Lengths
    tokens: int
    arrays: tuple[torch.Tensor, ...]
    dtype: DType = dtypes.float32
    sinks: torch.Tensor | None = None

    @staticmethod
    def of(lengths: Lengths, tokens: int, heads: int = 4, kv_heads: int = 2, d: int = 32,
           dtype: DType = dtypes.float32, sinks: bool = False, seed: int = 0) -> Documents:
        random = torch.Generator().manual_seed(seed)
        made = tuple(torch.randn(len(lengths), h, tokens, d, generator=random).to(TORCH[dtype]).double()
                     for h in (heads, kv_heads, kv_heads, heads))
        logits = torch.randn(heads, generator=random).double() if sinks else None
        return Documents(lengths, tokens, made, dtype, logits)

    def ours(self, device: str, **how: Any) -> list[Tensor]:
        """The result and the gradients of q, k, v and sinks, not realized."""
        def held(x: torch.Tensor, dtype: DType) -> Tensor:
            return Tensor(x.float().numpy(), device=device).cast(dtype).realize()
        q, k, v, grad = (held(x, self.dtype) for x in self.arrays)
        sinks = None if self.sinks is None else held(self.sinks, dtypes.float32)
        first, end = (Tensor(x, device=device).realize() for x in bounds(self.lengths, self.tokens))
        out = document_attention(q, k, v, first, end, sinks=sinks, **how)
        return [out, *out.gradient(q, k, v, *([] if sinks is None else [sinks]), gradient=grad)]

    def plain(self, kind: torch.dtype, causal: bool = True, window: int | None = None,
              scale: float | None = None, softcap: float | None = None) -> list[torch.Tensor]:
        """The same by a mask and autograd, in a dtype; of sinks what each token gives, [rows, heads, tokens,
        1]."""
        given = [x.to(kind, copy=True).requires_grad_() for x in self.arrays[:3]]
        group = self.arrays[0].shape[1] // self.arrays[1].shape[1]
        q, k, v = given[0], *(x.repeat_interleave(group, 1) for x in given[1:])
        s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None: s = (s / softcap).tanh() * softcap
        s = s.masked_fill(~self._seen(causal, window)[:, None], -torch.inf)
        if self.sinks is not None:
            each = self.sinks.to(kind)[None, :, None, None].repeat(len(s), 1, self.tokens, 1)
            given.append(each.requires_grad_())
            s = torch.cat([s, each], -1)
        top = s.detach().amax(-1, keepdim=True)
        e = (s - torch.where(top == -torch.inf, 0, top)).exp()
        total = e.sum(-1, keepdim=True)
        out = (e / torch.where(total == 0, 1, total))[..., :self.tokens] @ v
        return [each.detach() for each in (out, *torch.autograd.grad(out, given, self.arrays[3].to(kind)))]

    def _seen(self, causal: bool, window: int | None) -> torch.Tensor:
        first, end = (torch.tensor(x)[:, :, None] for x in bounds(self.lengths, self.tokens))
        row, column = torch.arange(self.tokens)[:, None], torch.arange(self.tokens)[None]
        seen = (first <= column) & (column < end)
        if causal: seen = seen & (column <= row)
        return seen if window is None else seen & ((row - column).abs() < window)
