"""Results of explain(): a record for each kernel, and all of them as a table, or at a level."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import RequestError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile import order
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.launch import LaunchConfig
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

if TYPE_CHECKING:
    from tinygrad_nv.explain.levels import ScheduledGemm
    from tinygrad_nv.explain.levels_cpu import CPUMatmul


@dataclass(frozen=True)
class KernelRecord:
    """One kernel or copy. `template` is None where the kernel is not ours, and `reason` says why. Of ours
    there is `source`, the text, and on a GPU of ours `launch`, `arch`, how many multiprocessors it has and
    for how many `clusters` it has room; on a CPU `cpu`, in how many `parts` it runs, and how long that
    takes at best. Of others `graph` is a hash of what they compute; where no pattern matched `share` is
    its part of the time that all kernels take at best, if that is known. `layer` is known while layers are
    tracked (runtime/observe/ranges.py)."""
    name: str
    template: str | None
    reason: str
    device: str
    spec: Hashable
    schedule: Hashable
    flops: int
    bytes: int
    source: str = field(default="", repr=False, compare=False)
    arch: str = ""
    sm_count: int = 0
    layer: str = ""
    cpu: CPU | None = field(default=None, compare=False)
    parts: int = field(default=0, compare=False)
    predicted_s: float | None = field(default=None, compare=False)
    clusters: Clusters = field(default=(), repr=False, compare=False)
    launch: LaunchConfig | None = field(default=None, repr=False, compare=False)
    graph: str = field(default="", repr=False, compare=False)
    share: float | None = field(default=None, compare=False)

    @property
    def matmul(self) -> ScheduledGemm | CPUMatmul | None:
        """Spec, schedule and target of a matmul, from which its kernel can be built again."""
        from tinygrad_nv.explain.levels import ScheduledGemm
        from tinygrad_nv.explain.levels_cpu import CPUMatmul
        if not isinstance(self.spec, GemmSpec): return None
        if isinstance(self.schedule, CPUGemmSchedule) and self.cpu is not None:
            return CPUMatmul(self.spec, self.schedule, self.cpu)
        if not isinstance(self.schedule, GemmSchedule) or not self.arch: return None
        return ScheduledGemm(self.spec, self.schedule, self.arch, self.sm_count, self.clusters)

    @property
    def schedule_class(self) -> str:
        """The class of schedules that it was restricted to (tile/order.py); "" where to none."""
        return "".join(self.reason.partition(order.CLASS)[1:]).rstrip("; ")

    @property
    def isa(self) -> str:
        """The instruction set of a kernel of ours for a CPU."""
        return "" if self.cpu is None else str(self.cpu.isa)

    def show(self, level: str) -> str:
        """A kernel of ours at a level: spec, tile, ptx, sass or c. Raises `RequestError` for a level there is
        not, `ToolchainError` where sass lacks a program."""
        from tinygrad_nv.explain import levels, levels_cpu
        matmul = self.matmul
        if isinstance(matmul, levels_cpu.CPUMatmul): return levels_cpu.show(matmul, level)
        if matmul is not None: return levels.show(matmul, level)
        levels.check(level)
        if self.device.partition(":")[0] == "CPU": levels_cpu.check(level, self.name)
        elif level == "c":
            raise RequestError(f"C of {self.name} on {self.device}", "a kernel for a CPU",
                               "--level ptx, or run with DEV=CPU")
        if level == "spec": return str(self.spec)
        if level == "tile": return str(self.schedule)
        if level == "ptx" and self.launch is not None: return self.launch.describe() + self.source.rstrip()
        if level in ("ptx", "c"): return self.source.rstrip()
        if self.arch: return levels.sass_of(self.source, self.name, self.arch)
        raise RequestError(f"SASS of {self.name} on {self.device}", "a kernel for an NVIDIA GPU",
                           "run with DEV=EMU")


    @property
    def build(self) -> Callable[[], Any] | None:
        """How the kernel is built, if it is a program of the tile language; None of others."""
        from tinygrad_nv.language import building
        from tinygrad_nv.tile.programs import Blocks
        if isinstance(self.schedule, Blocks):
            from tinygrad_nv.tile.templates import TABLE
            target = self.cpu or GPU(self.arch, self.sm_count, self.clusters)
            return partial(TABLE.build, self.spec, cast(Schedule, self.schedule), target)
        found = building.find(self.source) if self.source else None
        return None if found is None else partial(building.make, *found)

    def passes(self, name: str = "all") -> str:
        """Returns what each pass makes of the kernel's program, or one of them. Raises `RequestError` where
        it is none, and for a pass that there is not."""
        from tinygrad_nv.language.passes import show_passes
        if (build := self.build) is None:
            raise RequestError(f"the passes of {self.name}, which is no program of the tile language",
                               "one of a template that is a program, or of a kernel with @kernel",
                               "look at a level of it: tile, ptx or c")
        return show_passes(build, name)


@dataclass(frozen=True)
class Lowering:
    """All kernels that some tensors will run, in order. `notes` are near misses that fit none of them."""
    kernels: list[KernelRecord]
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int: return sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes(self) -> int: return sum(kernel.bytes for kernel in self.kernels)

    @property
    def predicted_s(self) -> float:
        """How long those kernels take at best of which that is known: ours on a CPU, and collectives."""
        return sum(kernel.predicted_s or 0.0 for kernel in self.kernels)

    @property
    def hash(self) -> str:
        """A hash of graph and schedules (hashes.py), 64 hexadecimal digits."""
        from tinygrad_nv.explain.hashes import step_hash
        return step_hash(self.kernels)

    @property
    def distinct(self) -> list[tuple[KernelRecord, int]]:
        """The kernels of ours that differ in more than the buffers they are given, and how often each
        runs."""
        ours = [k for k in self.kernels if k.template is not None]
        times = Counter(map(_identity, ours))
        first = {_identity(k): k for k in reversed(ours)}
        return [(first[key], count) for key, count in times.items()]

    @property
    def blocks(self) -> list[tuple[list[KernelRecord], int]]:
        """The kernels in order, those that run again and again one after the other once, and how often: equal
        layers of a model are one block."""
        return [(self.kernels[start:start + length], times)
                for start, length, times in repetitions([_table_key(k) for k in self.kernels])]

    def show(self, level: str, kernel: str | int | None = None) -> str:
        """Each distinct kernel of ours at a level: spec, tile, ptx, sass, or c as it reads well (that of a
        record is all that is compiled). `kernel` selects by number, from 1, or by name. Raises
        `RequestError` for a level or kernel there is not."""
        from tinygrad_nv.explain.levels import check
        from tinygrad_nv.explain.levels_cpu import legible
        check(level)
        found = self._select(kernel)
        sections = []
        for number, record, times in found:
            text = record.show(level).rstrip()
            sections.append(f"{self._head(number, record, times)}\n"
                            f"{legible(text) if level == 'c' else text}")
        return "\n\n".join(sections) or "no kernel of ours"

    def passes(self, name: str = "all", kernel: str | int | None = None) -> str:
        """Returns what each pass makes of each distinct kernel that is a program of the tile language, or one
        of them. `kernel` selects as of `show`. Raises `RequestError` for a pass or kernel there is not."""
        from tinygrad_nv.language.passes import check
        check(name)
        found = self._select(kernel)
        if kernel is None: found = [each for each in found if each[1].build is not None]
        return "\n\n".join(f"{self._head(number, record, times)}\n{record.passes(name)}"
                           for number, record, times in found) or "no kernel that is a program"

    def _head(self, number: int, record: KernelRecord, times: int) -> str:
        often = f", {times} times" if times > 1 else ""
        return f"// kernel {number} of {len(self.distinct)}: {record.name} on {record.device}{often}"

    def _select(self, kernel: str | int | None) -> list[tuple[int, KernelRecord, int]]:
        every = [(i, record, times) for i, (record, times) in enumerate(self.distinct, 1)]
        if kernel is None: return every
        found = [each for each in every if str(kernel) in (str(each[0]), each[1].name)]
        if not found:
            there = ", ".join(f"{i} ({record.name})" for i, record, _ in every)
            raise RequestError(f"no kernel {kernel!r} of ours", there or "none: no kernel is ours",
                               "choose one by number or by name" if there else "run with DEV=EMU")
        return found

    def __str__(self) -> str:
        from tinygrad_nv.explain.levels import seconds
        head = ("kernel", "template", "device", "isa", "parts", "flops", "bytes", "predicted", "layer", "why")
        rows: list[tuple[str, ...]] = [head]
        numbers = {_identity(record): i for i, (record, _) in enumerate(self.distinct, 1)}
        repeated = {_identity(record): record.reason for record, times in self.distinct if times > 1}
        for block, times in self.blocks:
            folded = times > 1
            often, indent = " × " + str(times) if folded and len(block) == 1 else "", ""
            if folded and len(block) > 1:
                indent = "  "
                rows.append((f"{len(block)} kernels × {times}:", *[""] * (len(head) - 1)))
            for k in block:
                same, why = _identity(k), k.reason
                if k.share is not None: why += f", {percent(k.share)} of the predicted time"
                if k.matmul is not None: why = "; ".join(filter(None, (f"matmul {numbers[same]}",
                                                                       k.schedule_class)))
                elif k.template is not None and same in repeated:  # said once
                    reason = repeated[same]
                    why, repeated[same] = f"kernel {numbers[same]}{reason and ': '}{reason}", ""
                name = f"{indent}{' '.join(k.name.split())}{often}"  # tinygrad pads the names of copies
                taken = "" if k.predicted_s is None else seconds(k.predicted_s)
                rows.append((name, k.template or "-", k.device, k.isa, str(k.parts or ""), f"{k.flops:,}",
                             f"{k.bytes:,}", taken, k.layer, why))
        ours = sum(kernel.template is not None for kernel in self.kernels)
        rows.append((f"{len(self.kernels)} in all", f"{ours} ours", "", "", "", f"{self.flops:,}",
                     f"{self.bytes:,}", seconds(self.predicted_s), "", ""))
        # columns that only some devices or runs have
        told = {"isa": any(k.isa for k in self.kernels), "parts": any(k.parts for k in self.kernels),
                "predicted": any(k.predicted_s is not None for k in self.kernels),
                "layer": any(k.layer for k in self.kernels)}
        kept = [i for i, name in enumerate(head) if told.get(name, True)]
        right = tuple(kept.index(i) for i in kept if head[i] in ("parts", "flops", "bytes", "predicted"))
        lines = align_columns([[row[i] for i in kept] for row in rows], numbers=right)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), *self._products()])

    def _products(self) -> list[str]:
        """A table of the matmuls of each kind of target, numbered as `show` numbers kernels."""
        from tinygrad_nv.explain import levels, levels_cpu
        found = [(f"matmul {i}" + (f", {times} times" if times > 1 else ""), record.matmul)
                 for i, (record, times) in enumerate(self.distinct, 1)]
        on_gpu = [(words, one) for words, one in found if isinstance(one, levels.ScheduledGemm)]
        on_cpu = [(words, one) for words, one in found if isinstance(one, levels_cpu.CPUMatmul)]
        return [*(["", *levels.table(on_gpu)] if on_gpu else []),
                *(["", *levels_cpu.table(on_cpu)] if on_cpu else [])]


def percent(share: float) -> str:
    """A part of a whole, in words."""
    return "under 1 %" if share < 0.01 else f"{share:.0%}".replace("%", " %")


def repetitions(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """A sequence as runs of repeated groups: start, length of the group, how often it stands there. Of the
    groups that begin at a place the one that saves most lines, the shortest of equals."""
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    row, found, start = [number[key] for key in keys], [], 0
    while start < len(row):
        best = (start, 1, 1)
        for length in range(1, (len(row) - start) // 2 + 1):
            group, times = row[start:start + length], 1
            while row[start + times * length:start + (times + 1) * length] == group: times += 1
            if length * (times - 1) > best[1] * (best[2] - 1): best = (start, length, times)
        found.append(best)
        start += best[1] * best[2]
    return found


def _table_key(kernel: KernelRecord) -> Hashable:
    """Returns what a table tells of a kernel, less its layer."""
    return (_identity(kernel), kernel.template, kernel.device, kernel.isa, kernel.parts, kernel.flops,
            kernel.bytes, kernel.reason)


def _identity(kernel: KernelRecord) -> Hashable:
    """Returns what kernels have in common that differ in their buffers alone."""
    return kernel.name, kernel.source, kernel.launch, kernel.spec, kernel.schedule, kernel.arch
