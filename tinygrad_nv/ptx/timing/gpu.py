"""GPUs in figures: gpus/*.toml, each figure with its source.

Protocol: `figures("h100")` reads one; names are those of the files.
"""
from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields
from importlib import resources

from tinygrad_nv.errors import ConfigError

_FOLDER = resources.files("tinygrad_nv.ptx.timing") / "gpus"


@dataclass(frozen=True)
class GPUFigures:
    """Rates and latencies; latencies in cycles of an SM, rates of the whole GPU unless they are an SM's."""
    name: str
    arch: str
    sms: int
    clock_hz: float
    l2_bytes: int
    hbm_bytes_per_s: float
    hbm_latency: int
    l2_bytes_per_cycle: float
    l2_latency: int
    tma_latency: int
    tma_issue: int
    write_latency: int
    shared_bytes_per_cycle: float
    shared_latency: int
    wgmma_latency: int
    wgmma_ahead: int
    mma_latency: int
    arrive_latency: int
    wait_latency: int
    launch_s: float


def known() -> tuple[str, ...]:
    """Names of the GPUs there are."""
    return tuple(sorted(each.name[:-5] for each in _FOLDER.iterdir() if each.name.endswith(".toml")))


@functools.cache
def figures(name: str) -> GPUFigures:
    """A GPU by its name. Raises `ConfigError` for one that is not there."""
    if name not in known():
        raise ConfigError(f"no figures of a GPU {name!r}", f"one of {', '.join(known())}",
                          "measure it with bench/gpu_calibrate.py")
    data = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    return GPUFigures(**{each.name: data[each.name] for each in fields(GPUFigures)})
