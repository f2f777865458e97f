"""The most memory that this process has had: of the host, and of a device whose memory tinygrad_nv holds."""
from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module

from tinygrad import Device

from tinygrad_nv.runtime.memory_pool import MemoryPool
from tinygrad_nv.runtime.observe.memory_report import human


def peak_memory(device: str) -> dict[str, int]:
    """Returns bytes by name: `peak_host_bytes`, and `peak_device_bytes` of a device that has memory."""
    pool = getattr(Device[device], "pool", None)
    own = {"peak_device_bytes": pool.peak_bytes} if isinstance(pool, MemoryPool) else {}
    return {"peak_host_bytes": _host(), **own}


def memory_words(found: Mapping[str, int]) -> str:
    """Returns what `peak_memory` found in words: `1.20 GiB`, or `1.20 GiB, 3.40 GiB of the device`."""
    there = [f"{human(found['peak_device_bytes'])} of the device"] if "peak_device_bytes" in found else []
    return ", ".join([human(found["peak_host_bytes"]), *there])


def _host() -> int:
    try: resource = import_module("resource")
    except ModuleNotFoundError: return 0    # Windows
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
