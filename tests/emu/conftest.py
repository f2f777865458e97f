"""Devices of each architecture for the tests of DEV=EMU, and references whose sums are in order."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from tinygrad.helpers import Context

from tests.support.graphs.pool_case import device
from tinygrad_nv.runtime.device import NVDevice


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def gpu(request: pytest.FixtureRequest) -> NVDevice:
    """A device of each architecture, with every check on."""
    return device(arch=request.param)


@pytest.fixture(scope="module")
def hopper() -> NVDevice:
    """One device for what does not depend on the architecture."""
    return device()


@pytest.fixture
def in_order() -> Iterator[None]:
    """Sums of references are from first to last, and compiled sooner."""
    with Context(NOOPT=1): yield
