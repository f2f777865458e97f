"""Fixtures of the tests of CUDADriver: a fake driver library with two GPUs, and the first of them as a driver
that leaves nothing."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def fake() -> Iterator[Any]:
    from cuda_fake import installed
    with installed(gpus=2) as fake: yield fake


@pytest.fixture
def gpu(fake: Any) -> Iterator[Any]:
    from tinygrad_nv.runtime.cuda import CUDADriver
    gpu = CUDADriver()
    yield gpu
    gpu.close()
    assert fake.left() == {}


@pytest.fixture
def numbers(gpu: Any) -> Any:
    from test_driver import Numbers
    return Numbers(gpu)
