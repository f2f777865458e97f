"""Checks of a launch: its shape, shared memory and arguments against the kernel's declarations."""
from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence

import numpy as np

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator.program import Program
from tinygrad_nv.ptx.emulator.tensormap import TensorMap
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.ptx.syntax import Immediate, PTXFunction, PTXModule, Variable

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared memory a CTA may have,
# and an SM has, in bytes; SMs of A100, A10, L40, H100
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448}
SHARED_OF_SM = {80: 167936, 86: 102400, 89: 102400, 90: 233472}
SM_COUNT = {80: 108, 86: 72, 89: 142, 90: 132}
THREADS_OF_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048}
GRID_LIMIT = (2**31 - 1, 65535, 65535)
MOST_CTAS = 1 << 24          # limit: CTAs of an emulated launch, which take minutes
BLOCK_LIMIT = (1024, 1024, 64)
Triple = tuple[int, int, int]
Wrong = Callable[[str], PTXError]  # an argument's error, given what was expected


def triple(value: int | Sequence[int], what: str) -> Triple:
    """One to three extents as three."""
    items = tuple(value) if isinstance(value, Sequence) else (value,)
    if not 1 <= len(items) <= 3 or not all(isinstance(x, int | np.integer) and x >= 1 for x in items):
        raise PTXError(f"{what}={value!r}", 0, "one to three integers ≥ 1")
    x, y, z = (*map(int, items), 1, 1)[:3]
    return x, y, z


def check_launch(arch: str, module: PTXModule, program: Program, grid: Triple, block: Triple, cluster: Triple,
                 shared: int, dynamic: int) -> tuple[Triple, Triple, Triple]:
    """Grid, block and cluster as they will be; `PTXError` when the kernel or the architecture cannot have
    them."""
    number = int(arch[3:5])
    check_target(arch, module.target)
    for name, shape, limits in (("grid", grid, GRID_LIMIT), ("block", block, BLOCK_LIMIT)):
        if any(x > limit for x, limit in zip(shape, limits, strict=True)):
            raise PTXError(f"{name}={shape} is too large", 0, f"at most {limits}")
    if (ctas := grid[0] * grid[1] * grid[2]) > MOST_CTAS:
        raise PTXError(f"grid={grid} has {ctas} CTAs", 0, f"at most {MOST_CTAS} on the emulator",
                       "launch a part of the grid")
    threads = block[0] * block[1] * block[2]
    if threads > 1024:
        raise PTXError(f"a block of {threads} threads", 0, "at most 1024", "use a smaller block")
    check_directives(program.function, block, threads)
    wanted = program.function.directives.get("reqnctapercluster")
    if wanted is not None:
        wanted = (*wanted, 1, 1)[:3]
        if cluster not in ((1, 1, 1), wanted):
            raise PTXError(f"cluster={cluster}", 0, f".reqnctapercluster {wanted} of {program.name}")
        cluster = wanted[0], wanted[1], wanted[2]
    size = cluster[0] * cluster[1] * cluster[2]
    if size > 16: raise PTXError(f"a cluster of {size} CTAs", 0, "at most 16 (8 without an attribute)")
    if size > 1 and number < 90: raise PTXError(f"cluster={cluster} on {arch}", 0, "no cluster below sm_90")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise PTXError(f"grid={grid} is not a multiple of cluster={cluster}", 0, "whole clusters")
    if shared > SHARED_LIMIT[number]:
        raise PTXError(f"{shared} bytes of shared memory ({shared - dynamic} static, {dynamic} dynamic)", 0,
                       f"at most {SHARED_LIMIT[number]} on {arch}", "use smaller tiles or fewer stages")
    return grid, block, cluster


