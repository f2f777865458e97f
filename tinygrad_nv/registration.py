"""Registration at import: rewrites, methods and devices; and the names that tinygrad_nv gives."""
import sys
from collections.abc import Callable
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

from tinygrad_nv import config, corrected, dlpack, functional, hooks
from tinygrad_nv.errors import NVError
from tinygrad_nv.explain import explain
from tinygrad_nv.hooks import disable, disabled, enable, enabled
from tinygrad_nv.runtime import programs
from tinygrad_nv.runtime.cpu import device as cpu_device
from tinygrad_nv.runtime.cuda import device as cuda_device
from tinygrad_nv.runtime.device import EMUDevice
from tinygrad_nv.runtime.memory_pool import memory_report
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.runtime.observe.ranges import layer
from tinygrad_nv.shapes import types

__all__ = ["Context", "Device", "GlobalCounters", "Tensor", "TinyJit", "UOp", "Variable", "disable",
           "disabled", "dtypes", "enable", "enabled", "explain", "function", "layer", "memory_report", "nn"]


def _reductions() -> Callable[[UOp], UOp]:
    from tinygrad_nv.dist.collectives import sharded
    return sharded.rewrite


def _lowerings() -> None:
    """The rewrites: with the families and their specs most of what there is to import, so a program that
    lowers nothing, as one of a bundle, does without."""
    from tinygrad_nv.patterns import building, registered, rewriting
    registered.register()
    rewriting.set_allreduce_lowering(_reductions)
    hooks.add_check("building", building.builds_all)


def _finalize(linear: UOp, inner: hooks.Compile) -> UOp:
    from tinygrad_nv.patterns.program import finalize
    return finalize(linear, inner)


functional.register()
corrected.register()
dlpack.register()
types.register()
hooks.add_later(_lowerings)
hooks.add_compile("programs", programs.compile_cached)
hooks.add_compile("program", _finalize)
cpu_device.install()
hooks.install_threads()
hooks.install_captures()
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
