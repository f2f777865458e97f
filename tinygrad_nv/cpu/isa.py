"""Instruction sets: what kernels may use, and what this processor has.

Protocol: an `ISA` says how wide vectors are and which instructions beyond them there are. Kernels are made
for one; `detect` finds the best this machine runs, and NV_CPU_ISA asks for a narrower one:

    portable    vectors of 128 bits by the compiler alone: any processor, NEON or SSE where there is one
    avx2        256 bits, FMA, F16C; dot products of bytes (AVX-VNNI) where the processor has them
    avx512      512 bits (F, BW, DQ, VL); dot products of bfloat16 and of bytes where the processor has them
    amx         avx512 and tiles of bfloat16 and int8, which the kernel of the system must permit

`why_not` says in words what keeps a level from being used here. Sources: Intel 64 and IA-32 Architectures
Software Developer's Manual, volume 1, chapters 14, 15 and 18; Linux, Documentation/arch/x86/xstate.rst
(permission to use AMX: arch_prctl ARCH_REQ_XCOMP_PERM).
"""
from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv import config
from tinygrad_nv.errors import ConfigError

LEVELS = ("portable", "avx2", "avx512", "amx")
# what /proc/cpuinfo must list for a level
NEEDED = {"portable": (), "avx2": ("avx2", "fma", "f16c"),
          "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
          "amx": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_tile",
                  "amx_bf16", "amx_int8")}
# what has VPDPBUSD at a level: in AVX-VNNI its registers are those of AVX2
VNNI = {"avx2": "avx_vnni", "avx512": "avx512_vnni", "amx": "avx512_vnni"}
_CLANG = {"portable": "", "avx2": "avx2,fma,f16c",
          "avx512": "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl",
          "amx": "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,"
                 "amx-tile,amx-bf16,amx-int8"}
_ARCH_REQ_XCOMP_PERM, _XTILEDATA, _SYS_ARCH_PRCTL = 0x1023, 18, 158


@dataclass(frozen=True)
class ISA:
    """An instruction set. `bf16`: dot products of pairs of bfloat16 (VDPBF16PS); `vnni`: of four bytes
    (VPDPBUSD). `amx` "emulated" computes tiles in plain C, so that kernels for AMX run where there is none.
    """
    level: str
    bf16: bool = False
    vnni: bool = False
    emulated: bool = False

    @property
    def lanes(self) -> int:
        """float32 numbers in a vector."""
        return {"portable": 4, "avx2": 8}.get(self.level, 16)

    @property
    def registers(self) -> int:
        """Vector registers."""
        return 32 if self.lanes == 16 else 16

    @property
    def clang(self) -> str:
        """The instruction set as clang's attribute `target` takes it; "" where no attribute is needed."""
        if self.level == "portable" or self.emulated: return ""
        if self.level == "amx": return _CLANG[self.level]
        vnni = ",avxvnni" if self.level == "avx2" else ",avx512vnni"
        return _CLANG[self.level] + ",avx512bf16" * self.bf16 + vnni * self.vnni

    def __str__(self) -> str:
        names = [self.level, *(name for name, has in (("bf16", self.bf16), ("vnni", self.vnni))
                               if has and self.level != "amx")]
        return "-".join([*names, *["emulated"] * self.emulated])


PORTABLE, AVX2, AVX512 = ISA("portable"), ISA("avx2"), ISA("avx512")
AVX2_VNNI = ISA("avx2", vnni=True)
AVX512_BF16 = ISA("avx512", bf16=True, vnni=True)
AMX = ISA("amx", bf16=True, vnni=True)


@functools.cache
def flags() -> frozenset[str]:
    """Returns the instruction sets that the processor has, as Linux names them; of macOS what is needed here.
    Empty where it is unknown."""
    if sys.platform == "linux":
        try: text = Path("/proc/cpuinfo").read_text()
        except OSError: return frozenset()
        return flags_of(text)
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        out = subprocess.run(["sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features"],
                             capture_output=True, text=True, check=False).stdout
        return frozenset(out.lower().split())
    return frozenset()


def flags_of(text: str) -> frozenset[str]:
    """Returns the flags that the text of /proc/cpuinfo lists for the first core."""
    line = next((line for line in text.splitlines() if line.startswith("flags")), ":")
    return frozenset(line.partition(":")[2].split())


@functools.cache
def amx_refused() -> str:
    """Asks the system for the use of AMX tiles, for this process and all of its threads; "" if it is
    granted, else the system's words."""
    if sys.platform != "linux": return f"{sys.platform} grants none"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0: return ""
    return f"arch_prctl: {os.strerror(ctypes.get_errno())}"


def why_not(level: str) -> str:
    """Returns what keeps a level from being used on this machine; \"\" if it can be."""
    if level == "portable": return ""
    if platform.machine().lower() not in ("x86_64", "amd64"): return f"{platform.machine()} is not x86-64"
    if missing := [name for name in NEEDED[level] if name not in flags()]:
        return f"the processor lacks {', '.join(missing)}"
    if level == "amx" and (words := amx_refused()):
        return f"the system refuses the use of AMX tiles ({words})"
    return ""


def detect() -> ISA:
    """The instruction set that kernels are made for here: the best there is, or what NV_CPU_ISA asks for.
    Raises `ConfigError` if that is more than the machine has."""
    asked = str(config.get("NV_CPU_ISA"))
    if asked == "auto": asked = best()
    elif words := why_not(asked):
        raise ConfigError(f"NV_CPU_ISA={asked}: {words}", f"one of {', '.join(there())}",
                          "unset NV_CPU_ISA for the best of them")
    return of_level(asked)


@functools.cache
def best() -> str:
    """The highest level that can be used."""
    return there()[-1]


def there() -> list[str]:
    """The levels that can be used here, the narrowest first."""
    return [level for level in LEVELS if not why_not(level)]


@functools.cache
def of_level(level: str) -> ISA:
    """A level with what this processor has beyond it."""
    wide = level in ("avx512", "amx")
    return ISA(level, wide and "avx512_bf16" in flags(), VNNI.get(level) in flags())
