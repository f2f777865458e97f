"""Attention of 8 bits by name: its body, one kernel of ours on sm_90a, what is refused."""
from __future__ import annotations

import pytest
import torch

from tests.support.tile.flash_case import F32
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.attention.fp8 import fp8_attention
from tinygrad_nv.tile.attention.spec import SCALED

Tensors = list[torch.Tensor]


def quantised(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of e4m3 and their scales, of blocks of rows; of 0, of heads; of -1, of all."""
    if block < 0: scale = x.abs().amax().reshape(1, 1, 1) / 448
    elif block == 0: scale = x.abs().amax((2, 3))[..., None] / 448
    else: scale = torch.stack([part.abs().amax((2, 3)) for part in x.split(block, 2)], -1) / 448
    each = scale.repeat_interleave(block, -1)[..., :x.shape[2]] if block > 0 else scale
    return (x / each[..., None]).to(torch.float8_e4m3fn), scale


def operands(block: int, s_q: int = 100, s_kv: int = 260, heads: int = 4, kv_heads: int = 2) -> Tensors:
    """q, k and v of 8 bits, then their scales."""
    random = torch.Generator().manual_seed(block + 1)
    shapes = ((2, heads, s_q, 64), (2, kv_heads, s_kv, 64), (2, kv_heads, s_kv, 48))
    pairs = [quantised(torch.randn(shape, generator=random), block) for shape in shapes]
    return [each for side in zip(*pairs, strict=True) for each in side]


def exact(given: Tensors, block: int, causal: bool, rounded: bool = False) -> torch.Tensor:
    """In float64; with weights rounded to e4m3 of 2⁸ times their value, as kernels do."""
    q, k, v = (x.float().double() * (s.repeat_interleave(block, -1)[..., :x.shape[2]] if block > 0 else s)
               .double()[..., None] for x, s in zip(given[:3], given[3:], strict=True))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / 8
    if causal: s = s + torch.full(s.shape[-2:], -torch.inf).triu(s.shape[-1] - s.shape[-2] + 1)
    e = (s - s.amax(-1, keepdim=True)).exp()
    weights = (e.float() * 256).to(torch.float8_e4m3fn).double() / 256 if rounded else e
    return weights @ v / e.sum(-1, keepdim=True)


def stored(x: torch.Tensor, device: str) -> Tensor:
    if x.dtype == torch.float32: return Tensor(x.numpy(), device=device).realize()
    return Tensor(x.view(torch.uint8).numpy(), device=device).bitcast(SCALED).contiguous().realize()


def by_name(given: Tensors, device: str, block: int, **how: object) -> Tensor:
    return fp8_attention(*(stored(x, device) for x in given), block=max(block, 1), **how)  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [-1, 0, 64])
def test_the_body_is_what_operands_stand_for(block: int, causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    given = operands(block)
    out = by_name(given, "CPU", block, causal=causal, dtype=F32).numpy()
    assert (torch.from_numpy(out).double() - exact(given, block, causal)).abs().max() < 1e-5


def test_other_architectures_run_the_body(monkeypatch: pytest.MonkeyPatch):
    """And say why."""
    monkeypatch.setenv("EMU_ARCH", "sm_80")
    given = operands(0, 16, 32, 1, 1)
    made = by_name(given, "EMU:80", 0, dtype=F32)
    told = str(explain(made))
    assert "flash_wgmma " not in told.replace("flash_wgmma is", "")
    assert (torch.from_numpy(made.numpy()).double() - exact(given, 0, False)).abs().max() < 1e-2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("block", [-1, 0, 64])
def test_one_kernel_on_hopper(block: int, causal: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", "sm_90a")
    given = operands(block)
    made = by_name(given, "EMU:90", block, causal=causal)
    told = str(explain(made))
    assert told.count("flash_wgmma") >= 1
    wanted = exact(given, block, causal)
    usual = (exact(given, block, causal, rounded=True) - wanted).abs().max()
    out = torch.from_numpy(made.cast(dtypes.float32).numpy()).double()
    assert ((out - wanted).abs() <= 2 * usual + 2.0**-8 * wanted.abs()).all()


REFUSED = {
    "4 query heads over 3 key heads": {"kv_heads": 3}, "130 rows over 100 columns, causal": {"s_q": 130,
                                                                                            "s_kv": 100}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    with pytest.raises(SpecError, match=words): by_name(operands(0, **REFUSED[words]), "CPU", 0, causal=True)


def test_scales_and_dtypes_that_do_not_fit():
    given = operands(64)
    with pytest.raises(SpecError, match=r"q_scale of shape \(2, 4, 2\)"): by_name(given, "CPU", 32)
    with pytest.raises(SpecError, match="q of f32"):
        by_name([given[0].float(), *given[1:]], "CPU", 64)
    with pytest.raises(SpecError, match="dtype of s32"): by_name(given, "CPU", 64, dtype=dtypes.int32)
