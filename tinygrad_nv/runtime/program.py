"""A kernel of a device of tinygrad over the driver interface: loaded once, launched often.

Protocol: `launch` is what a launch needs besides grid, block and arguments (tile/launch.py). A kernel that
patterns/program.py has put into the graph comes with it, as `aux` of its TinyELF. Others, such as those that
tinygrad renders, need nothing, and may begin before the kernel ahead of them has ended (programmatic
dependent launch) where their code waits for that kernel (griddepcontrol.wait). `works` says what one launch
is made of; calling the program submits that.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tinygrad.device import Program, TinyELF
from tinygrad.helpers import suppress_finalizing

from tinygrad_nv import config
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import library_call
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import (
    Driver,
    Fill,
    Launch,
    Triple,
    Work,
    integer,
    map_spec,
    pointer,
)
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.tile.launch import LaunchConfig, MapArgument

WAIT = b"griddepcontrol.wait"
MAPS_KEPT = 512  # encoded tensor maps of a program: buffers come and go


class NVProgram(Program[DrivenDevice]):
    """A kernel that is loaded, with what each of its launches has in common."""

    def __init__(self, dev: DrivenDevice, obj: TinyELF) -> None:
        self.dev, self.name, self.profile_key = dev, obj.name, obj.profile_key
        given = getattr(obj, "aux", None)
        self.launch = given if isinstance(given, LaunchConfig) else LaunchConfig(pdl=WAIT in obj.lib)
        if self.launch.call is None:
            self.module = dev.pool.retry_relieved(lambda: dev.driver.load(obj.lib), f"kernel {obj.name}")
            self.function = self.module.function(obj.name)
        self.pdl = self.launch.pdl and bool(config.get("NV_PDL"))
        self.signature = obj.signature
        self.encoded = functools.lru_cache(MAPS_KEPT)(functools.partial(_encode_map, dev.driver))

    @suppress_finalizing
    def __del__(self) -> None:
        if hasattr(self, "module"): self.module.unload()

    def works(self, buffers: Sequence[int], values: Sequence[int], grid: Triple, block: Triple) -> list[Work]:
        """One launch, the last, after the fills that it needs. `values` are integers, each as wide as its
        variable is; where the kernel takes others they are computed of these. A call of
        a library is all of it."""
        o = self.launch
        if o.call is not None: return [library_call.make_call(o.call, self.dev.device, buffers)]
        widths = [dtype.itemsize for _, _, dtype, _ in self.signature[len(buffers):]]
        if o.integers: values, widths = self._compute_integers(values), [4] * len(o.integers)
        named = [*(each.pointer for each in o.zeroed), *(each.pointer for each in o.maps)]
        counted = [max(0, m.integer) for m in o.maps if m.dynamic >= 0]
        if max(named, default=-1) >= len(buffers) or max(counted, default=-1) >= len(values):
            raise DriverError(f"kernel {self.name} with {len(buffers)} pointers and {len(values)} integers",
                              "those that its LaunchConfig names", "correct its LaunchConfig")
        args = [*map(pointer, buffers),
                *(integer(value, width) for value, width in zip(values, widths, strict=True)),
                *(self.encoded(m, buffers[m.pointer], _rows(m, values)) for m in o.maps)]
        given = None
        if o.peers is not None:
            args += o.peers.arguments(self.dev.device)
            given = o.peers.give(self.dev.device)
        return [*(Fill(buffers[each.pointer], 0, each.nbytes) for each in o.zeroed),
                Launch(self.function, grid, block, tuple(args), o.dynamic_smem, o.cluster, self.pdl,
                       self.dev.window, given)]

    def _compute_integers(self, values: Sequence[int]) -> list[int]:
        wanted = {len(each.factors) for each in self.launch.integers}
        if wanted != {len(values)}:
            raise DriverError(f"kernel {self.name} with {len(values)} variables",
                              f"{' or '.join(map(str, sorted(wanted)))}, as its LaunchConfig says",
                              "give each variable of a call once")
        return [each.of(values) for each in self.launch.integers]

    def __call__(self, *bufs: int, global_size: Triple = (1, 1, 1), local_size: Triple = (1, 1, 1),
                 vals: tuple[int, ...] = (), wait: bool = False, **kwargs: Any) -> float | None:
        works = self.works(bufs, vals, global_size, local_size)
        if isinstance(call := works[0], LibraryCall):
            return self.dev.submit_timed(lambda: self.dev.call(call), wait)
        if (peers := self.launch.peers) is not None:
            seconds: float | None = peers.launch(self.dev, works, self.dev.stream_for(bufs), wait)
            return seconds
        if self.dev.observer is not None: return self.dev.observer(self, works)
        stream = self.dev.stream_for(bufs)
        def submit() -> None:
            for work in works: self.dev.driver.submit(work, stream)
        return self.dev.submit_timed(submit, wait)


def _rows(argument: MapArgument, values: Sequence[int]) -> int:
    """The extent of a map's dynamic dimension: a graph is built before its variables have values, and no map
    can have 0 rows."""
    return max(1, values[argument.integer]) if argument.dynamic >= 0 else 0


def _encode_map(driver: Driver, argument: MapArgument, address: int, rows: int) -> bytes:
    """The 128 bytes of a tensor map over the buffer at `address`, with `rows` in its dynamic dimension."""
    return driver.tensor_map(map_spec(argument, address, rows))
