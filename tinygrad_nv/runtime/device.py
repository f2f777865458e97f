"""One tinygrad device over the driver interface.

Protocol: `NVDevice(name, driver)` is a `Compiled` of tinygrad: an allocator whose buffers are addresses, a
program that launches, a graph that replays what TinyJit captured. `EMUDevice`, which `DEV=EMU` opens, is that
over the emulator, for the architecture EMU_ARCH; EMU_CHECK=0 runs it without race and initialisation checks.

A kernel given as PTX says in comments before its first directive what tinygrad has no place for: shared
memory, clusters, flags that are zero before a launch, tensor maps (launch_text.py).

What a kernel did wrong is raised when something waits for it: when a tensor is read, at `synchronize()`, or
at once with DEBUG=2.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from tinygrad.device import Allocator, BufferSpec, Compiled, LRUAllocator, Program, TinyELF
from tinygrad.engine.jit import GraphRunner
from tinygrad.helpers import BEAM, getenv, suppress_finalizing
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import (
    Copy,
    Driver,
    Executable,
    Fill,
    Graph,
    Launch,
    Node,
    Swizzle,
    TensorMapSpec,
    Triple,
    Work,
    integer,
    pointer,
)
from tinygrad_nv.runtime.launch_text import Options, options
from tinygrad_nv.runtime.ptx_renderer import PTXRenderer
from tinygrad_nv.tile.kernel import MapArgument

if TYPE_CHECKING:
    from tinygrad_nv.runtime.emulated import EmulatedDriver

MAPS_KEPT = 512  # encoded tensor maps of a program: buffers come and go


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
        self.encoded = functools.lru_cache(MAPS_KEPT)(functools.partial(_encoded, dev.driver))

    @suppress_finalizing
    def __del__(self) -> None:
        if hasattr(self, "module"): self.module.unload()

    def works(self, buffers: Sequence[int], values: Sequence[int], grid: Triple, block: Triple) -> list[Work]:
        """One launch, the last, after the fills that it needs. `values` are integers, each as wide as its
        variable is."""
        o = self.options
        named = [*(each.pointer for each in o.zeroed), *(each.pointer for each in o.maps)]
        if max(named, default=-1) >= len(buffers) or any(m.dynamic >= 0 for m in o.maps) > len(values):
            raise DriverError(f"kernel {self.name} with {len(buffers)} pointers and {len(values)} integers",
                              "those that the comments at the head of its PTX name", "correct the comments")
        dtypes = [dtype for _, _, dtype, _ in self.signature[len(buffers):]]
        # a graph is built before its variables have values, and no map can have 0 rows
        rows = max(1, values[-1]) if values else 0
        args = [*map(pointer, buffers),
                *(integer(value, dtype.itemsize) for value, dtype in zip(values, dtypes, strict=True)),
                *(self.encoded(m, buffers[m.pointer], rows if m.dynamic >= 0 else 0) for m in o.maps)]
        return [*(Fill(buffers[each.pointer], 0, each.nbytes) for each in o.zeroed),
                Launch(self.function, grid, block, tuple(args), o.dynamic_smem, o.cluster, o.pdl)]

    def __call__(self, *bufs: int, global_size: Triple = (1, 1, 1), local_size: Triple = (1, 1, 1),
                 vals: tuple[int, ...] = (), wait: bool = False, **kwargs: Any) -> float | None:
        works = self.works(bufs, vals, global_size, local_size)
        def submit() -> None:
            for work in works: self.dev.driver.submit(work)
        return self.dev.timed(submit, wait)


def _encoded(driver: Driver, argument: MapArgument, address: int, rows: int) -> bytes:
    """The 128 bytes of a tensor map over the buffer at `address`, with `rows` in its dynamic dimension."""
    dims = tuple(rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims))
    swizzle = cast(Swizzle, argument.swizzle)
    return driver.tensor_map(TensorMapSpec(argument.dtype, address + argument.offset_bytes, dims,
                                           argument.strides, argument.box, swizzle=swizzle))


class _Call:
    """A kernel of a graph: what it was last given, and the nodes that this reached."""

    def __init__(self, program: NVProgram, words: Sequence[int], buffers: list[int], values: list[int],
                 grid: Triple, block: Triple) -> None:
        self.program, self.buffers, self.values = program, buffers, values
        self.grid, self.block = grid, block
        self.place = {word: k for k, word in enumerate(words)}  # which argument an argument of the call is
        self.works = self.made()
        self.nodes: list[Node] = []

    def made(self) -> list[Work]:
        """Fills, then the launch."""
        return self.program.works(self.buffers, self.values, self.grid, self.block)

    def update(self, executable: Executable) -> None:
        """Brings the nodes up to date: those whose work is not what it was."""
        works = self.made()
        for node, before, work in zip(self.nodes, self.works, works, strict=True):
            if work != before: executable.update(node, work)
        self.works = works


class NVGraph(GraphRunner):
    """A batch of a TinyJit as a graph of the driver. Inputs, variables and extents may change between
    replays: the nodes they reach are updated (and tensor maps over inputs made again), the others are left
    alone."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        self.dev = self.runtimes[0].dev
        graph = self.dev.driver.graph()
        self.works: list[_Call] = []
        self.count = 0
        for (_, ast, buffers, fixed), program in zip(self.calls, self.runtimes, strict=True):
            grid, block = ast.arg.launch_dims(dict.fromkeys(self.vars, 0))
            words, used = ast.arg.globals, [buffers[i] for i in ast.arg.globals]
            # built with every variable 0, a symbolic extent may be 0 too, and is replaced before it runs
            call = _Call(program, words, [buffer._buf for buffer in used],
                         [fixed.get(v.expr, 0) for v in ast.arg.vars], _at_least_one(grid),
                         _at_least_one(block))
            written = [k for k, i in enumerate(words) if i in ast.arg.outs]
            for work, zeroed in zip(call.works, program.options.zeroed, strict=False):
                self._add(graph, call, work, [used[zeroed.pointer]], [0])
            self._add(graph, call, call.works[-1], used, written)
            self.works.append(call)
        self.executable: Executable = graph.instantiate()

    def _add(self, graph: Graph, call: _Call, work: Work, buffers: list[Any], written: list[int]) -> None:
        """A node, after those that it must not overtake: a fill writes one buffer, so the launch follows
        it."""
        after = self._access_resources(buffers, written, Node(self.count))
        call.nodes.append(graph.add(work, after))
        self.count += 1

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int],
                 wait: bool = False) -> float | None:
        changed = {j for j, replaced in enumerate(self.uop_replace) if replaced}
        for j in changed:
            call = self.works[j]
            for position, slot in self.uop_replace[j]:
                if position not in call.place: continue
                buffer: Any = input_uops[slot].buffer
                call.buffers[call.place[position]] = buffer.ensure_allocated()._buf
        for j, i, value in self.updated_vars(var_vals):
            self.works[j].values[i] = value
            changed.add(j)
        for j, grid, block in self.updated_launch_dims(var_vals):
            self.works[j].grid, self.works[j].block = grid, block
            changed.add(j)
        for j in changed: self.works[j].update(self.executable)
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
