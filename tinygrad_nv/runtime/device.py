"""One tinygrad device over the driver interface.

Protocol: `NVDevice(name, driver)` is a `Compiled` of tinygrad: an allocator whose buffers are addresses, a
program that launches, a graph that replays what TinyJit captured. `EMUDevice`, which `DEV=EMU` opens, is that
over the emulator, for the architecture EMU_ARCH; EMU_CHECK=0 runs it without race and initialisation checks.

A kernel given as PTX says in comments of its own before the first directive what tinygrad has no place for:

    // launch: dynamic_smem=98304 cluster=2,1,1 pdl=1

What a kernel did wrong is raised when something waits for it: when a tensor is read, at `synchronize()`, or
at once with DEBUG=2.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tinygrad.device import Allocator, BufferSpec, Compiled, LRUAllocator, Program, TinyELF
from tinygrad.engine.jit import GraphRunner
from tinygrad.helpers import BEAM, getenv, suppress_finalizing
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Copy, Driver, Fill, Launch, Node, Triple, integer, pointer
from tinygrad_nv.runtime.ptx_renderer import PTXRenderer

if TYPE_CHECKING:
    from tinygrad_nv.runtime.emulated import EmulatedDriver

OPTIONS = re.compile(r"^// launch:(.*)$", re.MULTILINE)
KEYS = ("dynamic_smem", "cluster", "pdl")


@dataclass(frozen=True)
class Options:
    """What a launch has besides grid and block: bytes, CTAs, and whether it may begin early."""
    dynamic_smem: int = 0
    cluster: Triple = (1, 1, 1)
    pdl: bool = False

    def comment(self) -> str:
        """The line that `options` reads."""
        cluster = ",".join(map(str, self.cluster))
        return f"// launch: dynamic_smem={self.dynamic_smem} cluster={cluster} pdl={int(self.pdl)}\n"


def options(text: str) -> Options:
    """The launch options in the comments at the head of PTX text. Raises `DriverError` for words it cannot
    read."""
    head = text.partition("\n.")[0]
    words = [word for line in OPTIONS.findall(head) for word in line.split()]
    pairs = dict(word.partition("=")[::2] for word in words)
    cluster = pairs.get("cluster", "1,1,1").split(",")
    numbers = (pairs.get("dynamic_smem", "0"), pairs.get("pdl", "0"), *cluster)
    if set(pairs) - set(KEYS) or len(cluster) != 3 or not all(number.isdecimal() for number in numbers):
        raise DriverError(f"launch options {' '.join(words)!r}", "dynamic_smem=BYTES cluster=X,Y,Z pdl=0|1",
                          "correct the comment at the head of the PTX")
    x, y, z = map(int, cluster)
    return Options(int(pairs.get("dynamic_smem", 0)), (x, y, z), pairs.get("pdl") == "1")


class NVAllocator(LRUAllocator["NVDevice"]):
    """Buffers are addresses; a view is an address too."""

    def _alloc(self, size: int, options: BufferSpec) -> int:
        if options.external_ptr: return options.external_ptr
        address = self.dev.driver.alloc(size)
        # BEAM times its candidates on memory that nobody wrote
        if options.zero or BEAM or getenv("JITBEAM"): self.dev.driver.submit(Fill(address, 0, size))
        return address

    @suppress_finalizing
    def _free(self, opaque: int, options: BufferSpec) -> None:
        if not options.external_ptr: self.dev.driver.free(opaque)

    def _copyin(self, dest: int, src: memoryview) -> None: self.dev.driver.copy_in(dest, src)

    def _copyout(self, dest: memoryview, src: int) -> None: self.dev.driver.copy_out(dest, src)

    def _transfer(self, dest: int, src: int, sz: int, src_dev: NVDevice, dest_dev: NVDevice) -> None:
        copy = Copy(dest, src, sz)
        if src_dev is dest_dev: dest_dev.driver.submit(copy)
        else: dest_dev.driver.copy_peer(copy, src_dev.driver)

    def _offset(self, buf: int, size: int, offset: int) -> int: return buf + offset


class EMUAllocator(NVAllocator):
    """Keeps nothing for later: reads of memory that was given back, and of new memory that nobody wrote, are
    found."""

    def alloc(self, size: int, options: BufferSpec | None = None) -> int:
        return Allocator.alloc(self, size, options)

    def free(self, opaque: int, size: int, options: BufferSpec | None = None) -> None:
        Allocator.free(self, opaque, size, options)


class NVProgram(Program["NVDevice"]):
    """A kernel that is loaded, with what each of its launches has in common."""

    def __init__(self, dev: NVDevice, obj: TinyELF) -> None:
        self.dev, self.name, self.profile_key = dev, obj.name, obj.profile_key
        self.module = dev.driver.load(obj.lib)
        self.function = self.module.function(obj.name)
        self.options = options(obj.lib.decode()) if obj.lib[:4] != b"\x7fELF" else Options()
        self.signature = obj.signature

    @suppress_finalizing
    def __del__(self) -> None:
        if hasattr(self, "module"): self.module.unload()

    def work(self, buffers: list[int], values: list[int], grid: Triple, block: Triple) -> Launch:
        """One launch. `values` are integers, each as wide as its variable is."""
        dtypes = [dtype for _, _, dtype, _ in self.signature[len(buffers):]]
        args = [*map(pointer, buffers),
                *(integer(value, dtype.itemsize) for value, dtype in zip(values, dtypes, strict=True))]
        o = self.options
        return Launch(self.function, grid, block, tuple(args), o.dynamic_smem, o.cluster, o.pdl)

    def __call__(self, *bufs: int, global_size: Triple = (1, 1, 1), local_size: Triple = (1, 1, 1),
                 vals: tuple[int, ...] = (), wait: bool = False, **kwargs: Any) -> float | None:
        work = self.work(list(bufs), list(vals), global_size, local_size)
        return self.dev.timed(lambda: self.dev.driver.submit(work), wait)


class NVGraph(GraphRunner):
    """A batch of a TinyJit as a graph of the driver. Inputs, variables and extents may change between
    replays: the nodes they reach are updated, the others are left alone."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        self.dev = self.runtimes[0].dev
        graph = self.dev.driver.graph()
        self.works: list[Launch] = []
        self.nodes: list[Node] = []
        self.places: list[dict[int, int]] = []  # of each launch: which argument an argument of the call is
        for (_, ast, buffers, fixed), program in zip(self.calls, self.runtimes, strict=True):
            grid, block = ast.arg.launch_dims(dict.fromkeys(self.vars, 0))
            values = [fixed.get(v.expr, 0) for v in ast.arg.vars]
            words = ast.arg.globals
            # built with every variable 0, a symbolic extent may be 0 too, and is replaced before it runs
            work = program.work([buffers[i]._buf for i in words], values, _at_least_one(grid),
                                _at_least_one(block))
            written = [k for k, i in enumerate(words) if i in ast.arg.outs]
            after = self._access_resources([buffers[i] for i in words], written, Node(len(self.nodes)))
            self.works.append(work)
            self.nodes.append(graph.add(work, after))
            self.places.append({i: k for k, i in enumerate(words)})
        self.executable = graph.instantiate()

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int],
                 wait: bool = False) -> float | None:
        changed = {j: list(work.args) for j, work in enumerate(self.works) if self.uop_replace[j]}
        for j, args in changed.items():
            for position, slot in self.uop_replace[j]:
                if position in self.places[j]:
                    buffer: Any = input_uops[slot].buffer
                    args[self.places[j][position]] = pointer(buffer.ensure_allocated()._buf)
        for j, i, value in self.updated_vars(var_vals):
            args = changed.setdefault(j, list(self.works[j].args))
            place = len(self.places[j]) + i
            args[place] = integer(value, len(args[place]))
        works = {j: replace(self.works[j], args=tuple(args)) for j, args in changed.items()}
        for j, grid, block in self.updated_launch_dims(var_vals):
            works[j] = replace(works.get(j, self.works[j]), grid=grid, block=block)
        for j, work in works.items():
            if work == self.works[j]: continue
            self.executable.update(self.nodes[j], work)
            self.works[j] = work
        return self.dev.timed(self.executable.launch, wait)

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Kernels of one device; an input is an argument itself, not seen through a view."""
        if not GraphRunner.supports_uop(batch_devs, new_call): return False
        return not any(a.op is not Ops.PARAM and a.op_in_backward_slice_with_self(Ops.PARAM)
                       for a in new_call.src[1:] if not a.is_bound_var)


def _at_least_one(extents: tuple[int, ...]) -> Triple:
    x, y, z = (max(1, int(extent)) for extent in extents)
    return x, y, z


class NVDevice(Compiled):
    """A device of tinygrad over `driver`."""

    def __init__(self, device: str, driver: Driver, allocator: type[NVAllocator] = NVAllocator) -> None:
        self.driver = driver
        super().__init__(device, allocator(self), [PTXRenderer], NVProgram, NVGraph,
                         arch=driver.properties.arch.rstrip("a"))

    def synchronize(self) -> None: self.driver.synchronize()

    def timed(self, submit: Callable[[], None], wait: bool) -> float | None:
        """Submits; with `wait`, returns the seconds it took on the device."""
        if not wait:
            submit()
            return None
        start, end = self.driver.event(), self.driver.event()
        self.driver.record(start)
        submit()
        self.driver.record(end)
        self.driver.wait_for(end)
        return self.driver.elapsed_ms(start, end) * 1e-3


class EMUDevice(NVDevice):
    """`DEV=EMU`: the emulator as a device."""
    driver: EmulatedDriver

    def __init__(self, device: str) -> None:
        # numpy, the parser and the emulator are loaded by those who use it
        from tinygrad_nv.runtime.emulated import EmulatedDriver
        driver = EmulatedDriver(str(config.get("EMU_ARCH")), bool(config.get("EMU_CHECK")))
        super().__init__(device, driver, EMUAllocator)
