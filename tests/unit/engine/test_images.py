"""Files of images to RGB bytes, as transformers' loader and image processors have them."""
from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from tinygrad_nv.engine.vision.images import as_image, decode_image, from_url, pixels

RNG = np.random.default_rng(0)
COLOURS = Image.fromarray(RNG.integers(0, 256, (9, 7, 4), np.uint8))


def written(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **how)
    return made.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "1", "P", "CMYK"])
def test_modes(mode: str) -> None:
    """What is transparent is white."""
    image = COLOURS.convert(mode)
    data = written(image, "TIFF" if mode == "CMYK" else "PNG")
    for one, made in ((image, as_image(image)), (Image.open(io.BytesIO(data)), decode_image(data))):
        assert np.array_equal(made, convert_to_rgb(one, return_numpy=True))


def test_a_transparent_colour() -> None:
    image = COLOURS.convert("P")
    found = Image.open(io.BytesIO(written(image, transparency=image.getpixel((0, 0)))))
    made = as_image(found)
    assert np.array_equal(made, convert_to_rgb(found, return_numpy=True))
    assert made[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif(turn: int) -> None:
    """Photographs are seen upright."""
    exif = Image.Exif()
    exif[0x112] = turn
    data = written(COLOURS.convert("RGB"), "JPEG", exif=exif)
    wanted = load_image(base64.b64encode(data).decode())
    assert np.array_equal(decode_image(data), np.asarray(wanted))
    assert decode_image(data).shape == ((9, 7, 3) if turn < 5 else (7, 9, 3))


def test_exif_that_is_damaged() -> None:
    assert decode_image(written(COLOURS.convert("RGB"), "JPEG", exif=b"Exif\0\0junk")).shape == (9, 7, 3)


def test_16_bits() -> None:
    """The upper 8 of them."""
    levels = RNG.integers(0, 1 << 16, (5, 6), np.uint16)
    made = decode_image(written(Image.fromarray(levels)))
    assert np.array_equal(made, np.repeat((levels >> 8).astype(np.uint8)[:, :, None], 3, 2))


@pytest.mark.parametrize("form", ["data:image/png;base64,{}", "DATA:;BASE64,{}"])
def test_urls(form: str) -> None:
    """Lines may be broken, and characters escaped."""
    image = COLOURS.convert("RGB")
    text = base64.encodebytes(written(image)).decode()
    assert "\n" in text.strip()
    for body in (text, text.replace("+", "%2B").replace("=", "%3D")):
        assert np.array_equal(pixels(from_url(form.format(body))), np.asarray(image))
