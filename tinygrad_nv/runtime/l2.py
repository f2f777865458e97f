"""Persistence in L2: which memory a step keeps in the cache, and the access-policy window of each launch.

Protocol: `plan` is a pure function of a device's limits and of what a step reads; `persisting` puts a plan in
force on a device. Inside it every launch, eager or of a graph, carries the plan's window; a device has one
plan at a time, and a launch one window, so what is to be kept should lie together. Kernels do not change, nor
what they compute.

The model is a step that repeats, reads t bytes in all, and each range r times, spread evenly, through a cache
that drops what was used longest ago:

* A range between whose reads no more passes than L2 holds (t / r) stays by itself, and needs no window.
* Of the others nothing stays until it is read again. Of a window of w bytes, with s bytes set aside, the
  share h = min(1, s / w) does (`hit_ratio`, CUDA's accessPolicyWindow.hitRatio). CUDA's programming guide
  gives that ratio so that the lines which are to stay fit in what is set aside; more would push each other
  out, which keeps none of them.
* A plan saves h × the bytes of the others that are read in the window. Of all windows inside one allocation
  and not longer than the device's limit the best is taken. It begins or ends where a range does: inside a
  range what it saves only rises, or only falls, but at s bytes. Of equals that which sets least aside, then
  the longest: its other lines are streaming ones, which push nothing else out.

s is the window's length, but not more than the device sets aside at most. What is between the ranges of a
window takes its share of it. Pages that touch and are read equally often are one range; of more than
`MOST_RANGES` in an allocation, neighbours are taken for one, read as often as they are on average.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Properties, Window

if TYPE_CHECKING:
    from tinygrad.tensor import Tensor

    from tinygrad_nv.runtime.device import NVDevice

MIB = 1 << 20
MOST_RANGES = 128   # 9 × its square windows are compared


@dataclass(frozen=True)
class Range:
    """Memory that a step reads. Ranges with the same `allocation` (its address, or any number that stands
    for it) may share a window; one without shares with none."""
    address: int
    nbytes: int
    reads: float = 1.0              # a step
    allocation: int | None = None

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.nbytes


@dataclass(frozen=True)
class L2Plan:
    """Plan of the L2 cache: what to set aside, the window of each launch, HBM bytes that a step then reads
    less (by the model), and why. Without a window there is nothing to gain."""
    set_aside_bytes: int
    window: Window | None
    saved_bytes: float
    reason: str


def plan(limits: Properties, ranges: Iterable[Range], step_bytes: int = 0) -> L2Plan:
    """The best window for a step that reads these ranges, and `step_bytes` in all (at least the ranges')."""
    found = sorted(ranges, key=lambda each: (each.address, each.end))
    for each in found: _check(each)
    if not found: return _nothing("there is nothing to keep")
    if not limits.persisting_l2_limit or not limits.window_limit:
        return _nothing(f"{limits.name} ({limits.arch}) sets no L2 aside")
    step_bytes = max(step_bytes, int(sum(each.nbytes * each.reads for each in found)))
    lost = [each for each in found if step_bytes > each.reads * limits.l2_bytes]
    if not lost:
        return _nothing(f"a step reads {_mib(step_bytes)}, and L2 ({_mib(limits.l2_bytes)}) keeps the ranges "
                        "from one read to the next as it is")
    saved, length, start = min((_best(limits, each) for each in _allocations(lost)), key=_order(limits))
    if not saved: return _nothing("nothing is read")
    ratio = _ratio(limits, length)
    aside = min(length, limits.persisting_l2_limit)
    return L2Plan(aside, Window(start, length, ratio), saved,
                f"{_mib(aside)} of L2 keep {ratio:.0%} of {_mib(length)}: {_mib(saved)} a step less from HBM")


def _check(each: Range) -> None:
    if each.nbytes > 0 and each.reads >= 0 and each.address >= 0: return
    raise DriverError(f"{each.nbytes} bytes at {each.address:#x}, read {each.reads:g} times a step",
                      "a range of at least one byte, read 0 times or more")


def _nothing(reason: str) -> L2Plan: return L2Plan(0, None, 0.0, reason)


def _mib(nbytes: float) -> str: return f"{nbytes / MIB:.4g} MiB"


def _ratio(limits: Properties, length: int) -> float: return min(1.0, limits.persisting_l2_limit / length)


def _allocations(ranges: list[Range]) -> list[list[Range]]:
    """Sorted ranges, those that may share a window together, joined where they touch."""
    found: dict[tuple[int | None, int], list[Range]] = {}
    for number, each in enumerate(ranges):
        group = found.setdefault((each.allocation, number if each.allocation is None else 0), [])
        if group and group[-1].end == each.address and group[-1].reads == each.reads:
            each = replace(each, address=group[-1].address, nbytes=group.pop().nbytes + each.nbytes)
        group.append(each)
    return [[_join_ranges(group[at:at + step]) for at in range(0, len(group), step)]
            for group in found.values()
            for step in [-(-len(group) // MOST_RANGES)]]


def _join_ranges(ranges: list[Range]) -> Range:
    """Neighbours with what is between them, read as often as they are on average."""
    first, nbytes = ranges[0], max(each.end for each in ranges) - ranges[0].address
    return replace(first, nbytes=nbytes, reads=sum(each.reads * each.nbytes for each in ranges) / nbytes)


def _best(limits: Properties, ranges: list[Range]) -> tuple[float, int, int]:
    """The best window of an allocation: bytes that it saves, its length and its start."""
    aside, most = limits.persisting_l2_limit, limits.window_limit
    low, high = min(each.address for each in ranges), max(each.end for each in ranges)
    starts = {x for each in ranges for x in (each.address, each.end - aside, each.end - most) if x >= low}
    ends = {x for each in ranges for x in (each.end, each.address + aside, each.address + most) if x <= high}
    read = {x: sum(each.reads * min(max(x - each.address, 0), each.nbytes) for each in ranges)
            for x in starts | ends}
    windows = ((_ratio(limits, end - start) * (read[end] - read[start]), end - start, start)
               for start in starts for end in ends if 0 < end - start <= most)
    return min(windows, key=_order(limits))


def _order(limits: Properties) -> Callable[[tuple[float, int, int]], tuple[int, int, int, int]]:
    """The key that sorts windows, the best first: to whole bytes, as their shares are rounded."""
    def key(window: tuple[float, int, int]) -> tuple[int, int, int, int]:
        saved, length, start = window
        return -round(saved), min(length, limits.persisting_l2_limit), -length, start
    return key


def tensor_range(tensor: Tensor, reads: float = 1.0) -> Range:
    """The memory of a tensor that lies in one piece on a device of ours. Raises `DriverError` for others."""
    from tinygrad.device import Buffer
    buffer = tensor.contiguous().realize().uop.buffer
    if not isinstance(buffer, Buffer) or not isinstance(address := buffer.ensure_allocated()._buf, int):
        raise DriverError(f"a tensor on {tensor.device}", "memory of one device, CUDA or EMU",
                          "give each shard to the device that holds it")
    return Range(address, buffer.nbytes, reads, buffer.base._buf)


@contextlib.contextmanager
def persisting(device: NVDevice, plan: L2Plan) -> Iterator[L2Plan]:
    """Sets L2 aside and gives launches on `device` the plan's window; takes both back at the end, when what
    was launched is done. Memory of the window must be there until then. Raises `DriverError` inside another
    plan."""
    if device.window is not None:
        raise DriverError(f"a second plan for L2 on {device.device}", "one at a time",
                          "plan for all ranges at once")
    if plan.window is None:
        yield plan
        return
    device.driver.set_persisting_l2(plan.set_aside_bytes)
    device.window = plan.window
    try: yield plan
    finally:
        device.window = None
        try: device.synchronize()
        finally: device.driver.set_persisting_l2(0)
