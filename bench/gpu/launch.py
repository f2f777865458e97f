"""Launches kernels on memory and streams of others, such as torch's.

Protocol: `make_launch(driver, kernels, pointers, ...)` loads the kernels, which all take these pointers in
their order (tile/kernel.py), makes tensor maps, and gives what puts one launch of each into a stream, after
filling with zeros what is zero before every launch. Modules stay loaded as long as the process. Launches on
several sets of memory share functions that `load_functions` gives.

`GemmLauncher(driver, made)` has a matmul's module on a device. `bind_launch(spec, addresses)` binds it to
memory by name (`out`, `a`, `b`, `x0`, …) in the order that tile/kernel.py states, makes tensor maps and the
workspace, and gives what puts one launch into a stream: flags are zeroed before it where there are any. It
keeps the workspace, not the memory that it is given.
"""
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu.parts import NotMeasured, Run
from tinygrad_nv.runtime.driver import Driver, Fill, Launch, Stream, Work, integer, map_spec, pointer
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel, TileKernel
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

Submit = Callable[[Stream | None], None]


@functools.cache
def device() -> Any:
    """One driver in torch's context, for all of a process."""
    import torch

    from tinygrad_nv.runtime.cuda.driver import CUDADriver
    torch.cuda.init()
    return CUDADriver(torch.cuda.current_device())


def bind_sets(driver: Any, bind: Callable[[Mapping[str, int]], Submit], sets: Sequence[Mapping[str, Any]],
              names: Sequence[str] = ()) -> Run:
    """Binds a launch to the memory of each set, by name: what runs it on torch's current stream."""
    import torch
    torch.cuda.synchronize()
    kept = [{name: one[name] for name in names or one} for one in sets]     # while a launch may use it
    runs = [(bind({name: x.data_ptr() for name, x in one.items()}), one) for one in kept]
    driver.synchronize()
    return lambda i: runs[i][0](driver.external_stream(torch.cuda.current_stream().cuda_stream))


def open_driver(options: argparse.Namespace, ordinal: int = 0) -> Driver:
    """Opens the GPU, or with --emulate an emulated one."""
    if options.emulate:
        from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
        return EmulatedDriver(options.arch, seed=options.seed, ordinal=ordinal)
    from tinygrad_nv.runtime.cuda.driver import CUDADriver
    return CUDADriver()


def schedule_for(spec: Any, arch: str) -> Schedule:
    """Returns the schedule that a graph would get."""
    if (schedule := TABLE.choose(spec, GPU(arch))) is None: raise NotMeasured("no schedule of ours")
    return schedule


def load_functions(driver: Driver, kernels: Sequence[TileKernel]) -> list[Any]:
    """Functions on a device."""
    return [driver.load(made.ptx.encode()).function(made.name) for made in kernels]


def make_launch(driver: Driver, kernels: Sequence[TileKernel], pointers: Sequence[int],
                integers: Sequence[int] = (), rows: int = 0, zeroed: Sequence[tuple[int, int]] = (),
                functions: Sequence[Any] = ()) -> Submit:
    """A launch on this memory; `zeroed` are addresses and bytes, `rows` those of a symbolic extent."""
    works: list[Work] = [Fill(address, 0, nbytes) for address, nbytes in zeroed]
    for made, function in zip(kernels, functions or load_functions(driver, kernels), strict=True):
        maps = [map_spec(each, pointers[each.pointer], integers[each.integer] if integers else 0)
                for each in made.maps]
        args = [*map(pointer, pointers), *map(integer, integers), *map(driver.tensor_map, maps)]
        works.append(Launch(function, made.grid_for(rows), (made.threads, 1, 1), tuple(args),
                            made.dynamic_smem, made.cluster, made.pdl))
    return _submit(driver, works)


def _submit(driver: Driver, works: Sequence[Work]) -> Submit:
    def submit(stream: Stream | None = None) -> None:
        for work in works: driver.submit(work, stream)

    return submit


class GemmLauncher:
    """A kernel on a device."""

    def __init__(self, driver: Driver, made: GemmKernel) -> None:
        self.driver, self.made = driver, made
        self.module = driver.load(made.ptx.encode())
        self.function = self.module.function(made.name)
        self.workspaces: list[int] = []

    def bind_launch(self, spec: GemmSpec | QuantGemmSpec | SparseGemmSpec, addresses: Mapping[str, int],
                    m: int | None = None) -> Submit:
        """A launch on this memory, `m` rows of a symbolic spec. Results of several must not share time: each
        has flags of its own."""
        made, rows = self.made, next(iter(spec.integers), 0) if m is None else m
        pointers = [addresses["out"]]
        works: list[Work] = []
        if made.workspace_bytes:
            flags = 4 * max(made.flags, 1)
            pointers += [self.driver.alloc(made.workspace_bytes), self.driver.alloc(flags)]
            self.workspaces += pointers[1:]
            works.append(Fill(pointers[2], 0, flags))
        pointers += [addresses[each.name] for each in TABLE.arguments(spec) if each.role == "in"]
        maps = [map_spec(each, pointers[each.pointer], rows) for each in made.maps]
        args = [*map(pointer, pointers), *([integer(rows)] if spec.integers else []),
                *map(self.driver.tensor_map, maps)]
        works.append(Launch(self.function, made.grid_for(rows), (made.threads, 1, 1), tuple(args),
                            made.dynamic_smem, made.cluster, made.pdl))
        return _submit(self.driver, works)

    def close(self) -> None:
        """Gives back the module and the workspaces, once the launches are done."""
        self.driver.synchronize()
        for address in self.workspaces: self.driver.free(address)
        self.workspaces.clear()
        self.module.unload()
