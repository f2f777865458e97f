"""DEV=CUDA on a GPU, with both renderers: the programs of tests/emu/runtime/test_device_cuda.py that ask
nothing of the fake. Two devices are compared on PYTHON, tinygrad's interpreter: a machine with a GPU need
not have the clang of the CPU device."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tinygrad.helpers import Context

from tests.emu.runtime import test_device_cuda
from tests.emu.runtime.test_device_cuda import (  # noqa: F401
    test_float32_products_keep_their_digits,
    test_floats,
    test_integers_are_exact,
    test_narrow_floats_round_as_they_must,
    test_narrow_integers_wrap,
    test_random_numbers_are_those_of_the_cpu,
)
from tests.support.runtime.on_cuda import on_both


@pytest.fixture(params=["CUDA", "PTX"])
def fake(request: pytest.FixtureRequest) -> Iterator[None]:
    """In place of the fake, GPU 0."""
    with Context(DEV=f"CUDA:{request.param}"): yield


@pytest.fixture(autouse=True)
def without_clang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_device_cuda, "on_both", partial(on_both, device="PYTHON"))
