"""Images as RGB bytes [height, width, 3], from what callers have.

Protocol: `as_images(value)` takes one or a list of NumPy arrays, PIL images and `ImageFile`s, as vLLM's
multi_modal_data; `from_url(url)` opens data URLs, and files where `local` allows it. Nothing is downloaded.
pillow, the extra `image`, decodes files. An `ImageFile` has its size from the file's header: budgets are
checked before anything is decoded, and `pixels(image)` decodes one when its turn comes. As transformers has
it, images are turned as their EXIF says, and what is transparent is white. All raise `RequestError`.

An image of n pixels takes 7 n bytes while it is decoded: pillow's 4 n, and 3 n of RGB, which are filled by
strips. The decoders of some formats make copies of their own, so fewer pixels are allowed there.
"""
from __future__ import annotations

import base64
import contextlib
import io
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np

from tinygrad_nv.errors import RequestError
from tinygrad_nv.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 1 << 26        # limit: pixels of an image, before it is resized
MAX_BUFFERED_PIXELS = 1 << 25   # limit: pixels of a WebP, AVIF or JPEG 2000, which take 8 to 12 bytes more
MAX_FILE_BYTES = 128 << 20  # limit: bytes of an image's file, as it is stored
MAX_SCANS = 128             # limit: scans of a JPEG, each of which decodes all of it; cameras write up to 14
MAX_READS = 1 << 20         # limit: reads of an image's file, one or more for each block; 1 s of a core
MAX_EXIF = 64               # limit: parts of a JPEG's EXIF, since each copies those before; usual is 1
MAX_PLAIN_BYTES = 4 << 20   # limit: bytes of a PPM whose numbers are text, which are read one by one
MAX_STRIPS = 1 << 18        # limit: strips or tiles of a TIFF
MAX_ICON_PIXELS = 1 << 20   # limit: pixels of an ICO, whose directory says at most 256²
ICON, PLAIN = b"\0\0\1\0", (b"P1", b"P2", b"P3")
# TIFF and BigTIFF: the byte order, where the first directory is, its count, and the size of an entry
TIFF = {b"II*\0": ("<", "I", 4, "H", 12), b"MM\0*": (">", "I", 4, "H", 12),
        b"II+\0": ("<", "Q", 8, "Q", 20), b"MM\0+": (">", "Q", 8, "Q", 20)}
STRIPS = (273, 279, 324, 325)   # fields of TIFF with a number for each strip or tile
STRIP = 1 << 20             # pixels that are converted at a time
ORIENTATION = 0x112         # the field of EXIF
# pillow's names of formats: others (EPS, WMF) are read by other programs
BUFFERED = ("WEBP", "AVIF", "JPEG2000")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO", "TGA")
WANTED = "RGB bytes, uint8 [height, width, 3], or an image of PIL"


@dataclass(frozen=True, eq=False)
class ImageFile:
    """The bytes of a file. `shape` [height, width, 3] of its first frame is what its header says; EXIF may
    exchange the first two."""
    data: bytes
    shape: tuple[int, int, int]


AnImage = np.ndarray | ImageFile


def as_images(value: Any) -> tuple[AnImage, ...]:
    """One image or a list of them."""
    return tuple(map(as_image, value)) if isinstance(value, list | tuple) else (as_image(value),)


def as_image(value: Any) -> AnImage:
    """One image; an `ImageFile` as it is."""
    if isinstance(value, ImageFile): return value
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
    return _rgb(value)


def pixels(image: AnImage) -> np.ndarray:
    """RGB bytes; decodes a file."""
    if isinstance(image, np.ndarray): return image
    height, width, _ = image.shape
    found = _read_header(image.data)
    made = _rgb(found)
    if made.shape[0] * made.shape[1] != height * width:
        raise RequestError(f"an image of {made.shape[1]} × {made.shape[0]} pixels, and its header says "
                           f"{width} × {height}", "a file that says its size", "convert it to PNG")
    return made


