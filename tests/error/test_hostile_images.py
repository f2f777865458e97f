"""Images that are small files and large in memory are refused by their headers, or decoded within 9 bytes a
pixel."""
from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tinygrad_nv.engine.vision import images
from tinygrad_nv.engine.vision.images import decode_image, from_url, open_image, pixels, require_budget
from tinygrad_nv.engine.vision.parts import all_with_placeholders
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.media_budget import MediaBudget


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *more: bytes, colour: int = 0, bits: int = 1) -> bytes:
    """A file without pixels: its header is all that is read."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + \
        chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def url(data: bytes) -> str: return "data:image/png;base64," + base64.encodebytes(data).decode()


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **how)
    return made.getvalue()


def test_a_request_of_many_pixels() -> None:
    """16 files of 8192² decode to 3.6 GiB: sizes are added before anything is decoded."""
    parts = [{"type": "image_url", "image_url": {"url": url(png(8192, 8192))}}] * 16
    _, found = all_with_placeholders([{"role": "user", "content": parts}], False)
    assert [each.shape for each in found] == [(8192, 8192, 3)] * 16
    with pytest.raises(RequestError, match=r"16 images of 1073741824 pixels together\n.*at most 134217728"):
        require_budget(found, 1 << 27)
    require_budget([open_image(png(1024, 1024))] * 128, 1 << 27)
    require_budget([open_image(png(4000, 3000))], 1 << 27)


BMP = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
GIF = b"GIF89a\x09\0\x09\0\0\0\0,\0\0\0\0" + struct.pack("<HHB", 60_000, 60_000, 0) + b"\2\1\0\0;"
TEXT = zlib.compress(bytes(64 << 20), 9)


@pytest.mark.parametrize(("data", "words"), [
    (png(8193, 8192), "8193 × 8192 pixels\n.*at most 67108864"), (png(1 << 30, 1 << 30), "at most 67108864"),
    (BMP, "too large"), (GIF, "too large"),
    (png(8, 8, chunk(b"zTXt", b"k\0\0" + TEXT)), "Decompressed data too large"),
    (png(8, 8, *[chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 20)))] * 80), "Too much memory"),
    (png(8, 8, chunk(b"iCCP", b"k\0\0" + TEXT)), "Decompressed data too large"),
    (png(8, 8, chunk(b"iTXt", b"k\0\1\0\0\0" + TEXT)), "Decompressed data too large"),
    (png(9, 9, colour=2, bits=8), "cannot be decoded")])
def test_headers(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words): decode_image(data)


def test_scans_and_inner_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan of a JPEG decodes all of it again; an icon's directory may say less than its PNG has."""
    data = saved(Image.new("RGB", (16, 16)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda"):-2]
    assert decode_image(data[:-2] + scan * 10 + data[-2:]).shape == (16, 16, 3)
    with pytest.raises(RequestError, match=r"a JPEG of \d+ scans\n.*at most 128"):
        decode_image(data[:-2] + scan * 200 + data[-2:])
    inner = png(2048, 1024)
    icon = struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    with pytest.raises(RequestError, match=r"2048 × 1024 pixels\n.*at most 1048576"): open_image(icon)
    assert decode_image(saved(Image.new("RGB", (64, 64)), "ICO")).shape == (64, 64, 3)
    monkeypatch.setattr(images, "MAX_BUFFERED_PIXELS", 63)
    with pytest.raises(RequestError, match="at most 63 pixels"):
        open_image(saved(Image.new("RGB", (8, 8)), "WEBP"))


def test_first_frames() -> None:
    frames = [Image.new("RGB", (8, 8), (index, 0, 0)) for index in range(9)]
    for kind, how in (("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True}), ("TIFF", {})):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **how)
        assert decode_image(data).tolist() == np.zeros((8, 8, 3), int).tolist()


def test_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    for path, words in ((Path("/dev/zero"), "a device"), (tmp_path / "fifo", "a FIFO"),
                        (tmp_path, "a directory"), (tmp_path / "large", "1099511627776 bytes")):
        with pytest.raises(RequestError, match=f"cannot be read: it (is|has) {words}"):
            from_url(path.as_uri(), local=True)
    with pytest.raises(RequestError, match="an image URL of 201326600 characters"):
        from_url("data:;base64," + "A" * 201_326_600)


@pytest.mark.parametrize("mode", ["RGB", "P", "CMYK", "LA"])
def test_strips(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of three rows, turned by EXIF, make what the whole image does."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (11, 7, 3), np.uint8)).convert(mode)
    whole = images.as_image(image)
    monkeypatch.setattr(images, "STRIP", 21)
    assert np.array_equal(images.as_image(image), whole)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = turn
        data = saved(image, "TIFF" if image.mode == "CMYK" else "PNG", exif=exif)
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(pixels(open_image(data)), images.as_image(upright))


async def _peak(budget: MediaBudget, sizes: list[int]) -> tuple[int, list[int]]:
    """The most bytes that were held, and the order in which requests of `sizes` came to hold theirs."""
    held, most, order = 0, 0, list[int]()

    async def one(size: int) -> None:
        nonlocal held, most
        async with budget.hold(size):
            order.append(size)
            held += size
            most = max(most, held)
            await asyncio.sleep(0.01)
            held -= size
    await asyncio.gather(*map(one, sizes))
    return most, order


def test_the_budget_of_all_requests() -> None:
    async def scenario() -> None:
        budget = MediaBudget(100)
        assert await _peak(budget, [60, 50, 10, 40, 90]) == (100, [60, 50, 10, 40, 90])
        most, _ = await _peak(budget, [30, 500, 30])        # larger than all: alone
        assert (most, budget.free) == (500, 100)
        async with budget.hold(100):        # a client that leaves while it waits
            task = asyncio.ensure_future(_peak(budget, [10]))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError): await task
        assert (budget.free, len(budget.waiting)) == (100, 0)
    asyncio.run(scenario())


SCAN = b"\xff\xda"
SMALL = saved(Image.new("RGB", (8, 8)), "JPEG")
PART = b"\xff\xe1\0\x0aExif\0\0ab"


def tiff(strips: int, big: bool = False) -> bytes:
    fields = [(256, 8), (257, 8), (258, 8), (259, 1), (273, 8)]
    entries = [struct.pack("<HHQQ" if big else "<HHII", tag, 4, strips if tag == 273 else 1, value)
               for tag, value in fields]
    head = struct.pack("<2sHHHQQ", b"II", 43, 8, 0, 16, 5) if big else struct.pack("<2sHIH", b"II", 42, 8, 5)
    return head + b"".join(entries) + bytes(200)


@pytest.mark.parametrize(("data", "words"), [
    (SMALL[:2] + PART * 65 + SMALL[2:], "a JPEG of 65 parts of EXIF\n.*at most 64"),
    (SMALL[:2] + b"\xff" * (2 << 20) + SMALL[3:], "read more than 1048576 times"),
    (b"P6 #" + b"a" * (2 << 20) + b"\n1 1 255\n000", "read more than 1048576 times"),
    (b"P3 1 1 255\n" + b" " * (5 << 20), "a PPM of text, of 5242891 bytes\n.*at most 4194304"),
    (tiff(8_000_000), "a TIFF of 8000000 strips\n.*at most 262144"),
    (tiff(8_000_000, True), "a TIFF of 8000000 strips\n.*at most 262144")],
    ids=["exif", "fill", "comment", "text", "tiff", "bigtiff"])
def test_files_of_many_blocks(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words): decode_image(data)


def test_files_of_some_blocks() -> None:
    """An MPO of many scans is refused as the JPEG that it is; usual files are read."""
    made = saved(Image.new("RGB", (8, 8)), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert decode_image(made).shape == (8, 8, 3)
    at = made.index(SCAN)
    with pytest.raises(RequestError, match=r"a JPEG of \d+ scans"):
        decode_image(made[:at] + made[at:made.index(b"\xff\xd9", at)] * 200 + made[at:])
    for data in (SMALL[:2] + PART * 60 + SMALL[2:], b"P3 1 1 255\n1 2 3", tiff(1), tiff(1, True)):
        assert decode_image(data).size


def test_large_images_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    """Pillow warns of 89 million pixels on stderr."""
    with pytest.raises(RequestError, match=r"10000 × 10000 pixels\n.*at most 67108864"):
        open_image(png(10_000, 10_000))
    assert not recwarn.list
