"""GPUs in figures: gpus/*.toml, each figure with its source.

Protocol: `figures("h100")` reads one; names are those of the files. `figures("my.toml")` reads one that
bench/gpu/calibrate.py wrote.
"""
from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.files import MAX_JSON_BYTES, read_text

MOST_FIGURE = 1_000_000    # cycles, watts and seconds
# of what is divided by, is a share, or goes beyond
RANGES: dict[str, tuple[float, float]] = {
    "sms": (1, 4096), "threads_of_sm": (32, 65536), "shared_bytes_of_sm": (1024, 1 << 24),
    "mma_macs": (1, 1e6), "fp32_cycles": (1, 1000), "clock_hz": (1e6, 1e12), "l2_bytes": (1, 1 << 48),
    "hbm_bytes_per_s": (1e6, 1e18), "l2_bytes_per_cycle": (1e-3, 1e9), "coalesced": (0, 1),
    "hbm_crowding": (0, 1e-3), "power_exponent": (0.1, 10),
    "shared_bytes_per_cycle": (1e-3, 1e6)}
_FOLDER = resources.files("tinygrad_nv.ptx.timing") / "gpus"


@dataclass(frozen=True)
class GPUFigures:
    """Rates and latencies; latencies in cycles of an SM, rates of the whole GPU unless they are an SM's.
    `mma_macs`: 16-bit multiply-adds by mma.sync, of a scheduler in a cycle; `fp32_cycles`: of a scheduler for
    one float32 instruction of a warp; `beside_wgmma`: for each register that an instruction reads while
    wgmmas run, `xu_beside_wgmma` more for one of the SFU. `coalesced`: of what another SM of the GPC reads at
    about the same time, the share that L2 serves once. A request to HBM that is busy for a share r of the
    time waits `hbm_crowding` seconds times r / (1 - r); a reduction takes L2 as long as `reduction_cost`
    times its bytes. A fence of the GPU's scope holds a warp for `fence_latency`, one that issues wgmmas and
    meets again after a branch for `reconverge_latency`.

    `clock_hz` is the highest; `power_w` what the board may take; at that clock tensor cores that are always
    busy, on random numbers, take `tensor_w`, L2 `memory_w`, HBM `hbm_w`, and everything else `static_w`; what
    SMs and L2 take goes with the clock to the power of `power_exponent`. A launch by itself takes `launch_s`
    more than it runs; in a row a kernel begins `gap_s` after the one before it, with PDL `pdl_gap_s` after
    that lets it, and goes on after griddepcontrol.wait as long after it; the host submits one in `submit_s`.
    `model_spread`: how far off predictions are where all figures are right, one standard deviation."""
    name: str
    arch: str
    sms: int
    threads_of_sm: int
    shared_bytes_of_sm: int
    mma_macs: int
    fp32_cycles: int
    clock_hz: float
    power_w: float
    static_w: float
    tensor_w: float
    memory_w: float
    hbm_w: float
    power_exponent: float
    l2_bytes: int
    hbm_bytes_per_s: float
    hbm_latency: int
    hbm_crowding: float
    l2_bytes_per_cycle: float
    coalesced: float
    reduction_cost: float
    l2_latency: int
    tma_latency: int
    tma_issue: int
    write_latency: int
    fence_latency: int
    reconverge_latency: int
    shared_bytes_per_cycle: float
    shared_latency: int
    wgmma_latency: int
    wgmma_ahead: int
    beside_wgmma: float
    xu_beside_wgmma: float
    mma_latency: int
    arrive_latency: int
    wait_latency: int
    begin_latency: int
    launch_s: float
    gap_s: float
    pdl_gap_s: float
    submit_s: float
    model_spread: float


def clock_under_load(gpu: GPUFigures, tensor: float, l2: float, hbm: float) -> float:
    """The clock that power leaves, with tensor cores, L2 and HBM busy for shares of the time. HBM's power is
    that of its own clock."""
    asked = gpu.tensor_w * tensor + gpu.memory_w * l2
    left = max(0.1 * gpu.power_w, gpu.power_w - gpu.static_w - gpu.hbm_w * hbm)
    return gpu.clock_hz * min(1.0, (left / max(asked, 1.0)) ** (1 / gpu.power_exponent))


def slow_down(gpu: GPUFigures, clock_hz: float) -> GPUFigures:
    """Returns figures as SMs count them at a lower clock: L2 and HBM have clocks of their own."""
    faster = gpu.clock_hz / clock_hz
    return replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s * faster, hbm_crowding=gpu.hbm_crowding / faster,
                   l2_bytes_per_cycle=gpu.l2_bytes_per_cycle * faster)


def list_gpus() -> tuple[str, ...]:
    """Returns the names of the GPUs there are."""
    return tuple(sorted(each.name[:-5] for each in _FOLDER.iterdir() if each.name.endswith(".toml")))


@functools.cache
def figures(name: str) -> GPUFigures:
    """A GPU by its name, or the path of its TOML file. Raises `ConfigError` for one that is not there, or
    that lacks a figure."""
    file = Path(name) if name.endswith(".toml") else _FOLDER / f"{name}.toml"
    if not file.is_file():
        raise ConfigError(f"no figures of a GPU {name!r}",
                          f"one of {', '.join(list_gpus())}, or a .toml file",
                          "measure it with bench/gpu/calibrate.py")
    data = _data(name, file)
    if missing := [each.name for each in fields(GPUFigures) if each.name not in data]:
        raise ConfigError(f"{name} has no {', '.join(missing)}", "all figures of ptx/timing/gpu.py",
                          "copy them from the most similar GPU")
    for each in fields(GPUFigures): _check(name, each.name, str(each.type), data[each.name])
    if data["power_w"] <= data["static_w"]:
        raise ConfigError(f"{name}: power_w = {data['power_w']}", f"more than static_w = {data['static_w']}")
    return GPUFigures(**{each.name: data[each.name] for each in fields(GPUFigures)})


def _data(name: str, file: Any) -> dict[str, Any]:
    try: return tomllib.loads(read_text(file, MAX_JSON_BYTES) if isinstance(file, Path) else file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read: {str(error)[:200]}", "a TOML file of figures",
                          "copy ptx/timing/gpus/h100.toml, and change its figures") from error


def _check(name: str, field: str, kind: str, value: object) -> None:
    """A figure that no GPU has is refused: the simulator divides by rates, and counts cycles."""
    if kind == "str" and isinstance(value, str): return
    least, most = RANGES.get(field, (0, MOST_FIGURE))
    kinds = {"int": (int,), "float": (int, float)}.get(kind, ())
    if type(value) in kinds and least <= value <= most: return  # type: ignore[operator]
    what = {"int": "an integer", "float": "a number"}.get(kind)
    words = f"{what} from {least:,} to {most:,}" if what else "a text"
    raise ConfigError(f"{name}: {field} = {str(value)[:40]}", words)
