"""DEV=EMU: activations become codes and scales in one kernel, with the norm or the gate that makes them, bit
for bit as the reference but for the sign of zeros."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Variable

from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Tensor, dtypes, explain, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import quantize, scaled_matmul
from tinygrad_nv.quant.activations import quantize_activations
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import E4M3, INT8, QType, Scale, per_block_scale, per_channel_scale

BF16, F32 = dtypes.bfloat16, dtypes.float32
BLOCKS = {"row": Scale(1, 0), "group": Scale(1, 128)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 has sm_80, e4m3 needs sm_89."""
    monkeypatch.setenv("EMU_ARCH", "sm_90a")


def stored(*shape: int, dtype: object = BF16, seed: int = 0) -> Tensor:
    """Rows of several magnitudes; one of zeros, one whose largest number is negative."""
    rng = np.random.default_rng((seed, *shape))
    values = rng.standard_normal(shape) * np.logspace(-3, 3, shape[-2])[:, None]
    values[..., 0, :], values[..., -1, :] = 0, -np.abs(values[..., -1, :])
    return Tensor(values.astype(np.float32)).cast(dtype).contiguous().realize()


def equal(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit, but for the sign of zeros."""
    mine, theirs = (np.where(each == 128, 0, each) if each.dtype == np.uint8 else each
                    for each in (found.numpy(), wanted.numpy()))
    np.testing.assert_array_equal(mine, theirs)
    assert found.shape == wanted.shape


def same(x: Tensor, element: str, block: Scale, kernels: int = 1, scale: float | None = None) -> None:
    """One kernel, and the reference's bits, of x as it is stored."""
    made = quantize(x, element, block, scale)
    outs = [each for each in made if isinstance(each, Tensor)]
    templates = [each.template for each in explain(*outs).kernels]
    assert templates == ["quantize"] * kernels, explain(*outs)
    Tensor.realize(*outs)
    wanted = quantize_activations(Tensor(x.contiguous().float().numpy(), device="CPU"), element, block, scale)
    for found, each in zip(outs, wanted, strict=False): equal(found, each)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [BF16, F32, dtypes.float16], ids=["bf16", "f32", "f16"])
def test_rows_in_memory(element: str, block: str, dtype: object):
    for shape in ((7, 256), (2, 3, 1152), (1, 128)): same(stored(*shape, dtype=dtype), element, BLOCKS[block])


@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_a_static_scale(element: str):
    same(stored(5, 384), element, Scale(0, 0), scale=0.0173)


def normed(x: Tensor) -> Tensor:
    w = stored(3, int(x.shape[-1]), seed=1)[1]
    f = x.float()
    return ((f * (f.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).cast(x.dtype) * w).contiguous()


def residual(x: Tensor) -> Tensor: return normed(x + stored(*map(int, x.shape), seed=2))


def gated(x: Tensor) -> Tensor:
    gate, up = x.split([int(x.shape[-1]) // 2] * 2, dim=-1)
    return (gate.silu() * up).contiguous()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("way", [normed, residual, gated])
def test_with_what_makes_them(element: str, block: str, way: Callable[[Tensor], Tensor]):
    """In the kernel that makes them, which rounds them to their dtype before."""
    x = stored(5, 512)
    made, s = quantize(way(x), element, BLOCKS[block])
    assert isinstance(s, Tensor)
    assert [each.template for each in explain(made, s).kernels] == ["quantize"]
    Tensor.realize(made, s)
    wanted = quantize_activations(Tensor(way(x).float().numpy(), device="CPU"), element, BLOCKS[block])
    for found, each in zip((made, s), wanted, strict=True): equal(found, each)


def test_symbolic_rows():
    rows, x = Variable("rows", 1, 8).bind(5), stored(8, 256)
    codes, s = quantize(normed(x[:rows].reshape(1, rows, 256)), "e4m3", BLOCKS["group"])
    total = codes.eq(128).where(0, codes.cast(dtypes.int32)).sum() + (s.sum() * 0).cast(dtypes.int32)
    assert explain(total).kernels[0].template == "quantize"
    with hooks.disabled(): wanted = quantize_activations(normed(x)[:5].contiguous(), "e4m3",
                                                         BLOCKS["group"])[0].numpy()
    assert total.item() == wanted.astype(np.int64).sum()


def matrix(type: QType, n: int, k: int) -> QTensor:
    codes = np.random.default_rng(0).integers(0, 100, (n, k)).astype(np.uint8)
    scales = np.ones(type.scale.blocks(n, k), np.float32)
    return QTensor.of(type, (n, k), {"codes": codes, "scales": scales})


def test_one_pass_between_two_matmuls():
    """e4m3 of groups and int8 of rows: matmul, gate and codes, matmul."""
    for type, block in ((E4M3 @ per_block_scale(128, 128), BLOCKS["group"]),
                        (INT8 @ per_channel_scale(), BLOCKS["row"])):
        name = type.element.name
        hidden = scaled_matmul(*quantize(normed(stored(5, 256)), name, block), matrix(type, 512, 256))
        out = scaled_matmul(*quantize(gated(hidden), name, block), matrix(type, 128, 256))
        told = [str(each.template) for each in explain(out).kernels]
        assert told[0::2] == ["quantize", "quantize"]
        assert len(told) == 4


def test_refused():
    for words, columns, element in (("groups of 128 of 200", 200, "e4m3"), ("of e5m2", 256, "e5m2")):
        with pytest.raises(SpecError, match=words): quantize(stored(3, columns), element, BLOCKS["group"])


@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_quotients_by_a_static_scale_are_exact(element: str):
    """Numbers nearest to where codes change, and those without a quotient."""
    scale = np.float32(0.12172)     # products with its reciprocal are other codes
    halves = np.arange(-128.5, 128) if element == "int8" else \
        np.concatenate([np.ldexp(np.arange(1, 34, 2), e) for e in range(-11, 5)])
    near = (halves * float(scale)).astype(np.float32).view(np.int32)
    around = (near[:, None] + np.arange(-4, 5)).astype(np.int32).view(np.float32).reshape(-1)
    beside = np.array([np.inf, -np.inf, 3e38, -3e38, 1e-42, -1e-42, 0, -0.0] * 8, np.float32)
    x = np.concatenate([around, -around, beside])
    x = np.pad(x, (0, -x.size % 256)).reshape(-1, 256)
    same(Tensor(x).realize(), element, Scale(0, 0), scale=float(scale))