def check_threads(program: Program, block: Triple, cluster: Triple, most: int | None) -> None:
    """Registers and local memory of a cluster's threads take half of what a launch may hold at most: the rest
    is for what they touch."""
    warps = -(-math.prod(block) // 32) * math.prod(cluster)
    nbytes = warps * (program.register_bytes + 32 * program.local_bytes)
    if most is None or nbytes <= most // 2: return
    line = program.function.line
    raise PTXError(f"PTX line {line}: {program.name}: {program.register_bytes} bytes of registers a warp and "
                   f"{program.local_bytes} of local memory a thread, {nbytes >> 20} MiB for {warps} warps",
                   line, f"at most {most >> 21} MiB for the threads of a cluster",
                   "use fewer threads, or raise max_memory (--max-memory)")


def check_target(arch: str, target: str) -> None:
    """PTX for sm_X runs on X and later, for sm_Xa on X alone."""
    found = re.fullmatch(r"sm_(\d+)([af]?)", target)
    if found is None: raise PTXError(f".target {target!r}", 0, "a target such as sm_90a")
    number, special = int(found[1]), found[2]
    if number > int(arch[3:5]) or (special and target != arch):
        raise PTXError(f"the module is for {target}, the emulator is {arch}", 0, f"PTX that runs on {arch}",
                       f"Emulator(arch={target!r})")


def check_directives(function: PTXFunction, block: Triple, threads: int) -> None:
    """.reqntid and .maxntid."""
    if (wanted := function.directives.get("reqntid")) is not None and (*wanted, 1, 1)[:3] != block:
        raise PTXError(f"block={block}", function.line, f".reqntid {(*wanted, 1, 1)[:3]} of {function.name}")
    if (most := function.directives.get("maxntid")) is not None:
        limit = int(np.prod(most))
        if threads > limit:
            raise PTXError(f"a block of {threads} threads", function.line,
                           f".maxntid {limit} of {function.name}")


def entry_registers(function: PTXFunction) -> int:
    """Registers a thread begins with, 0 when the text does not say: .maxnreg, or what ptxas gives a known
    number of threads and CTAs an SM, min(255, ⌊512 / ⌈CTAs · threads / 128⌉⌋ to a multiple of 8). ptxas gives
    no more than the largest setmaxnreg.inc asks for."""
    directives = function.directives
    extents = directives.get("reqntid") or directives.get("maxntid")
    if "maxnreg" in directives: most = directives["maxnreg"][0]
    elif extents is None or "minnctapersm" not in directives: return 0
    else:
        warps = -(-directives["minnctapersm"][0] * int(np.prod(extents)) // 32)
        most = min(255, 512 // -(-warps // 4) // 8 * 8)
    asked = [int(count.value) for i in function.body if i.mnemonic == "setmaxnreg" and "inc" in i.modifiers
             for count in i.operands if isinstance(count, Immediate)]
    return min(most, max(asked, default=most))


def resident_clusters(arch: str, block: Triple, cluster: Triple, shared: int) -> int:
    """Clusters that fit on the device at once (registers are not known, so they do not count)."""
    number, threads = int(arch[3:5]), -(-(block[0] * block[1] * block[2]) // 32) * 32
    each = min(THREADS_OF_SM[number] // threads, SHARED_OF_SM[number] // (shared + 1024), 32)
    return max(most_clusters(cluster[0] * cluster[1] * cluster[2], SM_COUNT[number], max(each, 1)), 1)


# **** arguments ****

def pack_arguments(function: PTXFunction, args: Sequence[object]) -> bytes:
    """The parameter block: each argument at its parameter's place."""
    parameters = list(function.parameters.values())
    if len(args) != len(parameters):
        sizes = (f"[{p.nbytes}]" if p.kind == "b8" else "" for p in parameters)
        names = ", ".join(f"{p.name} (.{p.kind}{size})" for p, size in zip(parameters, sizes, strict=True))
        raise PTXError(f"{len(args)} arguments for the {len(parameters)} parameters of {function.name}",
                       function.line, f"one for each of: {names or 'none'}")
    block = bytearray(-(-function.parameter_bytes // 64) * 64)
    for number, (parameter, value) in enumerate(zip(parameters, args, strict=True)):
        data = pack_argument(number, parameter, value)
        block[parameter.offset:parameter.offset + len(data)] = data
    return bytes(block)


def pack_argument(number: int, parameter: Variable, value: object) -> bytes:
    """One argument as bytes of its parameter's type."""
    def wrong(expected: str) -> PTXError:
        shown = f"{value!r:.60}" if isinstance(value, int | float | str) else type(value).__name__
        return PTXError(f"argument {number} ({parameter.name}) is {shown}", parameter.line, expected)

    size = parameter.nbytes
    if isinstance(value, TensorMap):
        if size != 128: raise wrong(f".{parameter.kind} of {size} bytes; a tensor map takes 128")
        if parameter.align % 64: raise wrong("a tensor map's parameter aligned to 64 bytes")
        return value.encode()
    if isinstance(value, bytes | bytearray):
        if len(value) != size: raise wrong(f"{size} bytes, not {len(value)}")
        return bytes(value)
    if (pointer := getattr(value, "ptr", None)) is not None:
        if size != 8: raise wrong(f"a .{parameter.kind}; an address takes 8 bytes")
        return struct.pack("<Q", pointer)
    if size not in (1, 2, 4, 8) or (parameter.kind == "b8" and size > 1):
        raise wrong(f"{size} bytes, or a TensorMap")
    if isinstance(value, bool | np.bool_): return int(value).to_bytes(size, "little")
    if isinstance(value, int | np.integer): return pack_integer(int(value), parameter, wrong)
    if isinstance(value, float | np.floating): return pack_float(value, parameter, wrong)
    raise wrong("a buffer, an integer, a float, a TensorMap or bytes"
                + ("; copy arrays with emu.alloc" if isinstance(value, np.ndarray) else ""))


def pack_integer(value: int, parameter: Variable, wrong: Wrong) -> bytes:
    """An integer of the parameter's width, signed or not; a float when the parameter is one."""
    if parameter.kind.startswith("f"): return pack_float(float(value), parameter, wrong)
    bits = 8 * parameter.nbytes
    if not -(1 << bits - 1) <= value < 1 << bits: raise wrong(f"an integer of {bits} bits")
    return (value & (1 << bits) - 1).to_bytes(parameter.nbytes, "little")


def pack_float(value: float | np.floating, parameter: Variable, wrong: Wrong) -> bytes:
    """A float as .f16, .f32 or .f64; into untyped parameters by their width."""
    form = {2: "<e", 4: "<f", 8: "<d"}.get(parameter.nbytes)
    if form is None or parameter.kind[0] in "us": raise wrong(f"a .{parameter.kind}")
    try: return struct.pack(form, float(value))
    except OverflowError: raise wrong(f"a value that fits .{parameter.kind}") from None
