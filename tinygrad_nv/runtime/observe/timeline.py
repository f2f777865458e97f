"""Each kernel timed alone, beside its prediction: `with timeline("trace.json") as t:`.

Protocol. Inside the block each launch on a device of ours has a pair of events around it, after the fills
that it needs; what a TinyJit or a pool captured runs kernel by kernel in the order of the program, with the
same arguments, and no launch begins before the one ahead of it has ended. On other devices tinygrad measures
its kernels itself. Answers are the same; after the block everything is as before. `t.kernels` are the
launches, `t.table()` sums them up, and the file, written at the end of the block, is a Chrome trace
(chrome.py).

On a GPU the host is slower than a small kernel: an event that the device reaches before the launch has even
been submitted would measure the host. A kernel of ours that only waits (HOLD_CYCLES) goes ahead of each pair,
so that the pair and the launch are queued when it ends. What remains of a pair around nothing is measured at
the begin, and stands in the trace as `empty_pair_us`; it is not subtracted.

Kernels know their layer and op if they were scheduled while layers are tracked (ranges.py), as they are
inside the block: of a TinyJit that was captured before, only names are known.

On DEV=EMU times are of the emulation, and the trace says so. One timeline at a time; candidates that BEAM
times are not recorded.
"""
from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from tinygrad import Device
from tinygrad.engine import realize
from tinygrad.helpers import ansistrip, to_tuple
from tinygrad.uop.ops import Ops, UOp, sym_infer

from tinygrad_nv import hooks
from tinygrad_nv.errors import DriverError, HookError, RequestError
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Event, Launch, Work, integer
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.runtime.observe.chrome import KernelEvent, trace
from tinygrad_nv.runtime.observe.forecast import forecast, gpu_model_of
from tinygrad_nv.runtime.observe.telemetry import Samples, Telemetry
from tinygrad_nv.runtime.program import NVProgram
from tinygrad_nv.table import align_columns

NAME = "timeline"                   # of the hook: one at a time
EMULATED = "times are of the emulation, not of a GPU"
HOLD_CYCLES = 50_000                # 27 µs at 1.83 GHz; an event and a launch from Python take some 10 µs
HOST = ("PYTHON", "NPY", "DISK")    # not where a copy belongs
PENDING = 512                       # pairs of events not read yet
HOLD = """.version 7.8
.target sm_80
.address_size 64
.visible .entry hold(.param .u64 cycles)
{
    .reg .pred %p;
    .reg .b64 %start, %now, %least;
    ld.param.u64 %least, [cycles];
    mov.u64 %start, %clock64;
again:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %p, %now, %least;
    @%p bra again;
    ret;
}
"""


@dataclass
class Timeline:
    """Record of a block. Complete when the block has ended. `begun` is time.perf_counter at its begin."""
    begun: float = field(default_factory=time.perf_counter)
    kernels: list[KernelEvent] = field(default_factory=list)
    samples: dict[str, Samples] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def trace(self) -> dict[str, Any]:
        """The Chrome trace as an object for json.dump."""
        readings = {device: samples.readings for device, samples in self.samples.items()}
        return trace(self.kernels, readings, self.begun, self.notes)

    def write(self, path: str | Path) -> None:
        """Writes the Chrome trace."""
        import json
        Path(path).write_text(json.dumps(self.trace()) + "\n")

    def table(self, by: Literal["kernel", "layer"] = "kernel") -> str:
        """A line for each kernel, or layer: how often, time in all, its share, and what was predicted."""
        name = _layer if by == "layer" else _kernel
        launches = sorted((k for k in self.kernels if not k.is_copy), key=name)
        groups = [(key, list(group)) for key, group in groupby(launches, key=name)]
        groups.sort(key=lambda group: -_seconds(group[1]))
        total = _seconds(launches)
        rows: list[tuple[str, ...]] = [("kernel", "template") if by == "kernel" else ("layer",)]
        rows[0] += ("count", "measured us", "share", "predicted us", "ratio", "bound")
        rows += [(*key, *_cells(group, total)) for key, group in groups]
        words = len(rows[0]) - 6
        rows.append((*("all", "")[:words], *_cells(launches, total)[:-1], ""))
        lines = align_columns(rows, numbers=tuple(range(words, words + 5)))
        note = self.notes.get("times")
        return "\n".join([*lines, note] if note else lines)


def _kernel(k: KernelEvent) -> tuple[str, ...]: return k.name, k.template or "-"


def _layer(k: KernelEvent) -> tuple[str, ...]: return (k.layer or "-",)


def _seconds(kernels: Sequence[KernelEvent]) -> float: return sum(k.seconds for k in kernels)


