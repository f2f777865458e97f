"""Images as RGB bytes [height, width, 3], from what callers have.

Protocol: `as_images(value)` takes one or a list of NumPy arrays and PIL images, as vLLM's multi_modal_data;
`from_url(url)` reads data URLs, and files where `local` allows it. Nothing is downloaded. pillow, the extra
`image`, decodes files; an image's size is checked before it is decoded. As transformers has it, images are
turned as their EXIF says, and what is transparent is white. All raise `RequestError`.
"""
from __future__ import annotations

import base64
import contextlib
import io
import struct
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np

from tinygrad_nv.errors import RequestError

MAX_PIXELS = 1 << 26    # of an image before it is resized: 192 MiB of RGB bytes
# pillow's names of formats: others (EPS, WMF) are read by other programs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
WANTED = "RGB bytes, uint8 [height, width, 3], or an image of PIL"


def as_images(value: Any) -> tuple[np.ndarray, ...]:
    """One image or a list of them."""
    return tuple(map(as_image, value)) if isinstance(value, list | tuple) else (as_image(value),)


def as_image(value: Any) -> np.ndarray:
    """One image."""
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise RequestError(f"an image of dtype {value.dtype} and shape {list(value.shape)}", WANTED,
                               "convert it, or pass an image of PIL")
        _fitting(value.shape[1], value.shape[0])
        return value
    if not hasattr(value, "convert") or not hasattr(value, "size"):
        raise RequestError(f"an image of type {type(value).__name__}", WANTED,
                           "open it: PIL.Image.open(path)")
    _fitting(*value.size)
    try: return np.asarray(_rgb(value))
    except Exception as error: raise _damaged(error) from error     # decoders raise arbitrary exceptions


def _rgb(image: Any) -> Any:
    """An image of PIL in RGB, upright, on white."""
    from PIL import Image, ImageOps
    # EXIF that cannot be read turns nothing
    with contextlib.suppress(SyntaxError, ValueError, TypeError, struct.error):
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):   # pillow cuts these off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None: return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def decoded(data: bytes) -> np.ndarray:
    """The image of a file: PNG, JPEG and what else pillow reads."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise RequestError("an image file, and pillow is not installed", "pillow",
                           "pip install 'tinygrad-nv[image]'") from error
    Image.init()
    try: found = Image.open(io.BytesIO(data), formats=[each for each in FORMATS if each in Image.OPEN])
    except UnidentifiedImageError as error:
        raise RequestError("an image that cannot be decoded: its format is not known",
                           ", ".join(FORMATS), "convert it to PNG") from error
    except Exception as error: raise _damaged(error) from error
    return as_image(found)


def from_url(url: str, local: bool = False) -> np.ndarray:
    """The image of a URL."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RequestError(f"the image URL {url[:40]!r}", "data:image/png;base64,…",
                               "encode the file as base64")
        if "%" in body: body = unquote(body)
        # programs such as base64 break lines
        try: data = base64.b64decode("".join(body.split()), validate=True)
        except ValueError as error:
            raise RequestError(f"an image URL whose data is no base64: {error}", "base64",
                               "encode the file as base64") from error
        return decoded(data)
    if scheme == "file" and local:
        try: data = Path(url2pathname(unquote(urlsplit(url).path))).read_bytes()
        except (OSError, ValueError) as error:
            raise RequestError(f"the image {url[:200]!r} cannot be read: {getattr(error, 'strerror', error)}",
                               "a readable file", "check the path") from error
        return decoded(data)
    raise RequestError(f"the image URL {url[:60]!r}", "a data URL" + " or a file URL" * local +
                       ": images are not downloaded", "send data:image/png;base64,…")


def _fitting(width: int, height: int) -> None:
    if width * height < 1: raise RequestError(f"an image of {width} × {height} pixels", "at least one pixel")
    if width * height > MAX_PIXELS:
        raise RequestError(f"an image of {width} × {height} pixels", f"at most {MAX_PIXELS} pixels",
                           "make it smaller")


def _damaged(error: Exception) -> RequestError:
    return RequestError(f"an image that cannot be decoded: {str(error)[:100]}", "a PNG or JPEG file",
                        "check that it opens elsewhere")
