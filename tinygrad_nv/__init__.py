"""tinygrad_nv: NVIDIA-native lowering for tinygrad.

Protocol: `from tinygrad_nv import Tensor, nn, TinyJit` gives tinygrad's own objects; importing this package
is what changes how they are lowered. `enable`, `disable` and `disabled()` switch that at run time and NV=0 in
the environment leaves it off. `explain(tensor)` says which kernel will run for what, and why.

Reading order: `hooks` (where tinygrad is joined), `patterns/program` (a kernel of ours in the graph),
`explain`.
"""
# ruff: noqa: E402  (Ctrl-C is the command's before anything takes time)
from tinygrad_nv import interrupt

interrupt.starting()

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

from tinygrad import (
    Context,
    Device,
    GlobalCounters,
    Tensor,
    TinyJit,
    UOp,
    Variable,
    dtypes,
    function,
    nn,
)

from tinygrad_nv import config, functional, hooks
from tinygrad_nv.errors import NVError
from tinygrad_nv.explain import KernelRecord, Lowering, explain
from tinygrad_nv.hooks import disable, disabled, enable, enabled
from tinygrad_nv.patterns import building, registered, settle
from tinygrad_nv.runtime import cuda_device, programs, ranges
from tinygrad_nv.runtime.device import EMUDevice
from tinygrad_nv.runtime.memory_pool import memory_report
from tinygrad_nv.runtime.ranges import layer

__all__ = ["LLM", "Context", "Device", "GlobalCounters", "KernelRecord", "Lowering", "SamplingParams",
           "Tensor", "TinyJit", "UOp", "Variable", "disable", "disabled", "dtypes", "enable", "enabled",
           "explain", "function", "layer", "memory_report", "nn", "timeline"]


class _ModelsFinder(MetaPathFinder):
    """Finds tinygrad_nv.models in a checkout, where models/ stands beside the package. Installed, it is
    inside, and found before this finder is asked."""

    def __init__(self, package: Path) -> None: self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        models = self.package.parent / "models"
        if name != "tinygrad_nv.models" or not (models.parent / "pyproject.toml").is_file(): return None
        return spec_from_file_location(name, models / "__init__.py", submodule_search_locations=[str(models)])


def __getattr__(name: str) -> object:
    """`LLM`, `SamplingParams` and `timeline`, loaded when asked for: importing tinygrad_nv stays as fast as
    tinygrad."""
    if name == "LLM":
        from tinygrad_nv.engine.llm import LLM
        return LLM
    if name == "SamplingParams":
        from tinygrad_nv.engine.sampling import SamplingParams
        return SamplingParams
    if name == "timeline":
        from tinygrad_nv.runtime.timeline import timeline
        return timeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.meta_path.append(_ModelsFinder(Path(__file__).resolve().parent))

functional.register()
registered.register()
hooks.add_check("building", building.checked)
hooks.add_compile("programs", programs.cached)
hooks.add_compile("program", settle.settle)
hooks.install_cpu()
hooks.install_threads()
hooks.add_device("EMU", EMUDevice)
try:
    ranges.enable_nvtx()
    if config.get("NV"):
        # NV=0 gives a program tinygrad as it is; EMU is no name of tinygrad's
        cuda_device.register()
        enable()
except NVError as error:
    # the command line cannot catch what happens before it is imported
    if Path(sys.argv[0]).stem not in ("tinygrad-nv", "-m"): raise
    print(f"tinygrad-nv: {error}", file=sys.stderr)
    raise SystemExit(error.exit_code) from error
