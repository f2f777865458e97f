"""Whole sequences of mixers in plain tinygrad, whose gradients tinygrad derives: what training computes.

Protocol: x is (B, T, …); every sequence begins with zeros. The rest is as `functional` has it.
"""
from __future__ import annotations

from tinygrad import Tensor

from tinygrad_nv.tile.linear_attention.reference import invert

SCAN_CHUNK = 8  # of a selective scan: decays of pairs are held for each element of a state
CHANNELS = 16   # tokens that are computed together where decays of pairs are held for each channel
CHUNK = 64      # tokens that are computed together: arXiv 2412.06464 has as many


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """`causal_conv` of x (B, T, C)."""
    taps, T = int(weight.shape[1]), int(x.shape[1])
    wide = x.float().pad(((0, 0), (taps - 1, 0), (0, 0))).contiguous()
    made = sum((wide[:, j:j + T] * weight[:, j].float() for j in range(1, taps)), wide[:, :T] * weight[:, 0])
    if bias is not None: made = made + bias.float()
    return (made.silu() if silu else made).cast(x.dtype).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """`linear_attention` of q and k (B, T, H_k, D_k), v (B, T, H, D_v), decay (B, T, H) or (B, T, H, D_k),
    beta (B, T, H): chunks of tokens, by matmuls but for decays of channels."""
    (B, T, H, _), dtype, channels = v.shape, v.dtype, decay.ndim == 4
    size, pad = min(CHANNELS if channels else CHUNK, 1 << (int(T) - 1).bit_length()), 0
    pad = -int(T) % size

    def cut(x: Tensor) -> Tensor:
        """(B, H, chunks, size, …)."""
        x = x.float().pad(((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(B, -1, size, *x.shape[2:]).transpose(2, 3).transpose(1, 2)
    shared = int(H) // int(k.shape[2])
    q, k = (cut(each.repeat_interleave(shared, dim=2)) for each in (q, k))
    q, v = q * scale, cut(v)
    summed = cut(decay if channels else decay.unsqueeze(-1)).cumsum(3).contiguous()    # (…, size, 1 or D_k)
    i, j = Tensor.arange(size).reshape(-1, 1), Tensor.arange(size).reshape(1, -1)
    gap = summed.unsqueeze(4) - summed.unsqueeze(3)
    between = (i >= j).unsqueeze(-1).where(gap, -float("inf")).exp().contiguous()
    before, total = summed.exp(), summed[..., -1:, :]
    left = k * (total - summed).exp()

    def pair(x: Tensor) -> Tensor:
        """Products of x with keys, with the decays between."""
        if channels: return (x.unsqueeze(4) * k.unsqueeze(3) * between).sum(-1)
        return (x @ k.transpose(-1, -2)) * between.squeeze(-1)
    inverse = rate = None
    if beta is not None:
        rate = cut(beta).unsqueeze(-1)
        system = (i > j).where(pair(k) * rate, 0)
        inverse = invert(system.reshape(-1, size, size)).reshape(system.shape)
    among = pair(q)
    state, made = Tensor.zeros(B, H, k.shape[-1], v.shape[-1], device=v.device), []
    for n in range(int(v.shape[2])):
        new = v[:, :, n]
        if inverse is not None and rate is not None:
            new = inverse[:, :, n] @ (rate[:, :, n] * (new - (k * before)[:, :, n] @ state))
        made.append((q * before)[:, :, n] @ state + among[:, :, n] @ new)
        state = state * total[:, :, n].exp().transpose(-1, -2) + left[:, :, n].transpose(-1, -2) @ new
    out = Tensor.cat(*made, dim=2)[:, :, :T]
    return out.transpose(1, 2).cast(dtype).contiguous()


def scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`selective_scan` of x and step (B, T, E), a (N, E), b and c (B, T, N): float32 (B, T, E). Chunks of
    tokens, of which each has the decays since all that are before it."""
    B, T = (int(n) for n in x.shape[:2])
    pad = -T % SCAN_CHUNK

    def cut(each: Tensor) -> Tensor:
        """(B, chunks, size, …)."""
        return each.float().pad(((0, 0), (0, pad), (0, 0))).reshape(B, -1, SCAN_CHUNK, each.shape[-1])
    x, step, b, c = (cut(each) for each in (x, step, b, c))
    i, j = Tensor.arange(SCAN_CHUNK).reshape(-1, 1), Tensor.arange(SCAN_CHUNK).reshape(1, -1)
    summed, new = step.cumsum(2).unsqueeze(3) * a, (b.unsqueeze(-1) * (step * x).unsqueeze(3)).contiguous()
    state, made = Tensor.zeros(B, *a.shape, device=x.device), []
    for n in range(int(x.shape[1])):
        own = summed[:, n].contiguous()                                                 # (B, C, N, E)
        gap = own.unsqueeze(2) - own.unsqueeze(1)                                       # (B, C, C, N, E)
        left = (i >= j).reshape(1, SCAN_CHUNK, SCAN_CHUNK, 1, 1).where(gap, -float("inf")).exp()
        states = own.exp() * state.unsqueeze(1) + (left * new[:, n].unsqueeze(1)).sum(2)
        made.append((states * c[:, n].unsqueeze(-1)).sum(2))
        state = states[:, -1].contiguous()
    return Tensor.cat(*made, dim=1)[:, :T].contiguous()
