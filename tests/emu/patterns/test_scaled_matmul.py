"""DEV=EMU: matmuls of codes with scales are one kernel, exact for integers, as their reference; and linear
layers in FP8, forward and backward."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Variable
from tinygrad.helpers import Context

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.patterns.scaled_case import F32, Codes
from tinygrad_nv import Device, Tensor, dtypes, explain, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Fp8Linear, fp8_linear, multiplies_codes, scaled_matmul
from tinygrad_nv.quant.types import (
    E4M3,
    INT8,
    QType,
    Scale,
    per_block_scale,
    per_channel_scale,
    per_tensor_scale,
)

BF16 = dtypes.bfloat16
TYPES = {"int8": INT8 @ per_channel_scale(), "e4m3": E4M3 @ per_channel_scale(),
         "e4m3 tensor": E4M3 @ per_tensor_scale(), "e4m3 blocks": E4M3 @ per_block_scale(128, 128),
         "e4m3 bf16 blocks": E4M3 @ per_block_scale(128, 128, BF16),
         "e4m3 bf16": E4M3 @ per_channel_scale(dtype=BF16)}


def templates(made: Tensor) -> list[str | None]: return [each.template for each in explain(made).kernels]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("m", [1, 7, 70])
@pytest.mark.parametrize("name", TYPES)
def test_integers_are_exact(name: str, m: int):
    given = Codes.of(TYPES[name], m, 144, 256, whole="tensor" in name)
    bias = np.arange(144.0)
    made = given.by_name(bias)
    assert len(templates(made)) == 1 + (name == "e4m3 bf16 blocks")     # whose scales are widened
    assert templates(made)[-1] in (["scaled_wgmma"] if "blocks" in name else ["gemv", "mma", "wgmma"])
    np.testing.assert_array_equal(made.numpy(), given.answer + bias)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TYPES)
def test_the_reference_is_the_same_function(name: str):
    given, bias = Codes.of(TYPES[name], 5, 24, 256), np.arange(24.0)
    with hooks.disabled(): made = given.by_name(bias).numpy()
    np.testing.assert_array_equal(made, given.answer + bias)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TYPES)
def test_on_a_cpu(name: str):
    given, bias = Codes.of(TYPES[name], 5, 24, 256), np.arange(24.0)
    np.testing.assert_array_equal(given.by_name(bias, device="CPU").numpy(), given.answer + bias)


def test_int8_sums_are_of_int32():
    """A sum of products that float32 does not hold."""
    given = Codes.of(TYPES["int8"], 20, 24, 2048, exact=False)
    given.x[:], given.w[:], given.x_scale[:], given.w_scale[:] = 127, 127, 1, 1
    given.x[0, 0] = 126
    assert given.answer[0, 0] == 127 * 127 * 2048 - 127
    wanted = given.answer.astype(np.float32)
    np.testing.assert_array_equal(given.by_name().numpy(), wanted)
    with hooks.disabled(): np.testing.assert_array_equal(given.by_name().numpy(), wanted)


@pytest.mark.parametrize(("arch", "name"), [("sm_80", "int8"), ("sm_89", "e4m3"), ("sm_90a", "e4m3"),
                                            ("sm_89", "e4m3 blocks")])
def test_architectures(arch: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """A device of an architecture has a number of its own."""
    monkeypatch.setenv("EMU_ARCH", arch)
    given = Codes.of(TYPES[name], 70, 48, 256 if "blocks" in name else 160)
    made = given.by_name(device=f"EMU:{arch[3:5]}")
    kind = "wgmma" if arch == "sm_90a" else "mma"
    assert templates(made) == [f"scaled_{kind}" if "blocks" in name else kind]
    np.testing.assert_array_equal(made.numpy(), given.answer)


def test_models_multiply_codes_of_blocks_from_sm_89_on(monkeypatch: pytest.MonkeyPatch):
    for arch in ("sm_80", "sm_89", "sm_90a"):
        monkeypatch.setenv("EMU_ARCH", arch)
        found = multiplies_codes(TYPES["e4m3 blocks"], (576, 7168), "e4m3", Scale(1, 128), f"EMU:{arch[3:5]}")
        assert found == (arch != "sm_80")


def test_fp8_begins_with_sm_89(monkeypatch: pytest.MonkeyPatch):
    """Before it, few rows are multiplied without tensor cores, others by the reference."""
    monkeypatch.setenv("EMU_ARCH", "sm_80")
    given = Codes.of(TYPES["e4m3"], 20, 24, 64)
    made = given.by_name(device="EMU:80")
    assert "begins with sm_89" in str(explain(made))
    np.testing.assert_array_equal(made.numpy(), given.answer)


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_any_codes_and_scales(name: str):
    """int8 to three roundings of float32, and one of the result; e4m3 to what fp8 sums of 14 bits lose of the
    magnitudes that are added up, 2^-10."""
    given = Codes.of(TYPES[name], 40, 56, 300, exact=False)
    off = np.abs(given.by_name().numpy().astype(np.float64) - given.answer)
    cut = 0 if name == "int8" else 2.0 ** -10
    assert (off <= 3 * 2.0 ** -24 * np.abs(given.answer) + cut * given.magnitudes).all()


def test_symbolic_rows():
    given = Codes.of(TYPES["int8"], 12, 40, 96)
    rows = Variable("rows", 1, 12).bind(9)
    x, s = Tensor(given.bits(given.x)).realize(), Tensor(given.x_scale.astype(np.float32)).realize()
    made = scaled_matmul(x[:rows], s[:rows], given.matrix(), None, F32).sum(1)
    assert templates(made)[0] in ("gemv", "mma", "wgmma")
    wanted = np.where(np.arange(12) < 9, given.answer.sum(1), 0)
    np.testing.assert_array_equal(made.pad(((0, 12 - rows),)).contiguous().numpy(), wanted)


def test_what_does_not_fit_is_refused():
    given = Codes.of(TYPES["int8"], 4, 8, 32)
    x, s, w = Tensor(given.bits(given.x)), Tensor(given.x_scale.astype(np.float32)), given.matrix()
    for words, arguments in {
            "x of float": (x.float(), s, w), "scales of x, float": (x, s[:3], w),
            "2 scales for 32 columns": (x, s.expand(4, 2), w),
            "w of int8 channel": (x, s, type(w)(QType(INT8, Scale(1, 0), shift=1), w.shape, w.buffers)),
            "bias of shape": (x, s, w, s.reshape(4))}.items():
        with pytest.raises(SpecError, match=words): scaled_matmul(*arguments)
    with pytest.raises(SpecError, match="dtype of int"): scaled_matmul(x, s, w, dtype=dtypes.int32)
    assert Device.DEFAULT == "EMU"


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
