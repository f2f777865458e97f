"""What `wgmma` kernels ask of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec


def problems(schedule: Schedule, spec: GemmSpec, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    return ["wgmma kernels are not written yet"]