def _cells(kernels: Sequence[KernelEvent], total: float) -> tuple[str, ...]:
    measured, known = _seconds(kernels), [k.forecast for k in kernels if k.forecast is not None]
    share = f"{100 * measured / total:.1f} %" if total else ""
    cells = (str(len(kernels)), f"{measured * 1e6:.1f}", share)
    if not known or len(known) < len(kernels): return *cells, "-", "-", "-"
    predicted = sum(f.seconds for f in known)
    bounds = {f"{f.bound}, {f.model}" for f in known}
    by = bounds.pop() if len(bounds) == 1 else "several"
    return *cells, f"{predicted * 1e6:.1f}", f"{measured / predicted:.2f}", by


@contextmanager
def timeline(path: str | Path | None = None, period_s: float = 0.02) -> Iterator[Timeline]:
    """Records the block's kernels; writes a Chrome trace to `path` at its end, also after an exception.
    Telemetry is read every `period_s` seconds. Raises `RequestError` for a path that cannot be written."""
    if path is not None: check(path)
    recorder = _CallRecorder(Timeline(), period_s)
    try: hooks.add_execute(NAME, recorder.execute)
    except HookError as error:
        raise RequestError("a timeline inside a timeline", "one at a time", "end the other first") from error
    try:
        with ranges.track_layers(), recorder: yield recorder.timeline
    finally:
        hooks.remove_execute(NAME)
        if path is not None: recorder.timeline.write(path)


def check(path: str | Path) -> None:
    """Makes sure, before anything is measured, that a trace can be written. Raises `RequestError`."""
    try: open(path, "a").close()
    except OSError as error:
        raise RequestError(f"a trace cannot be written to {path}: {error.strerror}",
                           "a file in a directory that exists and can be written",
                           "name another file") from error


@dataclass(frozen=True)
class _RunningCall:
    """The call that is being executed."""
    uop: UOp
    ctx: realize.ExecContext

    def kernel(self, device: str, begin_s: float, seconds: float) -> KernelEvent:
        """Its record, with the values that variables have."""
        body, values = self.uop.src[0], self.ctx.var_vals
        estimates, note = realize.estimate_uop(self.uop), note_of(body)
        devices = to_tuple(self.uop.src[1].device)
        values = {**values, "_device_num": devices.index(device) if device in devices else 0}
        flops, nbytes = (int(sym_infer(x, values)) for x in (estimates.ops, estimates.mem))
        grid, block = body.arg.launch_dims(values)
        gpu, origin = _properties(device), ranges.origin(self.uop)
        return KernelEvent(ansistrip(body.arg.name), device, begin_s, seconds, flops, nbytes, _triple(grid),
                      _triple(block), note.template if note else "", origin.layer, origin.op,
                      None if gpu is None else forecast(body, flops, nbytes, gpu),
                      reason=note.reason if note else "")


def _properties(device: str) -> Any:
    opened = Device[device]
    return opened.driver.properties if isinstance(opened, NVDevice) else None


def _triple(extents: Sequence[Any]) -> tuple[int, int, int]:
    x, y, z = (*map(int, extents), 1, 1, 1)[:3]
    return x, y, z


@dataclass
class _Lane:
    """A device that is observed: where its time begins, pairs of events not read yet, and events to use
    again."""
    device: NVDevice
    base: Event
    begin_s: float
    hold: Launch | None = None
    pending: list[tuple[KernelEvent, Event, Event]] = field(default_factory=list)
    spare: list[Event] = field(default_factory=list)
    last_s: float = 0.0

    def event(self) -> Event: return self.spare.pop() if self.spare else self.device.driver.event()


