"""Fixtures of the tests of CUDADriver: a fake driver library with two GPUs, and the first of them as a driver
that leaves nothing. Fixtures of the tests of hooks: none of ours, and one rewrite for the CPU. The CPU as the
device of Tensors."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tinygrad.helpers import Context


@pytest.fixture
def cpu_device() -> Iterator[None]:
    """Tensors that name no device are on the CPU."""
    with Context(DEV="CPU"): yield


@pytest.fixture
def fake() -> Iterator[Any]:
    from tests.support.runtime.cuda_fake import installed
    with installed(gpus=2) as fake: yield fake


@pytest.fixture
def gpu(fake: Any) -> Iterator[Any]:
    from tinygrad_nv.runtime.cuda.driver import CUDADriver
    gpu = CUDADriver()
    yield gpu
    gpu.close()
    assert fake.left() == {}


@pytest.fixture
def numbers(gpu: Any) -> Any:
    from tests.unit.runtime.test_driver import Numbers
    return Numbers(gpu)


@pytest.fixture(scope="module")
def without_ours() -> Iterator[None]:
    """For tests that are about what they register themselves."""
    from tinygrad_nv import hooks
    from tinygrad_nv.patterns import registered
    registered.remove()
    # what NV_DEBUG=1 looks at pages with stays once a test has asked for it
    functions = dict(hooks._functions)
    for name in functions: hooks.remove_custom_function(name)
    yield
    for name, each in functions.items(): hooks.add_custom_function(name, each.execute, each.outs_ins)
    registered.register()


@pytest.fixture
def as_found(without_ours: None) -> Iterator[None]:
    """Every test starts enabled with nothing of its own registered, and must leave it so."""
    from tinygrad_nv import hooks
    from tinygrad_nv.hooks import devices as hook_devices
    from tinygrad_nv.hooks import methods as hook_methods
    from tinygrad_nv.hooks import rewrites as hook_rewrites
    tables = (hook_rewrites.rewrites, hook_rewrites.checks, hooks._compiles, hooks._executes,
              hooks._functions, hook_devices._devices, hook_methods._methods)
    before = [dict(table) for table in tables], hooks.enabled()
    yield
    assert ([dict(table) for table in tables], hooks.enabled()) == before


@pytest.fixture
def silu(as_found: None) -> Iterator[None]:
    from tests.support.patterns import silu_mul
    from tinygrad_nv import hooks
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    yield
    hooks.remove_rewrite("silu_mul")
