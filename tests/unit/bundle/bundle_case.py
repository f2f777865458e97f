"""What tests of bundles share."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tinygrad_nv.bundle.container import open_bundle
from tinygrad_nv.errors import BundleError


def check_all(file: Path) -> None: open_bundle(file).verify()


def flips(file: Path, bits: list[int], check: Callable[[Path], None] = check_all) -> None:
    """Each flipped bit is refused, by the name of the part that it is in."""
    bundle = open_bundle(file)
    places = [(bundle.start + each.offset, each.nbytes, each.name) for each in bundle.manifest.parts
              if not each.ranges]
    with file.open("r+b") as opened:
        for bit in bits:
            at = bit // 8
            [before] = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([before ^ 1 << bit % 8]), at)
            name = next((name for start, size, name in places if start <= at < start + size), "")
            with pytest.raises(BundleError) as raised: check(file)
            assert name in str(raised.value), (bit, name, str(raised.value))
            os.pwrite(opened.fileno(), bytes([before]), at)
    check(file)
