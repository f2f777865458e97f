"""Properties and attributes that CUDA has of a GPU, from the figures of the timing model and CUDA's limits of
the architecture."""
from __future__ import annotations

import struct
from dataclasses import dataclass

from tinygrad_nv.ptx.emulator.arguments import (
    BLOCK_LIMIT,
    GRID_LIMIT,
    SHARED_LIMIT,
    SHARED_OF_SM,
    THREADS_OF_SM,
)
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures

# data sheets; CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
MEMORY_BYTES = {"a100": 80 << 30, "h100": 80 << 30, "h200": 141 << 30, "h800": 80 << 30, "l40s": 48 << 30}
CTAS_OF_SM = {80: 32, 86: 16, 89: 24, 90: 32}
REGISTERS = 65536
UUID = b"tinygrad-nv h100"
VERSION = 13000         # of CUDA: driver and runtime


@dataclass(frozen=True)
class HostGPU:
    """A GPU by its name in ptx/timing/gpus."""
    key: str
    figures: GPUFigures
    memory_bytes: int

    @property
    def arch(self) -> str: return self.figures.arch

    @property
    def title(self) -> str: return f"NVIDIA {self.figures.name} (emulated)"

    @property
    def capability(self) -> tuple[int, int]: return int(self.arch[3]), int(self.arch[4])

    def attributes(self) -> dict[int, int]:
        """cudaDeviceAttr: the others are 0."""
        number = int(self.arch[3:5])
        gpu = self.figures
        return {1: 1024, **{2 + i: x for i, x in enumerate(BLOCK_LIMIT)},
                **{5 + i: x for i, x in enumerate(GRID_LIMIT)}, 8: 48 << 10, 9: 64 << 10, 10: 32,
                11: 2**31 - 1, 12: REGISTERS, 13: round(gpu.clock_hz / 1e3), 14: 512, 15: 1, 16: gpu.sms,
                19: 1, 31: 1, 32: 1, 36: 2619000, 37: 5120, 38: gpu.l2_bytes, 39: THREADS_OF_SM[number],
                40: 3, 41: 1, 51: 32, 75: self.capability[0], 76: self.capability[1], 78: 1, 79: 1, 80: 1,
                81: SHARED_OF_SM[number], 82: REGISTERS, 83: 1, 87: 2, 89: 1, 90: 1, 95: 1,
                97: SHARED_LIMIT[number], 99: 1, 106: CTAS_OF_SM[number], 108: gpu.l2_bytes * 3 // 4,
                109: 128 << 20,
                111: 1024, 115: 1, 120: int(number >= 90), 126: 4, 134: -1}


def gpu_named(key: str) -> HostGPU:
    """Raises `ConfigError` for one without figures."""
    return HostGPU(key, figures(key), MEMORY_BYTES[key])


# cudaDeviceProp: C types, and the attribute that is there; some of one version of CUDA alone
LAYOUT = ("256s:name 16s:uuid 8s I Q:memory Q:8 i:12 i:10 Q:11 i:1 i:2 i:3 i:4 i:5 i:6 i:7 i:13@12 Q:9 "
          "i:75 i:76 Q:14 Q:51 i:15@12 i:16 i:17@12 i:18 i:19 i:20@12 156s@13 160s@12 Q:30 i:31 i:32 "
          "i:33 i:34 i:50 i:35 i:40 i:41 i:36@12 i:37 i:38 i:108 i:39 i:78 i:79 i:80 Q:81 i:82 i:83 "
          "i:84 i:85 i:86 i:87@12 i:88 i:89 i:90 i:91 i:95 i:96@12 Q:97 i:100 i:101 i:106 i:109 Q:111 "
          "i:99 i:112 i:113 i:114 i:115 i:116 I:117 i:118 I:119 i:121 i:125 i:120 256s")


def properties(gpu: HostGPU, version: int = 13) -> bytes:
    """cudaDeviceProp of CUDA 12 or 13."""
    known: dict[str, int | bytes] = {str(number): value for number, value in gpu.attributes().items()}
    known |= {"name": gpu.title.encode(), "memory": gpu.memory_bytes, "uuid": UUID}
    words = [word.partition("@") for word in LAYOUT.split()]
    items = [word.partition(":") for word, _, of in words if of in ("", str(version))]
    values = [known.get(what, b"" if form[-1] == "s" else 0) for form, _, what in items]
    return struct.pack("@" + "".join(form for form, _, _ in items), *values)
