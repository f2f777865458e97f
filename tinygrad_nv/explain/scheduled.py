"""The kernels of tensors, found by scheduling copies of them: __init__.py states the protocol."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

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
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import NVError
from tinygrad_nv.explain.lowering import KernelRecord, Lowering
from tinygrad_nv.explain.overlap import describe_overlap, forecast_seconds
from tinygrad_nv.hooks import threads
from tinygrad_nv.patterns import program, target
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.note import Communicates, KeptNote, Note, note_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile import order
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.templates import TABLE

UNMATCHED = "no pattern matched"


def lowering(*tensors: Tensor) -> Lowering:
    """Returns what explain() returns."""
    if others := [t for t in tensors if not isinstance(t, Tensor)]:
        raise NVError(f"explain() was given a {type(others[0]).__name__}",
                      "tensors, each an argument of its own", "call explain(a, b)")
    # results of a captured call are shown as the call computes them
    tensors = tuple(t.lazy() if hasattr(t, "lazy") else t for t in tensors)
    wanted = [t.uop for t in tensors if not t.uop.is_virtual and not t.uop.has_buffer_identity()]
    if not wanted: return Lowering([])
    quiet = Context(SCACHE=0, CAPTURING=0, DEBUG=0)
    # SCACHE is the process's: two of these at a time would leave it off
    with threads.LOWERING, quiet, ranges.scheduling(wanted), program.collect_misses() as misses:
        linear, var_vals = create_linear_with_vars(transform_to_call(UOp.sink(*wanted))[0])
        unused = list(misses)
        kernels = [_record(call, device, var_vals, unused)
                   for call in linear.src for device in to_tuple(call.src[1].device)]
    kernels = _beside(kernels, linear.src) if len(kernels) == len(linear.src) else kernels
    # what a later rewrite says of a value whose kernel has a reason already is no news
    explained = {(m.op, m.numel, m.reduced) for m in misses if m not in unused}
    notes = (f"{m.template}: {m.reason}" for m in unused if (m.op, m.numel, m.reduced) not in explained)
    calls = [call for call in linear.src for _ in to_tuple(call.src[1].device)]
    return Lowering(add_shares(kernels, calls), tuple(dict.fromkeys(notes)))


def add_shares(kernels: list[KernelRecord], calls: Sequence[UOp]) -> list[KernelRecord]:
    """The records, those that no pattern matched with their shares of the time that all take at best; as they
    are where there is one kernel, or a time is not known."""
    if len(kernels) < 2 or not any(each.reason.startswith(UNMATCHED) for each in kernels): return kernels
    times = [_time_at_best(each, call) for each, call in zip(kernels, calls, strict=True)]
    total = sum(each or 0.0 for each in times)
    if None in times or total == 0: return kernels
    return [replace(each, share=(taken or 0.0) / total) if each.reason.startswith(UNMATCHED) else each
            for each, taken in zip(kernels, times, strict=True)]


def _time_at_best(kernel: KernelRecord, call: UOp) -> float | None:
    """Seconds by operations and bytes, or as a cost model has them; None on a device without figures."""
    if kernel.predicted_s is not None: return kernel.predicted_s
    if (cpu := target.cpu_of(kernel.device)) is not None:
        return _predict(cpu, kernel.spec, kernel.schedule, kernel.flops, kernel.bytes)
    return forecast_seconds(call, kernel)


def _beside(kernels: list[KernelRecord], calls: Sequence[UOp]) -> list[KernelRecord]:
    """The records, those of collectives with what runs beside them where it can."""
    if not any(isinstance(each.spec, Communicates) for each in kernels): return kernels
    return [replace(each, reason=f"{each.reason}; beside it: {describe_overlap(calls, kernels, i)}")
            if isinstance(each.spec, Communicates) else each for i, each in enumerate(kernels)]


def _record(call: UOp, device: str, var_vals: dict[str, int], misses: list[program.Miss]) -> KernelRecord:
    note = note_of(call.src[0])
    name, estimates = count_work(call, device)
    template, reason = _explain_miss(call, misses) if note is None else \
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
    taken = _predict(cpu, note.spec, note.schedule, flops, bytes) if cpu is not None else \
        _moving(note.spec, arch) if isinstance(note.spec, Communicates) else None
    return KernelRecord(name, template, reason, device, note.spec, note.schedule, flops, bytes,
                        call.src[0].src[2].arg, arch, sm_count, layer, cpu,
                        0 if cpu is None else _parts(call.src[0]), taken, clusters,
                        None if gpu is None else call.src[0].src[0].arg.aux)


def _moving(spec: Communicates, arch: str) -> float | None:
    """How long a collective takes, None of a GPU without figures."""
    from tinygrad_nv.explain.communication import seconds
    return seconds(*spec.traffic, arch, spec.by_peers)


def _imbalance(call: UOp, note: Note | KeptNote) -> str:
    """How unevenly a grouped matmul's rows are dealt, where its offsets are known now."""
    if not isinstance(note.spec, GroupedGemmSpec | GroupedOuterSpec): return ""
    inputs = [each.name for each in TABLE.arguments(note.spec) if each.role == "in"]
    offsets = call.src[-len(inputs):][inputs.index("offsets")]
    if offsets.op is not Ops.BUFFER or not offsets.is_realized or isinstance(offsets.device, tuple): return ""
    return f"; {imbalance(Tensor(offsets).tolist())}"


