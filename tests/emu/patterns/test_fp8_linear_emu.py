"""DEV=EMU: forward and backward of a linear layer are matmuls in FP8, as explain() tells, near to what the
reference computes."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.helpers import Context

from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Tensor, dtypes, explain, hooks
from tinygrad_nv.functional import Fp8Linear, fp8_linear

T, K, N = 40, 144, 32
# the matmuls' operands: forward, gradient of x, gradient of W
HYBRID, SAME = ("e4m3", "e5m2*e4m3", "e5m2*e4m3"), ("e4m3",) * 3
CASES = [(Fp8Linear(), "wgmma", HYBRID), (Fp8Linear(backward="e4m3"), "wgmma", SAME),
         (Fp8Linear(backward="e4m3", blocks=True), "scaled_wgmma", SAME),
         (Fp8Linear(blocks=True), "scaled_wgmma", HYBRID)]


def derived(how: Fp8Linear, delayed: bool) -> list[Tensor]:
    """The result, and the gradients of x and W."""
    random = np.random.default_rng(0)
    x, w, g = (Tensor(random.standard_normal(shape).astype(np.float32)).cast(dtypes.bfloat16).realize()
               for shape in ((2, T // 2, K), (N, K), (2, T // 2, N)))
    meter = Tensor.zeros(9).contiguous().realize()
    scales = tuple(Tensor([value]).realize() for value in (64.0, 32.0, 8192.0)) if delayed else None
    y = fp8_linear(how, x, w, scales, meter)
    return [y, *(y * g).sum().gradient(x, w)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "template", "kinds"), CASES, ids=str)
def test_each_matmul_is_fp8(how: Fp8Linear, template: str, kinds: tuple[str, ...]):
    made = derived(how, delayed=not how.blocks)
    found = explain(*made)
    ours = [each for each in found.kernels if each.template is not None]
    assert [each.template for each in ours] == [template] * 3
    text = str(found)
    for kind, extents in zip(kinds, (f"{T}x{N}x{K}", f"{T}x{K}x{N}", f"{N}x{K}x48"), strict=True):
        assert f"{extents} {kind} NT → bf16" in text
    for each, extents in zip(made, ((T, N), (T, K), (N, K)), strict=True):
        assert np.prod(each.shape) == np.prod(extents)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "template", "kinds"), CASES[::2], ids=str)
def test_the_reference_is_near(how: Fp8Linear, template: str, kinds: tuple[str, ...]):
    """Of the same codes: to two roundings of bfloat16, and what fp8 sums of 14 bits lose of magnitudes that
    are added up, 2^-9 of the largest result."""
    found = [each.float().numpy() for each in derived(how, delayed=not how.blocks)]
    with Context(DEV="CPU"), hooks.disabled():
        wanted = [each.float().numpy() for each in derived(how, delayed=not how.blocks)]
    for ours, theirs in zip(found, wanted, strict=True):
        off = np.abs(ours - theirs) - 2.0 ** -7 * np.abs(theirs)
        assert off.max() <= 2.0 ** -9 * np.abs(theirs).max()
