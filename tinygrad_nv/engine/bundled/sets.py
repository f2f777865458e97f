"""Sets of kernels in a bundle: each for one kind of device.

Protocol: the name of a set is the name of a GPU's architecture (sm_80, sm_89, sm_90a), or `cpu-` and an
instruction set (cpu/isa.py): cpu-avx2, cpu-avx512-bf16-vnni. `environment(name)` are the variables under
which a process makes kernels for it, on any machine; `names_for(device)` are the sets that a device runs, the
best first.
"""
from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from tinygrad import Device
from tinygrad.device import Buffer

from tinygrad_nv import config
from tinygrad_nv.bundle.manifest import canonical, shorten
from tinygrad_nv.cpu import isa
from tinygrad_nv.engine.worker.input_buffer import InputLayout
from tinygrad_nv.errors import BundleError, ConfigError, ToolchainError
from tinygrad_nv.runtime.device import NVDevice

GPUS = ("sm_80", "sm_89", "sm_90a")
# what tinygrad's own kernels are compiled for (x86-64 psABI): any processor of the set runs them
LEVELS = {"portable": "x86-64-v2", "avx2": "x86-64-v3", "avx512": "x86-64-v4", "amx": "x86-64-v4"}


def parse_sets(text: str) -> list[str]:
    """Returns the sets that --arch names. `cpu` is this machine's best. Raises `ConfigError`."""
    made = []
    for name in filter(None, (each.strip() for each in text.split(","))):
        level = name.removeprefix("cpu").removeprefix("-") or isa.best()
        if name in GPUS: made.append(name)
        elif name.startswith("cpu") and level in isa.LEVELS:
            if words := isa.why_not(level):
                raise ConfigError(f"--arch {name}: {words}, and kernels are captured where they can run",
                                  ", ".join((*GPUS, *(f"cpu-{each}" for each in isa.there()))),
                                  "compile on such a processor, or leave it out")
            made.append(f"cpu-{level}")
        else:
            raise ConfigError(f"--arch {name}", ", ".join((*GPUS, *(f"cpu-{each}" for each in isa.LEVELS))),
                              "change --arch")
    if not made: raise ConfigError(f"--arch {text!r}", "one name at least", "leave it out for this machine")
    return list(dict.fromkeys(made))


def environment(name: str) -> dict[str, str]:
    """Variables under which kernels are made for a set of `parse_sets`."""
    if name in GPUS: return {"DEV": "EMU", "EMU_ARCH": name, "EMU_CHECK": "0"}
    level = name.removeprefix("cpu-")
    made = {"NV_CPU_ISA": level, "DEV": "CPU"}
    if platform.machine() == "x86_64": made["DEV"] = f"CPU::x86_64,{LEVELS[level]}"
    return made


def name_of(device: str) -> str:
    """The set that this process makes kernels of a device for."""
    if isinstance(Device[device], NVDevice): return _arch(device)
    return cpu_name(isa.detect())


def _arch(device: str) -> str:
    opened: Any = Device[device]
    return str(opened.driver.properties.arch)


def cpu_name(found: isa.ISA) -> str:
    """The set of an instruction set, with the machine where that is not x86-64."""
    other = "" if platform.machine() == "x86_64" else f"{platform.machine()}-"
    return f"cpu-{other}{found}"


def choose_set(device: str, there: Iterable[str], file: str) -> str:
    """Returns the set of a bundle that a device takes. Raises `BundleError`."""
    there = list(there)
    found = next((name for name in names_for(device) if name in there), None)
    if found is not None: return found
    raise BundleError(f"{file} has kernels for {shorten(', '.join(there))}; "
                      f"{device} is {names_for(device)[0]}",
                      f"one of {', '.join(names_for(device))}",
                      "compile the model for this machine (--arch), or choose another --device")


def names_for(device: str) -> list[str]:
    """Sets whose kernels a device runs, the best first."""
    if isinstance(Device[device], NVDevice):
        own = _arch(device)
        number = int(own.removeprefix("sm_").rstrip("af"))
        # what is for 9.0a runs on that alone; others on newer GPUs, too
        return [own, *(name for name in reversed(GPUS) if name != own and not name.endswith("a")
                       and int(name.removeprefix("sm_")) <= number)]
    best = str(config.get("NV_CPU_ISA"))
    levels = isa.LEVELS[:isa.LEVELS.index(isa.best() if best == "auto" else best) + 1]
    return list(dict.fromkeys(cpu_name(each) for level in reversed(levels) for each in _variants(level)))


def runs_cubins(device: str, name: str) -> bool:
    """Whether a device runs the cubins of a set: a GPU of that architecture, or of a newer minor one. The
    emulator runs PTX, and a GPU's driver compiles it."""
    if device.partition(":")[0] != "CUDA": return False
    own = _arch(device)
    return own == name if name.endswith("a") else own[:4] == name[:4]


def assembler(name: str) -> Callable[[str], bytes] | None:
    """Returns the function that makes cubins of PTX for a set; None for a CPU, and where there is no
    ptxas."""
    if name not in GPUS: return None
    from tinygrad_nv.ptx.assemble import assemble
    try: assemble(f".version 8.0\n.target {name}\n.address_size 64\n", name)
    except ToolchainError: return None
    return lambda text: assemble(text, name).cubin


def host_threads(device: str) -> int:
    """Threads that kernels of a CPU are made for; 0 of another device."""
    from tinygrad_nv.runtime.cpu.threads import threads
    return threads() if device == "CPU" else 0


# instructions, as Linux names them; what else it lists is no part of a kernel
INSTRUCTIONS = re.compile("avx|sse|ssse|fma|f16c|bmi|adx|abm|movbe|popcnt|amx|gfni|vaes|vpclmul|sha|aes|xop")


def native(device: str) -> list[str]:
    """Lists the extensions of this processor, where kernels are compiled for it alone; none where for a
    level."""
    if device != "CPU" or "native" not in str(Device[device].renderer.target): return []
    return sorted(each for each in isa.flags() if INSTRUCTIONS.match(each))


def require(needed: Iterable[str], file: str) -> None:
    """Raises `BundleError` where this processor lacks what kernels were compiled for."""
    if missing := sorted(set(needed) - isa.flags()):
        raise BundleError(f"{file} was compiled for the processor it was compiled on, and this one lacks "
                          f"{shorten(', '.join(missing))}", "such a processor",
                          "compile it here, or under DEV=CPU::x86_64,x86-64-v3")


def _variants(level: str) -> list[isa.ISA]:
    """A level with what the processor has beyond it, and with less of that."""
    whole = isa.of_level(level)
    made = [isa.ISA(level, bf16, vnni) for bf16 in (True, False) for vnni in (True, False)
            if bf16 <= whole.bf16 and vnni <= whole.vnni]
    return [whole, *(each for each in made if each != whole)]


def layout_of(layout: InputLayout) -> str:
    """A hash of where the inputs of a step lie, which host and kernels have to agree on."""
    return hashlib.sha256(canonical([asdict(each) for each in layout.fields])).hexdigest()


def bytes_of(buffer: Buffer) -> memoryview:
    """Returns the content of a device's memory."""
    return np.frombuffer(buffer.ensure_allocated().as_memoryview(), np.uint8).data
