"""Tests that need an NVIDIA GPU. Without one, or without what launches kernels on it, each file is skipped as
it is collected, with the reason.

The suites of the emulator and of the driver interface run here: `on_device` puts the GPU in the emulator's
place in gemm_case.py.
"""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu.launch import GemmLauncher
from tests.support.tile import gemm_case
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.runtime.cuda import driver as cuda
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel


class LeftOut(pytest.File):
    """A file that cannot run here."""

    def collect(self):
        pytest.skip(f"{self.path.name} needs {cuda.NEEDED}: {cuda.missing()}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Nothing of a test file is imported without a GPU."""
    return LeftOut.from_parent(parent, path=module_path) if cuda.missing() else None


@pytest.fixture(scope="session")
def device() -> Iterator[CUDADriver]:
    """The GPU, for the whole run."""
    device = CUDADriver()
    yield device
    device.close()


def launched_on(device: CUDADriver, made: GemmKernel, spec: GemmSpec, given: dict[str, torch.Tensor],
                m: int | None) -> torch.Tensor:
    """The storage of the result after a launch on a device."""
    launcher = GemmLauncher(device, made)
    addresses = {name: device.alloc(storage.nbytes) for name, storage in given.items()}
    try:
        for name, storage in given.items():
            device.copy_in(addresses[name], memoryview(gemm_case.bits(storage)))
        launcher.bind_launch(spec, addresses, m)(None)
        out = bytearray(given["out"].nbytes)
        device.copy_out(memoryview(out), addresses["out"])
    finally:
        launcher.close()
        for address in addresses.values(): device.free(address)
    return torch.frombuffer(out, dtype=given["out"].dtype)


@pytest.fixture
def on_device(device: CUDADriver, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels run on the GPU; its architecture."""
    def on_gpu(made: GemmKernel, spec: GemmSpec, given: dict[str, torch.Tensor], arch: str, seed: int = 0,
               m: int | None = None, check: bool = True) -> tuple[torch.Tensor, Report]:
        return launched_on(device, made, spec, given, m), Report()
    monkeypatch.setattr(gemm_case, "launched", on_gpu)
    return device.properties.arch
