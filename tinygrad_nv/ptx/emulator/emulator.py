"""The emulated GPU: memory, and launches of PTX text.

Protocol: `emu.alloc` gives device memory at 64-bit addresses, with gaps between allocations so that what
runs past one is found. `emu.launch` parses and lowers the text (once for each text), runs the grid to its
end and returns a `Report`. A kernel that is wrong gives findings, never an exception; text that cannot be
run, and arguments that do not fit, are `PTXError`s before anything runs. Memory keeps what a launch wrote.

`seed` chooses the order of warps and when asynchronous work completes: seeds divisible by four leave all of
it as late as the ISA allows; "late" does too, and lets every try_wait fail once. A correct kernel
gives the same answer under every seed (but for the order of floating-point atomics).
"""
from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator.arguments import (
    check_launch,
    check_threads,
    pack_arguments,
    triple,
)
from tinygrad_nv.ptx.emulator.buffer import Buffer, Multicast
from tinygrad_nv.ptx.emulator.calls import expand_calls
from tinygrad_nv.ptx.emulator.footprint import Footprint
from tinygrad_nv.ptx.emulator.lowering import WORKSPACE, WORKSPACE_BYTES
from tinygrad_nv.ptx.emulator.native import library
from tinygrad_nv.ptx.emulator.program import Program, lower
from tinygrad_nv.ptx.emulator.report import DEADLOCK_KIND, LIMIT_KIND, Report
from tinygrad_nv.ptx.emulator.running import LATE, Run
from tinygrad_nv.ptx.emulator.tapes import Tapes
from tinygrad_nv.ptx.emulator.trace import Trace
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.syntax import PTXFunction, PTXModule
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.tokens import shorten

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a")
FIRST_ADDRESS = 0x7_0000_0000
GPU_ADDRESSES = 1 << 40     # between the first addresses of two GPUs
MOST_MODULE_BYTES = 256 << 20  # limit: bytes of a PTX module's global and constant variables
MOST_VARIABLES = 1 << 14       # limit: global and constant variables of a PTX module
GAP = 1 << 16        # bytes between allocations at least: what runs past one meets nothing


@dataclass(frozen=True)
class Known:
    """A text parsed, and its functions lowered: by name and the addresses of variables. All emulators of a
    process share these, since seeds and settings change nothing here."""
    module: PTXModule
    programs: dict[Hashable, Program] = field(default_factory=dict)
    packed: dict[Hashable, tuple[bytes, Any]] = field(default_factory=dict)


@functools.lru_cache(8)  # of some MB each
def _parse_known(text: str) -> Known: return Known(parse(text))


@dataclass(frozen=True)
class LoadedModule:
    """A module in this emulator, its variables in memory."""
    known: Known
    addresses: dict[str, int]

    @property
    def module(self) -> PTXModule: return self.known.module

    def program(self, function: PTXFunction) -> Program:
        """An entry function, lowered."""
        if (made := self.known.programs.get(key := self._key(function.name))) is None:
            whole = expand_calls(self.module, function)
            made = self.known.programs[key] = lower(self.module, whole, self.addresses)
        return made

    def pack(self, program: Program, handler: Callable[[str], int]) -> tuple[bytes, Any]:
        """Returns a program's ops, and the lists that they refer to."""
        if (made := self.known.packed.get(key := self._key(program.name))) is None:
            ops, lists = program.pack(handler)
            made = self.known.packed[key] = ops, np.array([*lists, 0], np.int32)
        return made

    def _key(self, name: str) -> Hashable: return name, tuple(self.addresses.items())


