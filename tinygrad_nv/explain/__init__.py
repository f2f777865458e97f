"""`explain(*tensors)`: the kernels that will run, and why, without running anything.

Protocol. `explain` schedules the tensors as `realize` would, on copies: the calls it makes return new graphs,
and the map that would put buffers into the tensors is dropped. It leaves both caches alone: the schedule
cache, because a hit would skip the rewrites and their near misses; and tinygrad's program cache, because only
names and counts of its kernels are needed, for which its code generator runs as far as the last graph
(nothing is rendered or compiled). Devices are opened, since generated code depends on them.

There is one record for each call that `realize` would make: kernels, and copies too, because they take time
and memory traffic. Operations and bytes are those tinygrad counts (GlobalCounters.global_ops and .global_mem
after the run), with the values that variables are bound to. With BEAM set, tinygrad's kernels that run may
have other names.

Kernels of this package have text; matmuls (their note holds a spec and a schedule) can be shown at several
levels: `Lowering.show("tile")`, see levels.py and levels_cpu.py. On a CPU, kernels of this package have a
predicted time, from the measured rates of the machine (cpu/measure.py).

Reading order: `scheduled.py` (the kernels), `lowering.py` (their records), the levels. They are loaded with
the first call.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinygrad import Tensor

if TYPE_CHECKING:
    from tinygrad_nv.explain.lowering import KernelRecord, Lowering, repetitions
    from tinygrad_nv.explain.scheduled import count_work

__all__ = ["KernelRecord", "Lowering", "count_work", "explain", "repetitions"]

LATER = {"KernelRecord": "lowering", "Lowering": "lowering", "repetitions": "lowering",
         "count_work": "scheduled"}


def explain(*tensors: Tensor) -> Lowering:
    """The kernels that `Tensor.realize(*tensors)` would run now: none for realized or constant tensors."""
    from tinygrad_nv.explain.scheduled import lowering
    return lowering(*tensors)


if not TYPE_CHECKING:
    def __getattr__(name: str) -> Any:
        """Returns a name that `LATER` has."""
        if name not in LATER: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
