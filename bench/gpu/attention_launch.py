"""Launches attention kernels on memory and streams of others, such as torch's.

Protocol: `make_launch(driver, kernels, pointers, ...)` loads the kernels, which all take these pointers in
their order (kernel.py), makes tensor maps, and gives what puts one launch of each into a stream, after
filling with zeros what is zero before every launch. Modules stay loaded as long as the process. Launches on
several sets of memory share functions that `load_functions` gives.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tinygrad_nv.runtime.driver import Driver, Fill, Launch, Stream, Work, integer, map_spec, pointer
from tinygrad_nv.tile.kernel import TileKernel

Submit = Callable[[Stream | None], None]


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

    def submit(stream: Stream | None = None) -> None:
        for work in works: driver.submit(work, stream)

    return submit
