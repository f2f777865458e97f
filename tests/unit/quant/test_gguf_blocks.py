"""Blocks of GGUF files equal ggml's dequantised values bit for bit."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant import QTensor
from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.blocks import FORMATS, Format

QUANTISED = [kind for kind, format in FORMATS.items() if format.type is not None]
# bytes of a block where float16 scales begin
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
          "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
          "MXFP4": ()}


def random_rows(format: Format, n: int, blocks: int, sane: bool = True, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes; `sane` ones have scales between -1 and 1."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n * blocks, format.nbytes), dtype=np.uint8)
    if sane:
        for at in SCALES[format.name]:
            raw[:, at:at + 2] = rng.uniform(-1, 1, (len(raw), 1)).astype("<f2").view(np.uint8)
    if format.name == "MXFP4": raw[:, 0] = rng.integers(0, 255, len(raw))
    return raw.reshape(n, blocks * format.nbytes)


def dequantized(format: Format, raw: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    assert format.type is not None
    shape = len(raw), raw.shape[1] // format.nbytes * format.columns
    return QTensor.of(format.type, shape, blocks.arrays(format, raw, rows), "CPU").dequantize().numpy()


def require_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, signs of zeros too; of NaNs, that they are."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_sizes_are_those_of_ggml():
    for kind, format in FORMATS.items():
        assert Kind(kind).name == format.name
        assert gguf.GGML_QUANT_SIZES[kind] == (format.columns, format.nbytes)
    assert {kind.value: kind.name for kind in Kind if kind not in FORMATS} == blocks.NAMES


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sane", [True, False], ids=["numbers", "any bytes"])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_values_are_those_of_ggml(kind: int, sane: bool):
    raw = random_rows(FORMATS[kind], 5, 3, sane)
    require_same_bits(dequantized(FORMATS[kind], raw), gguf.dequantize(raw, Kind(kind)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.filterwarnings("ignore:overflow")
def test_extreme_bytes(kind: int):
    """Of codes and integer scales, the same byte in all of a row."""
    format = FORMATS[kind]
    raw = np.repeat(np.array([0x00, 0xff, 0x7f, 0x80], np.uint8)[:, None], format.nbytes, axis=1)
    for at in SCALES[format.name]: raw[:, at:at + 2] = np.array([1.2345], "<f2").view(np.uint8)
    if format.name == "MXFP4": raw[:, 0] = (0, 254, 1, 2)
    require_same_bits(dequantized(format, raw), gguf.dequantize(raw, Kind(kind)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4])
def test_what_ggml_quantised(kind: Kind):
    values = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    require_same_bits(dequantized(FORMATS[kind], raw), gguf.dequantize(raw, kind))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
def test_rows_in_another_order_and_in_chunks(kind: int, monkeypatch: pytest.MonkeyPatch):
    format, rows = FORMATS[kind], np.random.default_rng(2).permutation(7)
    raw = random_rows(format, 7, 2)
    expected = gguf.dequantize(np.ascontiguousarray(raw[rows]), Kind(kind))
    monkeypatch.setattr(blocks, "CHUNK", 2 * 2 * format.columns)
    require_same_bits(dequantized(format, raw, rows), expected)


def test_scale_255_of_mxfp4_is_refused():
    raw = random_rows(FORMATS[Kind.MXFP4], 2, 2)
    raw[1, 17] = 255
    with pytest.raises(WeightError, match="scale 255, which is NaN"): blocks.arrays(FORMATS[Kind.MXFP4], raw)
