"""`explain(*tensors)`: the kernels that will run, and why, without running anything.

Protocol. `explain` schedules the tensors as `realize` would, on copies: the calls it makes return new graphs,
and the map that would put buffers into the tensors is dropped. It leaves both caches alone: the schedule
cache, because a hit would skip the rewrites and their near misses; and tinygrad's program cache, because only
names and counts of its kernels are needed, for which its code generator runs as far as the last graph
(nothing is rendered or compiled). Devices are opened, since generated code depends on them.

There is one record for each call that `realize` would make: kernels, and copies too, because they take time
and memory traffic. Operations and bytes are those tinygrad counts (GlobalCounters.global_ops and .global_mem
after the run), with the values that variables are bound to. With BEAM set, tinygrad's kernels that run may
have other names.

Kernels of this package have text; matmuls (their note holds a spec and a schedule) can be shown at several
levels: `Lowering.show("tile")`, see levels.py and levels_cpu.py. On a CPU, kernels of this package have a
predicted time, from the measured rates of the machine (cpu/measure.py).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from tinygrad.codegen import (
    full_rewrite_to_sink,
    line_rewrite,
    pm_linearize_cleanups,
    to_program_cache,
    to_program_key,
)
from tinygrad.codegen.late.linearizer import linearize
from tinygrad.device import Device
from tinygrad.engine import realize
from tinygrad.engine.realize import estimate_uop, get_call_arg_uops
from tinygrad.helpers import Context, ansistrip, to_tuple
from tinygrad.renderer import Estimates
from tinygrad.schedule import create_linear_with_vars
from tinygrad.tensor import Tensor, transform_to_call
from tinygrad.uop.ops import Ops, UOp, sym_infer

from tinygrad_nv import hooks
from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.hooks import threads
from tinygrad_nv.patterns import program, target
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.note import Communicates, Note, note_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.table import aligned
from tinygrad_nv.tile import order
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.grouped_gemm.imbalance import imbalance
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.launch import LaunchConfig
from tinygrad_nv.tile.templates import TABLE

if TYPE_CHECKING:
    from tinygrad_nv.explain.levels import ScheduledGemm
    from tinygrad_nv.explain.levels_cpu import CPUMatmul


@dataclass(frozen=True)
class KernelRecord:
    """One kernel or copy. `template` is None where the kernel is not ours, and `reason` says why. Of ours
    there is `source`, the text, and on a GPU of ours `launch`, `arch`, how many multiprocessors it has and
    for how many `clusters` it has room; on a CPU `cpu`, in how many `parts` it runs, and how long that
    takes at best. Of others `graph` is a hash of what they compute. `layer` is known while layers are
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
                for start, length, times in repetitions([_told(k) for k in self.kernels])]

    def show(self, level: str, kernel: str | int | None = None) -> str:
        """Each distinct kernel of ours at a level: spec, tile, ptx, sass, or c as it reads well (that of a
        record is all that is compiled). `kernel` selects by number, from 1, or by name. Raises
        `RequestError` for a level or kernel there is not."""
        from tinygrad_nv.explain.levels import check
        from tinygrad_nv.explain.levels_cpu import legible
        check(level)
        found = self._selected(kernel)
        sections = []
        for number, record, times in found:
            often = f", {times} times" if times > 1 else ""
            head = f"// kernel {number} of {len(self.distinct)}: {record.name} on {record.device}{often}"
            text = record.show(level).rstrip()
            sections.append(f"{head}\n{legible(text) if level == 'c' else text}")
        return "\n\n".join(sections) or "no kernel of ours"

    def _selected(self, kernel: str | int | None) -> list[tuple[int, KernelRecord, int]]:
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
        lines = aligned([[row[i] for i in kept] for row in rows], numbers=right)
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


def _told(kernel: KernelRecord) -> Hashable:
    """What a table tells of a kernel, less its layer."""
    return (_identity(kernel), kernel.template, kernel.device, kernel.isa, kernel.parts, kernel.flops,
            kernel.bytes, kernel.reason)


