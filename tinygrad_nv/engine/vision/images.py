"""Images as RGB bytes [height, width, 3], from what callers have.

Protocol: `as_images(value)` takes one or a list of NumPy arrays and PIL images, as vLLM's multi_modal_data;
`from_url(url)` reads data URLs, and files where `local` allows it. Nothing is downloaded. pillow, the extra
`image`, decodes files; an image's size is checked before it is decoded. All raise `RequestError`.
"""
from __future__ import annotations

import base64
import binascii
import io
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np

from tinygrad_nv.errors import RequestError

MAX_PIXELS = 1 << 26    # of an image before it is resized: 192 MiB of RGB bytes
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
    try: return np.asarray(value.convert("RGB"))
    except Exception as error: raise _damaged(error) from error     # decoders raise arbitrary exceptions


def decoded(data: bytes) -> np.ndarray:
    """The image of a file: PNG, JPEG and what else pillow reads."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError("an image file, and pillow is not installed", "pillow",
                           "pip install '.[image]'") from error
    try: found = Image.open(io.BytesIO(data))
    except Exception as error: raise _damaged(error) from error
    return as_image(found)


def from_url(url: str, local: bool = False) -> np.ndarray:
    """The image of a URL."""
    scheme = urlsplit(url[:256]).scheme
    if scheme == "data":
        head, comma, body = url.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RequestError(f"the image URL {url[:40]!r}", "data:image/png;base64,…",
                               "encode the file as base64")
        try: return decoded(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise RequestError(f"an image URL whose data is no base64: {error}", "base64",
                               "encode the file as base64") from error
    if scheme == "file" and local:
        path = Path(url2pathname(unquote(urlsplit(url).path)))
        try: return decoded(path.read_bytes())
        except OSError as error:
            raise RequestError(f"the image {path} cannot be read: {error.strerror}", "a readable file",
                               "check the path") from error
    raise RequestError(f"the image URL {url[:60]!r}", "a data URL" + " or a file URL" * local +
                       ": images are not downloaded", "send data:image/png;base64,…")


def _fitting(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(f"an image of {width} × {height} pixels", f"at most {MAX_PIXELS} pixels",
                           "make it smaller")


def _damaged(error: Exception) -> RequestError:
    return RequestError(f"an image that cannot be decoded: {str(error)[:100]}", "a PNG or JPEG file",
                        "check that it opens elsewhere")