def _predict(cpu: CPU, spec: Hashable, schedule: Hashable, flops: int, bytes: int) -> float | None:
    """How long a kernel on a CPU takes at best; None where that cannot be measured."""
    from tinygrad_nv.cpu.measure import rates
    from tinygrad_nv.explain.levels_cpu import predict
    try: return predict(spec, schedule, flops, bytes, rates(cpu))
    except NVError: return None


def _parts(body: UOp) -> int:
    """In how many parts a kernel for a CPU is called."""
    cores = [u for u in body.src[0].src if u.op is Ops.PARAM and u.arg.name == "core_id"]
    return int(cores[0].vmax) + 1 if cores else 1


def _explain_miss(call: UOp, misses: list[program.Miss]) -> tuple[str | None, str]:
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
    kept = f"; {order.WRITTEN}" if order.is_wanted() and body.arg.opts_to_apply == () else ""
    if near is None: return None, (target.why_no_cpu(call.src[1].device) or UNMATCHED) + kept
    misses.remove(near)
    return None, f"{near.template}: {near.reason}{kept}"


def _computes(call: UOp, miss: program.Miss) -> bool:
    """Whether a generated kernel may be where a near miss ended: same operation, as many results, each of as
    many values."""
    nodes = call.src[0].toposort()
    written = {u.src[0].buf_uop.arg.slot for u in nodes if u.op is Ops.STORE}
    sizes = [arg.max_numel() for slot, arg in enumerate(get_call_arg_uops(call)) if slot in written]
    return miss.numel in sizes and any(u.op is miss.op and _reduction_extent(u) == miss.reduced
                                       for u in nodes)


def _reduction_extent(node: UOp) -> int:
    """How many values a REDUCE of a kernel makes one of; 1 for other operations."""
    if node.op is not Ops.REDUCE: return 1
    return prod(int(r.vmax) + 1 for r in node.src[1:])


# **** names and counts ****

_generated: dict[tuple[Hashable, ...], tuple[str, Estimates]] = {}


def count_work(call: UOp, device: str) -> tuple[str, Estimates]:
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


def imbalance(offsets: Sequence[int]) -> str:
    """The most rows of a group beside the mean, and the groups without any."""
    counts = [end - first for first, end in pairwise(offsets)]
    if not (total := sum(counts)): return f"no rows in {len(counts)} groups"
    mean, empty = total / len(counts), counts.count(0)
    most = f"{max(counts)} at most, {max(counts) / mean:.2f} times the mean of {mean:.1f}"
    return f"rows of a group: {most}, {empty} of {len(counts)} groups empty"
