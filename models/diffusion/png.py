"""Images as PNG files, with how they were made, by pillow."""
from __future__ import annotations

import importlib
import io
from collections.abc import Mapping

import numpy as np

from tinygrad_nv.errors import ToolchainError

KEY = "parameters"      # of the text that tells how an image was made


def require_pillow() -> None:
    """Raises `ToolchainError` where pillow is not installed."""
    try: importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise ToolchainError("the Python package pillow is not installed", "pillow, which writes PNG",
                             "pip install 'tinygrad-nv[image]'") from error


def png(image: np.ndarray, told: Mapping[str, str] | None = None) -> bytes:
    """A PNG file of an image, uint8 (H, W, 3), with texts by their names. Raises `ToolchainError`."""
    require_pillow()
    from PIL import Image, PngImagePlugin
    texts, out = PngImagePlugin.PngInfo(), io.BytesIO()
    for name, text in (told or {}).items(): texts.add_itxt(name, text)
    Image.fromarray(image).save(out, "PNG", pnginfo=texts)
    return out.getvalue()
