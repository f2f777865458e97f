"""Launches a matmul's kernel on memory and streams of others, such as torch's.

Protocol: `GemmLauncher(driver, made)` has the module on a device. `bind_launch(spec, addresses)` binds it to
memory by name (`out`, `a`, `b`, `x0`, …) in the order that kernel.py states, makes tensor maps and the
workspace, and gives what puts one launch into a stream: flags are zeroed before it where there are any. It
keeps the workspace, not the memory that it is given.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from tinygrad_nv.runtime.driver import (
    Driver,
    Fill,
    Launch,
    Stream,
    Work,
    integer,
    map_spec,
    pointer,
)
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.templates import TABLE

Submit = Callable[[Stream | None], None]


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

        def submit(stream: Stream | None = None) -> None:
            for work in works: self.driver.submit(work, stream)

        return submit

    def close(self) -> None:
        """Gives back the module and the workspaces, once the launches are done."""
        self.driver.synchronize()
        for address in self.workspaces: self.driver.free(address)
        self.workspaces.clear()
        self.module.unload()
