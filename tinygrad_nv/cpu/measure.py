"""Rates of this machine in a second: bytes read and operations, measured by a kernel of ours and kept on
disk.

Protocol: `rates(target)` are those of an instruction set on so many threads. They are measured once, in less
than half a second, and kept in cpu.json in the cache directory, by processor, threads and instruction set;
ordinary runs never ask. One kernel does all of it, a mode at a time, in several parts for each thread, so
that one that wakes late (0.3 ms on some virtual machines) does less:

    read    every part sums its share of an array larger than the caches, four streams side by side
    f32     12 chains of multiplications and additions in registers, more than their latency needs
    bf16    the same of VDPBF16PS or TDPBF16PS, s8 of VPDPBUSD or TDPBSSD, where the level has them; elsewhere
            such numbers are widened and take the rate of f32

The best of some tries counts: whatever else runs makes them slower, never faster. `Rates.seconds` is the
roofline: the longer of moving the bytes and of computing, and the launch.
"""
from __future__ import annotations

import contextlib
import functools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.dtype import DType

from tinygrad_nv import private
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.database import cache_directory
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import INT8S

LAUNCH_SECONDS = 2e-6    # of a kernel in a captured graph, where all threads meet twice
FORMAT = "tinygrad_nv cpu rates 1"
MOST_BYTES = 1 << 20        # of cpu.json
READ, F32, BF16, S8 = range(4)
LEAST_BYTES, MOST_BYTES = 64 << 20, 256 << 20
CHAINS, STEPS, PARTS = 12, 100_000, 8
FEWEST, ENOUGH_SECONDS = 5, 0.06    # tries of a mode


@dataclass(frozen=True)
class Rates:
    """Bytes read in a second by all threads, and operations in a second on float32, on bfloat16 and on bytes
    by the instructions of the level."""
    bandwidth: float
    f32: float
    bf16: float
    s8: float

    def of(self, dtype: DType) -> float:
        """Operations in a second of products of a dtype."""
        if dtype in INT8S: return self.s8
        return self.bf16 if short(dtype) == "bf16" else self.f32

    def seconds(self, flops: float, nbytes: float, rate: float = 0.0) -> float:
        """How long a kernel takes at best; `rate` is by default that of float32."""
        return max(nbytes / self.bandwidth, flops / (rate or self.f32)) + LAUNCH_SECONDS


def rates(target: CPU) -> Rates:
    """The rates of a target, from disk, measured where there are none. Raises `ToolchainError` without a
    compiler."""
    return _rates(key(target), target)


@functools.lru_cache(16)
def _rates(name: str, target: CPU) -> Rates:
    if (found := load_rates(target)) is not None: return found
    made = measure_rates(target)
    with contextlib.suppress(OSError): _keep(name, made)     # measured again next time
    return made


def load_rates(target: CPU) -> Rates | None:
    """Returns the rates on disk, None where there are none."""
    data: Any = _read_file().get(key(target))
    try: found = Rates(**{field.name: float(data[field.name]) for field in fields(Rates)})
    except (TypeError, KeyError, ValueError): return None
    return found if all(0 < value < 1e18 for value in asdict(found).values()) else None


def key(target: CPU) -> str:
    """Returns the key that rates depend on."""
    return f"{processor()}, {target.threads} threads, {target.isa}"


@functools.cache
def processor() -> str:
    """The name of the processor."""
    try: text = Path("/proc/cpuinfo").read_text()
    except OSError: text = ""
    named = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


# **** on disk ****

def path() -> Path:
    """Returns where rates are kept."""
    return cache_directory() / "cpu.json"


def _read_file() -> dict[str, Any]:
    """Returns what the file has; nothing where it cannot be read or is something else."""
    try: data = json.loads(private.read(path(), MOST_BYTES))
    except (OSError, ValueError, RecursionError): return {}
    if not isinstance(data, dict) or data.get("format") != FORMAT: return {}
    kept = data.get("rates")
    return kept if isinstance(kept, dict) else {}


def _keep(name: str, made: Rates) -> None:
    text = json.dumps({"format": FORMAT, "rates": {**_read_file(), name: asdict(made)}}, indent=1)
    private.write(path(), f"{text}\n".encode())


# **** measuring ****

