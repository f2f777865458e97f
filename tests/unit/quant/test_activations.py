"""Inputs are rounded as compressed-tensors rounds them, bit for bit."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from tinygrad import Tensor

from tinygrad_nv.quant.activations import e4m3_bits, quantize_activations, round_activations, to_e4m3
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.types import Scale

SCALES = {"token": Scale(1, 0), "tensor": Scale(0, 0), "group": Scale(1, 32)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", SCALES)
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_dynamic_scales(element: str, strategy: str):
    """Among them tokens whose largest number is negative, so that it lies between two integers, and zeros."""
    x = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 0], x[1, 3] = 0, x[1, 3].abs().neg()
    args = QuantizationArgs(num_bits=8, type="int" if element == "int8" else "float", symmetric=True,
                            strategy=strategy, dynamic=True, group_size=32 if strategy == "group" else None)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    wanted = fake_quantize(x, scale, zero, args)
    found = round_activations(Tensor(x.numpy()), Activations(element, SCALES[strategy])).numpy()
    np.testing.assert_array_equal(found, wanted.numpy())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_the_last_block_may_be_short(element: str):
    """As if inputs went on with zeros."""
    x = np.random.default_rng(0).standard_normal((3, 80)).astype(np.float32)
    more = np.pad(x, ((0, 0), (0, 16)))
    how = Activations(element, SCALES["group"])
    found, wanted = (round_activations(Tensor(each), how).numpy()[:, :80] for each in (x, more))
    np.testing.assert_array_equal(found, wanted)
    found, wanted = (quantize_activations(Tensor(each), element, SCALES["group"]) for each in (x, more))
    np.testing.assert_array_equal(found[0].numpy(), wanted[0].numpy()[:, :80])
    np.testing.assert_array_equal(found[1].numpy(), wanted[1].numpy())


def test_a_static_scale():
    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
    found = round_activations(Tensor(x), Activations("int8", Scale(0, 0), True), 0.015625).numpy()
    np.testing.assert_array_equal(found, np.clip(np.rint(x * 64), -128, 127) / 64)


def test_e4m3_is_torchs():
    drawn = np.random.default_rng(0).standard_normal(4096) * np.logspace(-6, 3, 4096)
    x = np.concatenate([drawn, [0.0, -0.0, 448, 464, 480, 1e9, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 2.0**-6]])
    x = x.astype(np.float32)
    wanted = torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(to_e4m3(Tensor(x)).numpy(), wanted)
    bits = torch.tensor(wanted).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(e4m3_bits(Tensor(wanted)).numpy(), bits)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", SCALES)
@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_codes_are_what_is_rounded_to(element: str, strategy: str):
    """Codes times scales, bit for bit."""
    x = Tensor((np.random.default_rng(0).standard_normal((2, 9, 96)) * 3).astype(np.float32))
    codes, scales = (each.numpy() for each in quantize_activations(x, element, SCALES[strategy]))
    values = codes.astype(np.float32) if element == "int8" else \
        torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert scales.shape == {"token": (2, 9, 1), "tensor": (1, 1, 1), "group": (2, 9, 3)}[strategy]
    made = values.reshape(2, 9, scales.shape[-1], -1) * scales[..., None]
    wanted = round_activations(x, Activations(element, SCALES[strategy])).numpy()
    np.testing.assert_array_equal(made.reshape(2, 9, 96), wanted)