def _identity(kernel: KernelRecord) -> Hashable:
    """What kernels have in common that differ in their buffers alone."""
    return kernel.name, kernel.source, kernel.launch, kernel.spec, kernel.schedule, kernel.arch


def explain(*tensors: Tensor) -> Lowering:
    """The kernels that `Tensor.realize(*tensors)` would run now: none for realized or constant tensors."""
    if others := [t for t in tensors if not isinstance(t, Tensor)]:
        raise NVError(f"explain() was given a {type(others[0]).__name__}",
                      "tensors, each an argument of its own", "call explain(a, b)")
    wanted = [t.uop for t in tensors if not t.uop.is_virtual and not t.uop.has_buffer_identity()]
    if not wanted: return Lowering([])
    quiet = Context(SCACHE=0, CAPTURING=0, DEBUG=0)
    # SCACHE is the process's: two of these at a time would leave it off
    with threads.LOWERING, quiet, ranges.scheduling(wanted), program.hear_misses() as misses:
        linear, var_vals = create_linear_with_vars(transform_to_call(UOp.sink(*wanted))[0])
        unused = list(misses)
        kernels = [_record(call, device, var_vals, unused)
                   for call in linear.src for device in to_tuple(call.src[1].device)]
    kernels = _beside(kernels, linear.src) if len(kernels) == len(linear.src) else kernels
    return Lowering(kernels, tuple(dict.fromkeys(f"{m.template}: {m.reason}" for m in unused)))


def _beside(kernels: list[KernelRecord], calls: Sequence[UOp]) -> list[KernelRecord]:
    """The records, those of collectives with what runs beside them where it can."""
    if not any(isinstance(each.spec, Communicates) for each in kernels): return kernels
    from tinygrad_nv.explain.overlap import told
    return [replace(each, reason=f"{each.reason}; beside it: {told(calls, kernels, i)}")
            if isinstance(each.spec, Communicates) else each for i, each in enumerate(kernels)]


def _record(call: UOp, device: str, var_vals: dict[str, int], misses: list[program.Miss]) -> KernelRecord:
    note = note_of(call.src[0])
    name, estimates = counted(call, device)
    template, reason = _unlowered(call, misses) if note is None else \
        (note.template, note.reason + _imbalance(call, note))
    values = {**var_vals, "_device_num": to_tuple(call.src[1].device).index(device)}
    try: flops, bytes = (int(sym_infer(x, values)) for x in (estimates.ops, estimates.mem))
    except TypeError as error:
        raise NVError(f"kernel {name} depends on a variable without a value", "variables bound to values",
                      "bind it: Variable('n', 1, 8).bind(5)") from error
    layer = ranges.origin(call).layer
    if note is None:
        return KernelRecord(name, template, reason, device, None, None, flops, bytes, layer=layer,
                            graph=call.src[0].key.hex())
    driver = getattr(Device[device], "driver", None)
    gpu = driver.properties if isinstance(driver, Driver) else None
    arch, sm_count = ("", 0) if gpu is None else (gpu.arch, gpu.sm_count)
    clusters = driver.clusters if isinstance(driver, Driver) else ()
    cpu = target.cpu_of(device)
    taken = _predicted(cpu, note, flops, bytes) if cpu is not None else \
        _moving(note.spec, arch) if isinstance(note.spec, Communicates) else None
    return KernelRecord(name, template, reason, device, note.spec, note.schedule, flops, bytes,
                        call.src[0].src[2].arg, arch, sm_count, layer, cpu,
                        0 if cpu is None else _parts(call.src[0]), taken, clusters,
                        None if gpu is None else call.src[0].src[0].arg.aux)


def _moving(spec: Communicates, arch: str) -> float | None:
    """How long a collective takes, None of a GPU without figures."""
    from tinygrad_nv.explain.communication import seconds
    return seconds(*spec.moved, arch, spec.by_peers)


def _imbalance(call: UOp, note: Note) -> str:
    """How unevenly a grouped matmul's rows are dealt, where its offsets are known now."""
    if not isinstance(note.spec, GroupedGemmSpec | GroupedOuterSpec): return ""
    inputs = [each.name for each in TABLE.arguments(note.spec) if each.role == "in"]
    offsets = call.src[-len(inputs):][inputs.index("offsets")]
    if offsets.op is not Ops.BUFFER or not offsets.is_realized or isinstance(offsets.device, tuple): return ""
    return f"; {imbalance(Tensor(offsets).tolist())}"