class _CallRecorder:
    """Executes calls for `hooks.add_execute`, and launches for the devices they are on."""

    def __init__(self, timeline: Timeline, period_s: float) -> None:
        self.timeline, self.period_s = timeline, period_s
        self.lanes: dict[str, _Lane] = {}
        self.call: _RunningCall | None = None
        self.stack = ExitStack()

    def __enter__(self) -> _CallRecorder: return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            for lane in self.lanes.values():
                try: self.read(lane)
                except Exception:
                    if kind is None: raise  # what went wrong in the block goes before what this found
        finally:
            for lane in self.lanes.values(): lane.device.observer = None
            self.stack.close()
            self.timeline.kernels.sort(key=lambda k: k.begin_s)

    # calls

    def execute(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        """In the place of each call."""
        body = call.src[0]
        if not ctx.cache: return run(call, ctx)  # a candidate of BEAM's
        if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph":
            realize.get_graph_runtime(body, ctx.input_uops)  # tinygrad asks it for its counts afterwards
            seconds = [s for node in body.src[0].src for s in self.execute(node, ctx, run)]
            return [None if None in seconds else sum(s for s in seconds if s is not None)]
        if body.op is Ops.PROGRAM: return self.launch(call, ctx, run)
        return self.copy(call, ctx, run)

    def launch(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        """A kernel, on each of its devices."""
        devices = to_tuple(call.src[1].device)
        observed = [self.attach(device) for device in devices]
        before, self.call = self.call, _RunningCall(call, ctx)
        begin = time.perf_counter()
        try: seconds = run(call, ctx if all(observed) else replace(ctx, wait=True))
        finally: self.call = before
        for device, taken, ours in zip(devices, seconds, observed, strict=True):
            if ours: continue
            made = _RunningCall(call, ctx).kernel(device, begin - self.timeline.begun, taken or 0.0)
            self.timeline.kernels.append(made)
            begin += taken or 0.0
        return seconds

    def copy(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        """Anything but a kernel, by the host's clock."""
        begin = time.perf_counter()
        seconds = run(call, ctx)
        taken = time.perf_counter() - begin
        arguments = realize.get_call_arg_uops(call)
        name = " ".join(ansistrip(realize.get_call_name(call, arguments)).split())
        nbytes = int(sym_infer(realize.estimate_uop(call).mem, ctx.var_vals))
        devices = [d for each in arguments if each.device for d in to_tuple(each.device)]
        device = next((d for d in devices if d.split(":")[0] not in HOST), "host")
        self.timeline.kernels.append(KernelEvent(name, device, begin - self.timeline.begun, taken,
                                                 nbytes=nbytes, is_copy=True))
        return seconds

    # launches on our devices

    def attach(self, name: str) -> bool:
        """Whether a device's launches come here; from now on, if they can."""
        if name in self.lanes: return True
        device = Device[name]
        if not isinstance(device, NVDevice): return False
        driver = device.driver
        lane = _Lane(device, driver.event(), 0.0)
        if driver.emulated: self.timeline.notes["times"] = EMULATED
        else:
            lane.hold = _hold(device)
            self.timeline.notes.setdefault("empty_pair_us", {})[name] = _empty_pair(lane) * 1e6
            with suppress(DriverError):  # of a GPU that NVML does not have there is nothing to read
                telemetry = Telemetry(int(name.partition(":")[2] or 0))
                samples = self.stack.enter_context(telemetry.sample(self.period_s))
                self.timeline.samples[name] = samples
        gpu = driver.properties
        self.timeline.notes.setdefault("devices", {})[name] = gpu.name
        if (gpu_model := gpu_model_of(gpu)) is not None:
            self.timeline.notes.setdefault("predicted_for", {})[name] = gpu_model.name
        driver.record(lane.base)
        driver.wait_for(lane.base)
        lane.begin_s = time.perf_counter() - self.timeline.begun
        self.lanes[name], device.observer = lane, self.observe
        return True

    def observe(self, kernel: NVProgram, works: Sequence[Work]) -> float | None:
        """Submits a launch with a pair of events around it. Seconds where the call waits for them."""
        device = kernel.dev
        *fills, launch = works
        for work in fills: device.driver.submit(work)
        if self.call is None: return device.submit_timed(lambda: device.driver.submit(launch), True)
        lane = self.lanes[device.device]
        assert isinstance(launch, Launch)
        pair = _submit(lane, replace(launch, pdl=False))
        lane.pending.append((self.call.kernel(device.device, 0.0, 0.0), *pair))
        if not self.call.ctx.wait and len(lane.pending) < PENDING: return None
        self.read(lane)
        return self.timeline.kernels[-1].seconds

    def read(self, lane: _Lane) -> None:
        """Waits for the pairs, and makes records of them."""
        pending, lane.pending = lane.pending, []
        if not pending: return
        driver = lane.device.driver
        driver.wait_for(pending[-1][2])
        for made, start, end in pending:
            # a difference to an event long ago is coarse: nothing begins before what is ahead has ended
            begin = max(lane.begin_s + driver.ms_between(lane.base, start) * 1e-3, lane.last_s)
            seconds = driver.ms_between(start, end) * 1e-3
            lane.last_s = begin + seconds
            lane.spare += [start, end]
            self.timeline.kernels.append(replace(made, begin_s=begin, seconds=seconds))


def _submit(lane: _Lane, launch: Launch) -> tuple[Event, Event]:
    """A launch, held back until it and its events are queued."""
    driver, start, end = lane.device.driver, lane.event(), lane.event()
    if lane.hold is not None: driver.submit(lane.hold)
    driver.record(start)
    driver.submit(launch)
    driver.record(end)
    return start, end


def _hold(device: NVDevice, cycles: int = HOLD_CYCLES) -> Launch:
    """A kernel that waits."""
    function = device.driver.load(HOLD.encode()).function("hold")
    return Launch(function, (1, 1, 1), (1, 1, 1), (integer(cycles, 8),))


def _empty_pair(lane: _Lane) -> float:
    """Seconds that a pair of events around a kernel that does nothing takes, at best."""
    driver, found = lane.device.driver, []
    assert lane.hold is not None
    nothing = replace(lane.hold, args=(integer(0, 8),))
    for _ in range(5):
        start, end = _submit(lane, nothing)
        driver.wait_for(end)
        found.append(driver.ms_between(start, end) * 1e-3)
        lane.spare += [start, end]
    return min(found)
