"""The memory report of a device, and the error when it is out of memory.

Protocol: a `MemoryReport` is figures, and prints as a table. `shortage` makes the error of an allocation
that failed from a report: what was asked, what is held, and advice that these figures bear out, the likeliest
first.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tinygrad_nv.errors import OutOfMemoryError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Holding(NamedTuple):
    """One allocation: the `number`-th that was made on its device."""
    label: str
    nbytes: int
    number: int


@dataclass(frozen=True, slots=True)
class LabelUsage:
    """Usage of a label: bytes and allocations now, and the most bytes it ever held."""
    label: str
    nbytes: int
    count: int
    peak_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one device. `labels` and `largest`, single allocations, begin with the most bytes. `kept` was
    freed and is with the driver for later; `outside` is in use by others: other processes, and the driver
    itself (context, code, graphs). `free` is what the device has left, `limit` what this process may hold.
    Of a device without a pool only `held` is known, and `total` is 0."""
    device: str
    labels: tuple[LabelUsage, ...]
    largest: tuple[Holding, ...]
    held: int
    peak: int
    kept: int
    outside: int
    free: int
    total: int
    limit: int

    def of(self, label: str) -> LabelUsage:
        """The share of a label; zeros for one that never held anything."""
        return next((share for share in self.labels if share.label == label), LabelUsage(label, 0, 0, 0))

    def __str__(self) -> str:
        if not self.total:
            return (f"{self.device}: {human(self.held)} held by tensors; a breakdown is known on devices "
                    "of tinygrad_nv (CUDA, EMU)")
        rows = [(share.label, human(share.nbytes), f"{share.count}", human(share.peak_bytes))
                for share in self.labels]
        rows += [("held", human(self.held), f"{sum(share.count for share in self.labels)}", human(self.peak)),
                 ("kept by the driver", human(self.kept), "", ""),
                 ("outside this pool", human(self.outside), "", ""), ("free", human(self.free), "", "")]
        most = f"{human(self.limit)}, of {human(self.total)}"
        head = f"{self.device}: {human(self.held)} held of at most {most}"
        lines = [head, *_align_columns([("", "now", "count", "peak"), *rows])]
        if self.largest:
            single = [(held.label, human(held.nbytes), f"no. {held.number}") for held in self.largest]
            lines += ["largest allocations", *_align_columns(single)]
        return "\n".join(lines)


def human(nbytes: int) -> str:
    """Bytes in the unit that suits them: 512 B, 1.50 GiB."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{nbytes} B" if power == 0 else f"{nbytes / (1 << 10 * power):.2f} {UNITS[power]}"


def _align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]),
                 *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


# **** when there is no more ****

def shortage(report: MemoryReport, nbytes: int, label: str, refusal: str, sizes: Mapping[str, int],
             remedies: Mapping[str, Callable[[int], str]]) -> OutOfMemoryError:
    """The error for `nbytes` (0: unknown), of which `sizes` says what they are for, with all
    that is known at `report`."""
    room = max(0, min(report.limit - report.held, report.free + report.kept))
    asked = ", ".join(f"{human(size)} for {name}" for name, size in sizes.items())
    what = f"{asked} asked" if nbytes else f"none for {label}"
    lines = [f"out of memory on {report.device}: {what}, {human(room)} to be had",
             f"  held:     {_holders(report)}",
             f"  limit:    {human(report.limit)} of {human(report.total)}"
             f" ({100 * report.limit / report.total:.3g}%)",
             f"  outside:  {human(report.outside)} (other processes, the driver); free: {human(report.free)}"]
    if nbytes <= room and refusal: lines.append(f"  driver:   {refusal}")
    expected = f"at most {human(room)}" if nbytes else "free memory on the device"
    return OutOfMemoryError("\n".join(lines), expected,
                            "; or ".join(_advice(report, nbytes, room, sizes, remedies)), nbytes, label,
                            report)


def _holders(report: MemoryReport) -> str:
    named = [f"{share.label} {human(share.nbytes)} in {share.count}"
             for share in report.labels if share.count]
    kept = f"; kept by the driver {human(report.kept)}" if report.kept else ""
    return (", ".join(named) or "nothing") + kept


def _advice(report: MemoryReport, nbytes: int, room: int, sizes: Mapping[str, int],
            remedies: Mapping[str, Callable[[int], str]]) -> list[str]:
    """Returns what would help, of what the figures bear out."""
    if not nbytes: return ["hold less (a smaller --gpu-memory-utilization): code and graphs need memory, too"]
    short, out = nbytes - room, []
    limited = report.limit - report.held < nbytes
    if limited and nbytes <= report.free + report.kept:
        out.append(f"raise --gpu-memory-utilization to {_least(report.held + nbytes, report.total)}")
    if not limited and report.outside >= short > 0:
        out.append("end other processes on this GPU (nvidia-smi lists them): "
                   f"{human(report.outside)} are held outside this one")
    wanted = {share.label: share.nbytes for share in report.labels}
    for name, size in sizes.items(): wanted[name] = wanted.get(name, 0) + size
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        if name in remedies and wanted[name] and (words := remedies[name](max(short, 1))): out.append(words)
    if short <= 0: out.append("free what is large and not needed: no piece of what is free may be so large")
    if not out and report.held >= short > 0:
        most = report.largest[0]
        out.append("let go of tensors that are not needed: the largest allocation is "
                   f"{human(most.nbytes)} of {most.label}")
    return out or [f"ask for less: the device has {human(report.total)} in all"]


def _least(nbytes: int, total: int) -> str:
    """The smallest part of `total` with two decimals that holds `nbytes`."""
    return f"{min(1.0, math.ceil(nbytes / total * 100) / 100):.2f}"
