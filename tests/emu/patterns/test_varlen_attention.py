"""DEV=EMU, checks on: ragged attention as a named function, by one kernel of ours."""
from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tinygrad_nv import Device, Tensor, TinyJit, dtypes, explain
from tinygrad_nv.patterns.attention.varlen import varlen_attention

BF16, F16 = dtypes.bfloat16, dtypes.float16
DEVICES = {"sm_80": "EMU:80", "sm_90a": "EMU:90"}
DEVICE = DEVICES["sm_80"]
LENGTHS = [(65, 130), (0, 7), (1, 64), (30, 0), (63, 20), (64, 65)]


@pytest.fixture(autouse=True, params=DEVICES)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of a test's tensors."""
    monkeypatch.setenv("EMU_ARCH", request.param)  # read when the device is opened
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", DEVICES[request.param])
    assert Device[DEVICE].driver.properties.arch == request.param
    yield
    Device[DEVICE].synchronize()


def ends(lengths: list[tuple[int, int]]) -> list[np.ndarray]:
    return [np.cumsum([0, *each]).astype(np.int32) for each in zip(*lengths, strict=True)]


def operands(lengths: list[tuple[int, int]], heads: int = 2, kv_heads: int = 1, d: int = 64,
             more: int = 5) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(len(lengths))
    rows, keys = (sum(each) + more for each in zip(*lengths, strict=True))
    return [torch.randn(n, h, d, generator=random).half()
            for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads))]


def stored(x: torch.Tensor | np.ndarray) -> Tensor:
    return Tensor(x.numpy() if isinstance(x, torch.Tensor) else x, device=DEVICE).realize()


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[tuple[int, int]],
          causal: bool = True) -> torch.Tensor:
    """Each sequence by itself, in float64."""
    out, (cu_q, cu_k) = torch.zeros(q.shape, dtype=torch.float64), ends(lengths)
    for b, (rows, keys) in enumerate(lengths):
        mine, own, values = (x[cu[b]:cu[b + 1]].double().transpose(0, 1)
                             for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
        s = mine @ own.transpose(-1, -2) * q.shape[2] ** -0.5
        away = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
        if causal: s = torch.where(away <= 0, s, -torch.inf)
        out[cu_q[b]:cu_q[b + 1]] = (s.softmax(-1).nan_to_num(0) @ values).transpose(0, 1)
    return out


def near(out: Tensor, wanted: torch.Tensor) -> None:
    """Within what p and the result are rounded by."""
    assert (torch.from_numpy(out.numpy()).double() - wanted).abs().max() < 2e-3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("causal", [True, False])
def test_one_kernel(causal: bool):
    given = operands(LENGTHS)
    out = varlen_attention(*map(stored, (*given, *ends(LENGTHS))), 80, 140, causal=causal)
    (kernel,) = explain(out).kernels
    assert kernel.template.startswith("flash_")
    assert "6 of 228x291, 2 heads of 1" in kernel.reason
    near(out, exact(*given, LENGTHS, causal))


@pytest.mark.sampled(1)
def test_distances():
    """Biases by how far a key is from its row."""
    lengths = [(n, n) for n, _ in LENGTHS]
    q, k, v = operands(lengths, kv_heads=2)
    random = torch.Generator().manual_seed(1)
    cu, bias = ends(lengths)[0], torch.randn(2, 2 * 70 - 1, generator=random)
    wanted = torch.zeros(q.shape, dtype=torch.float64)
    for b, (n, _) in enumerate(lengths):
        mine, own, values = (x[cu[b]:cu[b + 1]].double().transpose(0, 1) for x in (q, k, v))
        away = torch.arange(n)[None] - torch.arange(n)[:, None]
        p = (mine @ own.transpose(-1, -2) * q.shape[2] ** -0.5 + bias[:, away + 69]).softmax(-1)
        wanted[cu[b]:cu[b + 1]] = (p @ values).transpose(0, 1)
    at = stored(cu)
    out = varlen_attention(*map(stored, (q, k, v)), at, at, 70, 70, distances=stored(bias))
    (kernel,) = explain(out).kernels
    assert kernel.template.startswith("flash_")
    near(out, wanted)


def test_heads_of_a_projection_are_read_where_they_lie():
    q, k, v = operands(LENGTHS[:1] * 2)
    rows = q.shape[0]
    k, v = k[:rows], v[:rows]
    lengths = [(65, 65), (65, 65)]
    wide = stored(torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1))
    mine = [wide[:, 64 * at:64 * (at + heads)].reshape(rows, heads, 64)
            for at, heads in ((0, 2), (2, 1), (3, 1))]
    out = varlen_attention(*mine, *map(stored, ends(lengths)), 65, 65, causal=True)
    assert len(explain(out).kernels) == 1
    near(out, exact(q, k, v, lengths))


def test_one_captured_graph_serves_any_lengths():
    q, k, v = operands(LENGTHS)
    given = list(map(stored, (q, k, v)))
    step = TinyJit(lambda cu_q, cu_k: varlen_attention(*given, cu_q, cu_k, 80, 140, causal=True).realize())
    for lengths in (LENGTHS, LENGTHS[::-1], [(38, 40)] * 6, [(0, 0)] * 5 + [(1, 140)]):
        near(step(*map(stored, ends(lengths))), exact(q, k, v, lengths))


@pytest.mark.sampled(1)
def test_a_miss_has_its_reason():
    q, k, v = (Tensor.zeros(9, 2, 20, dtype=F16, device=DEVICE).contiguous().realize() for _ in range(3))
    cu = stored(np.array([0, 9], np.int32))
    found = explain(varlen_attention(q, k, v, cu, cu, 9, 9))
    told = [*(kernel.reason for kernel in found.kernels), *found.notes]
    assert any("no kernel for f16" in words and "d=20 is not a multiple of 8" in words for words in told)
