"""A kernel of a device of tinygrad over the driver interface: loaded once, launched often.

Protocol: a kernel given as PTX says in comments before its first directive what tinygrad has no place for:
shared memory, clusters, flags that are zero before a launch, tensor maps (launch_text.py). `works` says what
one launch is made of; calling the program submits that.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tinygrad.device import Program, TinyELF
from tinygrad.helpers import suppress_finalizing

from tinygrad_nv import config
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driven import DrivenDevice
from tinygrad_nv.runtime.driver import (
    Driver,
    Fill,
    Launch,
    Triple,
    Work,
    integer,
    pointer,
)
from tinygrad_nv.runtime.launch_text import Options, map_spec, options
from tinygrad_nv.tile.kernel import MapArgument

MAPS_KEPT = 512  # encoded tensor maps of a program: buffers come and go


class NVProgram(Program[DrivenDevice]):
    """A kernel that is loaded, with what each of its launches has in common."""

    def __init__(self, dev: DrivenDevice, obj: TinyELF) -> None:
        self.dev, self.name, self.profile_key = dev, obj.name, obj.profile_key
        self.module = dev.pool.relieved(lambda: dev.driver.load(obj.lib), f"kernel {obj.name}")
        self.function = self.module.function(obj.name)
        self.options = options(obj.lib.decode()) if obj.lib[:4] != b"\x7fELF" else Options()
        self.pdl = self.options.pdl and bool(config.get("NV_PDL"))
        self.signature = obj.signature
        self.encoded = functools.lru_cache(MAPS_KEPT)(functools.partial(_encoded, dev.driver))

    @suppress_finalizing
    def __del__(self) -> None:
        if hasattr(self, "module"): self.module.unload()

    def works(self, buffers: Sequence[int], values: Sequence[int], grid: Triple, block: Triple) -> list[Work]:
        """One launch, the last, after the fills that it needs. `values` are integers, each as wide as its
        variable is; where the kernel takes others they are computed of these."""
        o = self.options
        widths = [dtype.itemsize for _, _, dtype, _ in self.signature[len(buffers):]]
        if o.integers: values, widths = self._computed(values), [4] * len(o.integers)
        named = [*(each.pointer for each in o.zeroed), *(each.pointer for each in o.maps)]
        counted = [max(0, m.integer) for m in o.maps if m.dynamic >= 0]
        if max(named, default=-1) >= len(buffers) or max(counted, default=-1) >= len(values):
            raise DriverError(f"kernel {self.name} with {len(buffers)} pointers and {len(values)} integers",
                              "those that the comments at the head of its PTX name", "correct the comments")
        args = [*map(pointer, buffers),
                *(integer(value, width) for value, width in zip(values, widths, strict=True)),
                *(self.encoded(m, buffers[m.pointer], _rows(m, values)) for m in o.maps)]
        return [*(Fill(buffers[each.pointer], 0, each.nbytes) for each in o.zeroed),
                Launch(self.function, grid, block, tuple(args), o.dynamic_smem, o.cluster, self.pdl,
                       self.dev.window)]

    def _computed(self, values: Sequence[int]) -> list[int]:
        wanted = {len(each.factors) for each in self.options.integers}
        if wanted != {len(values)}:
            raise DriverError(f"kernel {self.name} with {len(values)} variables",
                              f"{' or '.join(map(str, sorted(wanted)))}, as the comments at the head of its "
                              "PTX say", "give each variable of a call once")
        return [each.of(values) for each in self.options.integers]

    def __call__(self, *bufs: int, global_size: Triple = (1, 1, 1), local_size: Triple = (1, 1, 1),
                 vals: tuple[int, ...] = (), wait: bool = False, **kwargs: Any) -> float | None:
        works = self.works(bufs, vals, global_size, local_size)
        if self.dev.observer is not None: return self.dev.observer(self, works)
        def submit() -> None:
            for work in works: self.dev.driver.submit(work)
        return self.dev.timed(submit, wait)


def _rows(argument: MapArgument, values: Sequence[int]) -> int:
    """The extent of a map's dynamic dimension: a graph is built before its variables have values, and no map
    can have 0 rows."""
    return max(1, values[argument.integer]) if argument.dynamic >= 0 else 0


def _encoded(driver: Driver, argument: MapArgument, address: int, rows: int) -> bytes:
    """The 128 bytes of a tensor map over the buffer at `address`, with `rows` in its dynamic dimension."""
    return driver.tensor_map(map_spec(argument, address, rows))