def measure_rates(target: CPU) -> Rates:
    """The rates by the clock."""
    from tinygrad_nv.runtime.cpu.program import load
    parts = PARTS * target.threads
    run = load(measure_kernel(target.isa, parts))
    count = min(max(4 * target.l3_bytes, LEAST_BYTES), MOST_BYTES) // 4
    count -= count % (128 * parts)      # four streams of two vectors at a time
    out, data = np.zeros(16 * parts, np.float32), np.full(count, 0.25, np.float32)

    def best(call: Callable[..., None]) -> float:
        times: list[float] = []
        while len(times) < FEWEST or sum(times) < ENOUGH_SECONDS:
            begun = time.perf_counter()
            call(threads=target.threads)
            times.append(time.perf_counter() - begun)
        return min(times)

    bandwidth = data.nbytes / best(functools.partial(run, out, data, count, READ))

    def rate(mode: int, flops: int) -> float:
        done = flops * CHAINS * STEPS * parts
        return done / best(functools.partial(run, out, data, STEPS, mode))

    f32 = rate(F32, 2 * target.isa.lanes)
    packed = ((BF16, _flops(target.isa, 2)), (S8, _flops(target.isa, 4)))
    return Rates(bandwidth, f32, *(rate(mode, flops) if flops else f32 for mode, flops in packed))


def _flops(isa: ISA, packed: int) -> int:
    """Operations of an instruction that multiplies so many numbers a lane; 0 where the level has none."""
    if isa.emulated: return 0
    if isa.level == "amx": return 2 * 16 * 16 * 16 * packed
    return 2 * isa.lanes * packed if (isa.bf16 if packed == 2 else isa.vnni) else 0


def measure_kernel(isa: ISA, parts: int) -> CPUKernel:
    """The kernel: (out, data, count, mode). Of `data` count elements are read, or chains go on for count
    steps."""
    chains = range(CHAINS)
    sums = " ".join(f"vf s{i} = (vf)0.f;" for i in chains)
    total = " + ".join(f"s{i}" for i in chains)
    streams = " ".join(f"s{i} += load_f32(p + {i % 4} * quarter + k + {i // 4} * W);" for i in range(8))
    steps = " ".join(f"s{i} = fma_(s{i}, x, y);" for i in chains)
    body = f"""
  {sums}
  if (mode == {READ}) {{
    const s64 quarter = count / {4 * parts};
    const float *p = data + 4 * quarter * core_id;
    for (s64 k = 0; k < quarter; k += 2 * W) {{ {streams} }}
  }}
  if (mode == {F32}) {{
    const vf x = load_f32(data), y = load_f32(data + W);
    for (s64 k = 0; k < count; k++) {{ {steps} }}
  }}
{_dots("AMX" if isa.level == "amx" else "VECTOR", isa)}
  store_f32(out + 16 * core_id, {total});"""
    return kernel("measure", isa, body, [("float", "out")], [("float", "data")], ["count", "mode"], parts)


def _dots(kind: str, isa: ISA) -> str:
    """Chains of dot products; of tiles, four accumulators, as products of matrices have."""
    if isa.emulated: return ""
    text = ""
    dot = "vpdpbusd" if isa.lanes == 16 else "%{vex%} vpdpbusd"     # gemm.h
    for mode, vector, tile, has in ((BF16, "vdpbf16ps", "tdpbf16ps", isa.bf16),
                                    (S8, dot, "tdpbssd", isa.vnni)):
        if not has: continue
        if kind == "AMX":
            made = " ".join(f'asm volatile("{tile} %%tmm{5 + i % 2}, %%tmm4, %%tmm{i % 4}" ::: "memory");'
                            for i in range(CHAINS))
            zeros = " ".join(f'asm volatile("tilezero %%tmm{i}" ::: "memory");' for i in range(7))
            before = f'u8 config[64] __attribute__((aligned(64))) = {{1}};\n' \
                     "    for (int i = 0; i < 7; i++) { config[16 + 2 * i] = 64; config[48 + i] = 16; }\n" \
                     f'    asm volatile("ldtilecfg %0" :: "m"(config) : "memory"); {zeros}'
            after = 'asm volatile("tilerelease" ::: "memory");'
        else:
            made = " ".join(f'asm volatile("{vector} %2, %1, %0" : "+v"(s{i}) : "v"(x), "v"(x));'
                            for i in range(CHAINS))
            before, after = "const vf x = (vf)0.f;", ""
        text += f"  if (mode == {mode}) {{\n    {before}\n" \
                f"    for (s64 k = 0; k < count; k++) {{ {made} }}\n    {after}\n  }}\n"
    return text