class Emulator:
    """An emulated GPU of architecture `arch` (sm_80, sm_86, sm_89, sm_90, sm_90a). `check` switches the race
    detector and its kin (bounds and alignment are always checked); `exact` makes tensor cores sum exactly
    instead of truncating as hardware does; a launch ends with a finding of kind instruction-limit after
    `step_limit` warp-instructions, or 20 times as many where no thread polls (strong loads, atomics,
    try_wait), or, with `max_seconds`, when none of its clusters has ended for so many seconds of computing,
    or, with `max_memory`, when threads and the checks of what they touch take so many bytes of the host.
    At most `resident` clusters (CTAs, of launches without) run at a time, fewer where no more fit; others
    start, in their order, as these end. `ordinal` is which of several GPUs it is: their addresses
    differ. Raises `PTXError` for an unknown architecture."""

    def __init__(self, arch: str = "sm_90a", check: bool = True, seed: int | str = 0, exact: bool = False,
                 step_limit: int = 1_000_000_000, resident: int = 1 << 30,
                 ordinal: int = 0, max_seconds: float | None = None,
                 max_memory: int | None = None) -> None:
        if resident < 1: raise PTXError(f"resident={resident}", 0, "at least 1 cluster")
        if arch not in ARCHITECTURES:
            raise PTXError(f"unknown architecture {arch!r}", 0, f"one of {', '.join(ARCHITECTURES)}")
        if isinstance(seed, str) and seed != LATE:
            raise PTXError(f"seed={seed!r}", 0, f"an integer, or {LATE!r}")
        self.arch, self.check, self.seed, self.exact, self.step_limit = arch, check, seed, exact, step_limit
        self.resident, self.max_seconds, self.max_memory = resident, max_seconds, max_memory
        self.buffers: dict[int, Buffer] = {}
        self.multicasts: list[Multicast] = []
        self.modules: dict[bytes, LoadedModule] = {}
        self.waited: Callable[[], None] = lambda: None  # a launch waits for other processes: raises to end it
        self.ordinal, self.next_address = ordinal, FIRST_ADDRESS + ordinal * GPU_ADDRESSES

    # **** memory ****

    def alloc(self, what: np.ndarray | int) -> Buffer:
        """Device memory holding a copy of an array, or of so many bytes that nothing has been written to."""
        if isinstance(what, int | np.integer):
            if what < 0: raise PTXError(f"an allocation of {what} bytes", 0, "a size ≥ 0")
            data, valid = np.full(int(what), 0xff, np.uint8), np.zeros(int(what), np.uint8)
            return self._place(data, valid, (int(what),), np.dtype(np.uint8))
        if not isinstance(what, np.ndarray | np.generic):
            raise PTXError(f"an allocation of a {type(what).__name__}", 0,
                           "a numpy array, or a number of bytes")
        array = np.ascontiguousarray(what)
        if array.dtype.hasobject: raise PTXError("an allocation of Python objects", 0, "an array of numbers")
        return self._place(array.reshape(-1).view(np.uint8).copy(), None, np.shape(what), array.dtype)

    def zeros(self, nbytes: int) -> Buffer:
        """Device memory of zeros. The host has room for what is written alone."""
        return self._place(np.zeros(nbytes, np.uint8), None, (nbytes,), np.dtype(np.uint8))

    def _place(self, data: np.ndarray, valid: np.ndarray | None, shape: tuple[int, ...],
               dtype: np.dtype) -> Buffer:
        buffer = Buffer(self.next_address, data, valid, shape, dtype)
        self.buffers[buffer.ptr] = buffer
        self.next_address += -(-(data.nbytes + GAP) // GAP) * GAP
        return buffer

    def map_memory(self, data: np.ndarray) -> Buffer:
        """Device memory that other processes have mapped, too. What they write is taken for written, and is
        looked for where threads poll; races with them are not found."""
        made = self._place(data, None, data.shape, data.dtype)
        made.outside = True
        return made

    def adopt(self, buffer: Buffer) -> Buffer:
        """Device memory whose bytes lie elsewhere, such as in a shared mapping, at an address that is the
        caller's to choose."""
        self.buffers[buffer.ptr] = buffer
        return buffer

    def variables(self, ptx_text: str, places: Mapping[str, Buffer] | None = None) -> dict[str, Buffer]:
        """The variables of a module in memory, by their names. Before the module is used, `places` says where
        some of them are to be."""
        return {name: self.buffers[at] for name, at in self._load(ptx_text, places).addresses.items()}

    def free(self, buffer: Buffer) -> None:
        """Gives memory back; its addresses are not used again."""
        if self.buffers.pop(buffer.ptr, None) is None:
            raise PTXError(f"address {buffer.ptr:#x} is freed twice, or was never allocated", 0,
                           "a buffer of this emulator")

    # **** launches ****

    def launch(self, ptx_text: str, grid: int | Sequence[int], block: int | Sequence[int],
               args: Sequence[object] = (),
               entry: str | None = None, cluster: int | Sequence[int] = (1, 1, 1), dynamic_smem: int = 0,
               trace: Trace | bool | None = None, footprint: bool = False,
               ahead: Sequence[Footprint] | None = None, tapes: Tapes | None = None,
               timing: str | GPUFigures | None = None, log: int = 0, keep: bool = True,
               strict: bool = True) -> Report:
        """Runs an entry function (the only one, when `entry` is None) over a grid and returns what was found
        and counted. `args` are buffers, addresses and other integers, floats, `TensorMap`s or bytes, one for
        each parameter. With `footprint`, the report says which bytes of memory were touched. A launch with
        `ahead` is a programmatic one (griddepcontrol): what the kernels ahead touched conflicts with what it
        does before it has waited for them. Both need `check`. `tapes` runs chosen clusters alone, and records
        them. `timing` is a GPU, its name or its figures: nothing is computed or checked, and memory stays as
        it is; the report has a prediction of the time that the launch takes there, with `log` of its issues
        for a trace, and without `strict` also of a kernel that ptxas changes; without `keep`, what chosen
        CTAs wrote stays in memory. Raises `PTXError` naming the line or the argument that cannot be."""
        if timing is None:
            return self.prepare_run(ptx_text, grid, block, args, entry, cluster, dynamic_smem, trace=trace,
                                 footprint=footprint, ahead=ahead, tapes=tapes).to_end()
        made = functools.partial(self.prepare_run, ptx_text, grid, block, args, entry, cluster, dynamic_smem)
        return self._launch_timed(made, timing, log, keep, strict)

    def prepare_run(self, ptx_text: str, grid: int | Sequence[int], block: int | Sequence[int],
                 args: Sequence[object] = (), entry: str | None = None,
                 cluster: int | Sequence[int] = (1, 1, 1), dynamic_smem: int = 0, **options: Any) -> Run:
        """Returns a launch that has not begun. `options` are those of `Run`."""
        loaded = self._load(ptx_text)
        function = self._entry(loaded.module, entry)
        program = loaded.program(function)
        shape = triple(grid, "grid"), triple(block, "block"), triple(cluster, "cluster")
        if not isinstance(dynamic_smem, int | np.integer) or dynamic_smem < 0:
            raise PTXError(f"dynamic_smem={dynamic_smem!r}", 0, "a number of bytes ≥ 0")
        shared = program.static_bytes + int(dynamic_smem)
        shape = check_launch(self.arch, loaded.module, program, *shape, shared, dynamic_smem)
        check_threads(program, shape[1], shape[2], self.max_memory)
        return Run(self, loaded.pack(program, library().handler), program, shape, shared,
                   pack_arguments(function, args), ptx_text, **options)

    def _launch_timed(self, made: Callable[..., Run], gpu: str | GPUFigures, log: int, keep: bool,
               strict: bool) -> Report:
        from tinygrad_nv.ptx.timing.model import predict
        from tinygrad_nv.ptx.timing.shape import Shape

        def record(tapes: Tapes) -> bool:
            kept = [(buffer, buffer.data) for buffer in self.buffers.values() if keep]
            for buffer, _ in kept: buffer.data = buffer.copy_data()
            check, self.check = self.check, False
            try: report = made(tapes=tapes).to_end()
            finally:
                self.check = check
                for buffer, data in kept: buffer.data = data
            for said in report.findings:
                if said.kind == LIMIT_KIND and not tapes.limit:
                    raise PTXError(f"PTX line {said.ptx_line}: {said}", said.ptx_line, "a launch that ends")
            return not any(said.kind in (LIMIT_KIND, DEADLOCK_KIND) for said in report.findings)
        began, one = time.perf_counter(), made()
        found = predict(one.text, self.arch, one.program.name,
                          lambda uses: Shape(*one.shape, one.shared, uses), gpu, record,
                          [(each.ptr, each.nbytes) for each in self.buffers.values()], log, strict)
        return Report(seconds=time.perf_counter() - began, timing=found)

    def prepare(self, ptx_text: str, entry: str | None = None) -> None:
        """Prepares what the first launch of a kernel begins with. Raises `PTXError` for text that cannot be
        run."""
        loaded = self._load(ptx_text)
        loaded.program(self._entry(loaded.module, entry))

    def _load(self, text: str, places: Mapping[str, Buffer] | None = None) -> LoadedModule:
        if not isinstance(text, str): raise PTXError(f"PTX text is expected, not {type(text).__name__}")
        key = hashlib.sha256(text.encode()).digest()
        if key not in self.modules:
            known, addresses = _parse_known(text), {}
            placed = [v for v in known.module.variables.values() if v.space in ("global", "const")]
            if (nbytes := sum(variable.nbytes for variable in placed)) > MOST_MODULE_BYTES:
                raise PTXError(f"PTX line {placed[-1].line}: the variables of the module, up to "
                               f"{placed[-1].name}, have {nbytes} bytes", placed[-1].line,
                               f"at most {MOST_MODULE_BYTES}")
            if len(placed) > MOST_VARIABLES:
                line = placed[MOST_VARIABLES].line
                raise PTXError(f"PTX line {line}: {len(placed)} variables of the module", line,
                               f"at most {MOST_VARIABLES}")
            for variable in placed:
                # variables without an initial value are zero
                data = np.zeros(max(variable.nbytes, 1), np.uint8)
                data[:len(variable.data)] = np.frombuffer(variable.data, np.uint8)
                if places is not None and (place := places.get(variable.name)) is not None: place.write(data)
                else: place = self._place(data, None, data.shape, data.dtype)
                addresses[variable.name] = place.ptr
            if "%envreg" in text: addresses[WORKSPACE] = self.alloc(np.zeros(WORKSPACE_BYTES, np.uint8)).ptr
            self.modules[key] = LoadedModule(known, addresses)
        return self.modules[key]

    def _entry(self, module: PTXModule, entry: str | None) -> PTXFunction:
        names = shorten(", ".join(module.functions)) or "none"
        if entry is None:
            if len(module.functions) != 1:
                raise PTXError(f"the module has {len(module.functions)} entry functions: {names}", 0,
                               "one, or its name", "pass entry=…")
            return next(iter(module.functions.values()))
        if entry not in module.functions:
            raise PTXError(f"no entry function {entry!r}", 0, f"one of: {names}", "correct entry=…")
        return module.functions[entry]