def _predicted(cpu: CPU, note: Note, flops: int, bytes: int) -> float | None:
    """How long a kernel on a CPU takes at best; None where that cannot be measured."""
    from tinygrad_nv.cpu.measure import rates
    from tinygrad_nv.explain.levels_cpu import predicted
    try: return predicted(note.spec, note.schedule, flops, bytes, rates(cpu))
    except NVError: return None


def _parts(body: UOp) -> int:
    """In how many parts a kernel for a CPU is called."""
    cores = [u for u in body.src[0].src if u.op is Ops.PARAM and u.arg.name == "core_id"]
    return int(cores[0].vmax) + 1 if cores else 1


def _unlowered(call: UOp, misses: list[program.Miss]) -> tuple[str | None, str]:
    """Template and reason of a call that no template of a rewrite made."""
    body = call.src[0]
    if body.op is Ops.COPY: return None, "copy"
    if body.op is Ops.PROGRAM: return None, "a program of the user"
    if body.op is Ops.CUSTOM_FUNCTION:
        if hooks.custom_function(body) is None: return None, "tinygrad's own function"
        name, _, why = body.arg.partition("#")
        return name.partition(":")[0], why or "custom function"
    if not hooks.enabled(): return None, "tinygrad_nv is disabled"
    near = next((m for m in misses if _computes(call, m)), None)
    kept = f"; {order.WRITTEN}" if order.wanted() and body.arg.opts_to_apply == () else ""
    if near is None: return None, (target.why_no_cpu(call.src[1].device) or "no pattern matched") + kept
    misses.remove(near)
    return None, f"{near.template}: {near.reason}{kept}"


def _computes(call: UOp, miss: program.Miss) -> bool:
    """Whether a generated kernel may be where a near miss ended: same operation, as many results, each of as
    many values."""
    nodes = call.src[0].toposort()
    written = {u.src[0].buf_uop.arg.slot for u in nodes if u.op is Ops.STORE}
    sizes = [arg.max_numel() for slot, arg in enumerate(get_call_arg_uops(call)) if slot in written]
    return miss.numel in sizes and any(u.op is miss.op and _reduced(u) == miss.reduced for u in nodes)


def _reduced(node: UOp) -> int:
    """How many values a REDUCE of a kernel makes one of; 1 for other operations."""
    if node.op is not Ops.REDUCE: return 1
    return prod(int(r.vmax) + 1 for r in node.src[1:])


# **** names and counts ****

_generated: dict[tuple[Hashable, ...], tuple[str, Estimates]] = {}


def counted(call: UOp, device: str) -> tuple[str, Estimates]:
    """Name and counts of a call: of a kernel of tinygrad's without rendering it."""
    body = call.src[0]
    if body.op is Ops.SINK: return _of_generated(body, device)
    if body.op is Ops.PROGRAM:
        known = program.estimates_of(body) if note_of(body) is not None else body.src[0].arg.estimates
        return body.src[0].arg.name, known or Estimates()
    return ansistrip(realize.get_call_name(call, get_call_arg_uops(call))), estimate_uop(call)


def _of_generated(sink: UOp, device: str) -> tuple[str, Estimates]:
    """Name and counts of a kernel of tinygrad's, from its program or from the code it would render."""
    renderer = Device[device].renderer
    key = to_program_key(sink, renderer)
    if (made := to_program_cache.get(key)) is not None:
        return ansistrip(made.src[0].arg.name), made.src[0].arg.estimates
    if key not in _generated:
        with Context(ALLOW_DEVICE_USAGE=0):
            final = full_rewrite_to_sink(sink, renderer, optimize=sink.tag is None)
        lines = line_rewrite(linearize(final), pm_linearize_cleanups)
        estimates = final.arg.estimates or Estimates.from_uops(tuple(lines), ignore_indexing=True)
        _generated[key] = ansistrip(final.arg.name), estimates
    return _generated[key]