def open_image(data: bytes) -> ImageFile:
    """Returns the image of a file: PNG, JPEG and what else pillow reads. Decodes nothing yet."""
    found = _read_header(data)
    width, height = found.size
    _fitting(width, height, MAX_BUFFERED_PIXELS if found.format in BUFFERED else MAX_PIXELS)
    return ImageFile(data, (height, width, 3))


def decode_image(data: bytes) -> np.ndarray:
    """Returns the pixels of such a file."""
    return pixels(open_image(data))


def require_budget(images: Sequence[AnImage], most: int) -> None:
    """Raises `RequestError` for images of more than `most` pixels together."""
    total = sum(each.shape[0] * each.shape[1] for each in images)
    if total > most:
        raise RequestError(f"{len(images)} images of {total} pixels together", f"at most {most}",
                           "send fewer or smaller images, or raise --max-image-pixels")


def decoding_bytes(image: AnImage) -> int:
    """Returns the bytes that an image takes until a model has read it: 8 of a pixel while it is decoded, and
    24 in patches of float32, two frames each, of the pixels that image processors leave."""
    count = image.shape[0] * image.shape[1]
    return 8 * count + 24 * min(count, 1 << 24)


class _Counted(io.BytesIO):
    """A file that is read so many times at most: one of many small blocks takes long."""
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > MAX_READS:
            raise RequestError(f"an image file of so many blocks that it is read more than {MAX_READS} times",
                               f"at most {MAX_READS} reads", "convert it to PNG")
        return super().read(size)


