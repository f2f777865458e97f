"""Tests that need an NVIDIA GPU. Without one, or without what launches kernels on it, each file is skipped as
it is collected, with the reason.

The suites of the emulator run here: `on_device` puts the GPU in the emulator's place in gemm_case.py.
"""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[1] / "emu"))
import gemm_case
import gemm_cuda
import torch

from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.spec import GemmSpec


class LeftOut(pytest.File):
    """A file that cannot run here."""

    def collect(self):
        pytest.skip(f"{self.path.name} needs {gemm_cuda.NEEDED}: {gemm_cuda.missing()}")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """Nothing of a test file is imported without a GPU."""
    return LeftOut.from_parent(parent, path=module_path) if gemm_cuda.missing() else None


def on_gpu(made: GemmKernel, spec: GemmSpec, given: dict[str, torch.Tensor], arch: str, seed: int = 0,
           m: int | None = None, check: bool = True) -> tuple[torch.Tensor, Report]:
    """`gemm_case.launched` on the GPU: the storage of the result, and a report without findings."""
    storages = {name: storage.cuda() for name, storage in given.items()}
    gemm_cuda.Loaded(made, arch).bound(spec, storages, m).launch()
    torch.cuda.synchronize()
    return storages["out"].cpu(), Report()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels run on the GPU; its architecture."""
    monkeypatch.setattr(gemm_case, "launched", on_gpu)
    return gemm_cuda.architecture()
