"""Fixtures of the tests of CUDADriver: a fake driver library, and a GPU on it that leaves nothing."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_fake import Fake, installed
from test_driver import Numbers

from tinygrad_nv.runtime.cuda import CUDADriver


@pytest.fixture
def fake() -> Iterator[Fake]:
    with installed(gpus=2) as fake: yield fake


@pytest.fixture
def gpu(fake: Fake) -> Iterator[CUDADriver]:
    gpu = CUDADriver()
    yield gpu
    gpu.close()
    assert fake.left() == {}


@pytest.fixture
def numbers(gpu: CUDADriver) -> Numbers: return Numbers(gpu)