def _read_header(data: bytes) -> Image:
    """Returns the image of a file, whose header has been read."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise RequestError("an image file, and pillow is not installed", "pillow",
                           "pip install 'tinygrad-nv[image]'") from error
    Image.init()
    if data.startswith(ICON): _require_small_icon(data)
    _require_short(data)
    # of large images and damaged EXIF, on stderr; threads share filters, so none is set for a while only
    warnings.filterwarnings("ignore", module="PIL")
    try: found = Image.open(_Counted(data), formats=[each for each in FORMATS if each in Image.OPEN])
    except UnidentifiedImageError as error:
        raise RequestError("an image that cannot be decoded: its format is not known",
                           ", ".join(FORMATS), "convert it to PNG") from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"an image that is too large: {str(error)[:100]}", f"at most {MAX_PIXELS} pixels",
                           "make it smaller") from error
    except Exception as error: raise _decode_error(error) from error
    # several images in one file are an MPO
    if found.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise RequestError(f"a JPEG of {scans} scans", f"at most {MAX_SCANS}", "convert it to PNG")
    return found


def _require_short(data: bytes) -> None:
    """Raises `RequestError` for what pillow works on for long in few reads."""
    if data.startswith(b"\xff\xd8") and (parts := data.count(b"Exif\0\0")) > MAX_EXIF:
        raise RequestError(f"a JPEG of {parts} parts of EXIF", f"at most {MAX_EXIF}", "convert it to PNG")
    if data.startswith(PLAIN) and len(data) > MAX_PLAIN_BYTES:
        raise RequestError(f"a PPM of text, of {len(data)} bytes", f"at most {MAX_PLAIN_BYTES}",
                           "convert it to PNG")
    if (strips := _strips(data)) > MAX_STRIPS:
        raise RequestError(f"a TIFF of {strips} strips", f"at most {MAX_STRIPS}", "convert it to PNG")


def _strips(data: bytes) -> int:
    """Strips or tiles of a TIFF's first image; 0 of other files, and of one that pillow refuses."""
    order, offset, at, count, size = TIFF.get(data[:4], ("", "", 0, "", 0))
    most = 0
    with contextlib.suppress(struct.error):
        if order:
            first, = struct.unpack_from(order + offset, data, at)
            entries, = struct.unpack_from(order + count, data, first)
            first += struct.calcsize(order + count)
            for each in range(min(entries, len(data) // size)):
                tag, _, values = struct.unpack_from(f"{order}HH{offset}", data, first + each * size)
                if tag in STRIPS: most = max(most, values)
    return most


def _require_small_icon(data: bytes) -> None:
    """Raises `RequestError` for an icon with a large image, which pillow decodes as it opens the file."""
    from PIL.IcoImagePlugin import IcoFile
    try: width, height = IcoFile(io.BytesIO(data)).frame(0).size
    except Exception as error: raise _decode_error(error) from error
    _fitting(width, height, MAX_ICON_PIXELS)


def _rgb(image: Any) -> np.ndarray:
    """An image of PIL as RGB bytes, upright, on white; strips are converted one by one."""
    try: image.load()
    except Exception as error: raise _decode_error(error) from error     # decoders raise arbitrary exceptions
    try:
        turn, (width, height) = _orientation(image), image.size
        made = np.empty((width, height, 3) if turn > 4 else (height, width, 3), np.uint8)
        rows, upright = max(1, STRIP // width), _undo_orientation(made, turn)
        for top in range(0, height, rows):
            strip = image.crop((0, top, width, min(top + rows, height)))
            upright[top:top + rows] = np.asarray(_on_white(strip))
        return made
    except Exception as error: raise _decode_error(error) from error


def _orientation(image: Any) -> int:
    """1 to 8, as EXIF has it; EXIF that cannot be read turns nothing."""
    found: object = 1
    with contextlib.suppress(SyntaxError, ValueError, TypeError, struct.error):
        found = image.getexif().get(ORIENTATION)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _undo_orientation(upright: np.ndarray, turn: int) -> np.ndarray:
    """Returns a view of an image as it was before EXIF's orientation turned it."""
    view = upright.transpose(1, 0, 2) if turn > 4 else upright
    return view[::-1 if turn in (3, 4, 6, 7) else 1, ::-1 if turn in (2, 3, 7, 8) else 1]


def _on_white(image: Any) -> Any:
    """An image of PIL in RGB, what is transparent white."""
    from PIL import Image
    if image.mode.startswith("I;16"):   # pillow cuts these off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" not in image.getbands() and image.info.get("transparency") is None: return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def from_url(url: str, local: bool = False) -> ImageFile:
    """The image of a URL, not yet decoded."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RequestError(f"the image URL {url[:40]!r}", "data:image/png;base64,…",
                               "encode the file as base64")
        if len(body) > MAX_FILE_BYTES * 3 // 2:
            raise RequestError(f"an image URL of {len(body)} characters", f"at most {MAX_FILE_BYTES} bytes",
                               "make the image smaller")
        if "%" in body: body = unquote(body)
        # programs such as base64 break lines
        try: data = base64.b64decode("".join(body.split()), validate=True)
        except ValueError as error:
            raise RequestError(f"an image URL whose data is no base64: {error}", "base64",
                               "encode the file as base64") from error
        return open_image(data)
    if scheme == "file" and local:
        try: data = read_bytes(url2pathname(unquote(urlsplit(url).path)), MAX_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise RequestError(f"the image {url[:200]!r} cannot be read: {getattr(error, 'strerror', error)}",
                               "a readable file", "check the path") from error
        return open_image(data)
    raise RequestError(f"the image URL {url[:60]!r}", "a data URL" + " or a file URL" * local +
                       ": images are not downloaded", "send data:image/png;base64,…")


def _fitting(width: int, height: int, most: int = MAX_PIXELS) -> None:
    if width * height < 1: raise RequestError(f"an image of {width} × {height} pixels", "at least one pixel")
    if width * height > most:
        raise RequestError(f"an image of {width} × {height} pixels", f"at most {most} pixels",
                           "make it smaller")


def _decode_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError): return error
    return RequestError(f"an image that cannot be decoded: {str(error)[:100]}", "a PNG or JPEG file",
                        "check that it opens elsewhere")
