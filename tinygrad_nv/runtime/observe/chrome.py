"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Protocol: the Trace Event Format's JSON object. A device is a process. Its thread 0 has a complete event (ph
X) for each kernel in the order of the stream, inside one for each layer and part of a layer that they belong
to; thread 1 has the same kernels as they were predicted, one after the other; thread 2 has copies, by the
host's clock. Counters (ph C) are what telemetry read. `ts` and `dur` are microseconds from the begin of the
recording, rounded to whole nanoseconds, so that what lies inside something does so exactly.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from tinygrad_nv.runtime.driver import Triple
from tinygrad_nv.runtime.observe.forecast import Forecast
from tinygrad_nv.runtime.observe.telemetry import GPUSample

Event = dict[str, Any]
STREAM, PREDICTED, COPIES = 0, 1, 2     # threads of a device
THREADS = {STREAM: "stream 0", PREDICTED: "predicted, one after the other", COPIES: "copies (host's time)"}
COUNTERS = {"sm_mhz": ("SM clock", "MHz", 1.0), "memory_mhz": ("memory clock", "MHz", 1.0),
            "watts": ("power", "W", 1.0), "memory_used_bytes": ("memory used", "MiB", 2.0 ** -20),
            "temperature_c": ("temperature", "C", 1.0)}


@dataclass(frozen=True)
class KernelEvent:
    """One launch, or one copy. `begin_s` is from the begin of the recording. `op` is the Tensor method that
    asked for it, `layer` where in the model that was, `reason` what explain() says of it; "" where that is
    not known."""
    name: str
    device: str
    begin_s: float
    seconds: float
    flops: int = 0
    nbytes: int = 0
    grid: Triple = (1, 1, 1)
    block: Triple = (1, 1, 1)
    template: str = ""
    layer: str = ""
    op: str = ""
    forecast: Forecast | None = None
    is_copy: bool = False
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured by predicted."""
        return self.seconds / self.forecast.seconds if self.forecast else None


def trace(kernels: Sequence[KernelEvent], counters: Mapping[str, Sequence[GPUSample]], begun: float,
          metadata: dict[str, Any]) -> Event:
    """The whole trace. `counters` are readings of devices; `begun` is time.perf_counter at the begin."""
    devices = list(dict.fromkeys(kernel.device for kernel in kernels))
    events: list[Event] = []
    for pid, device in enumerate(devices):
        mine = [kernel for kernel in kernels if kernel.device == device]
        launches, copies = [k for k in mine if not k.is_copy], [k for k in mine if k.is_copy]
        tracks = {STREAM: [*_spans(launches, pid), *(_kernel(k, pid) for k in launches)],
                  PREDICTED: list(_forecast_events(launches, pid)),
                  COPIES: [_complete(k.name, "copy", pid, COPIES, k.begin_s, k.seconds, {"bytes": k.nbytes})
                           for k in copies]}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": device}})
        for tid, made in tracks.items():
            if not made: continue
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid,
                           "args": {"name": THREADS[tid]}})
            events += made
        events += _counters(counters.get(device, ()), pid, begun)
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": metadata}


def _ns(seconds: float) -> int: return round(seconds * 1e9)


def _complete(name: str, kind: str, pid: int, tid: int, begin_s: float, seconds: float, args: Event) -> Event:
    begin, end = _ns(begin_s), _ns(begin_s + seconds)
    return {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": begin / 1e3,
            "dur": max(0, end - begin) / 1e3, "args": args}


def _kernel(k: KernelEvent, pid: int) -> Event:
    args: Event = {"layer": k.layer, "op": k.op, "template": k.template or "tinygrad", "grid": list(k.grid),
                   "block": list(k.block), "bytes": k.nbytes, "flops": k.flops,
                   "measured_us": k.seconds * 1e6, **({"reason": k.reason} if k.reason else {})}
    if k.forecast is not None:
        args |= {"predicted_us": k.forecast.seconds * 1e6, "ratio": k.ratio, "bound": k.forecast.bound,
                 "predicted_by": k.forecast.model}
    return _complete(k.name, "kernel", pid, STREAM, k.begin_s, k.seconds, args)


def _forecast_events(kernels: Iterable[KernelEvent], pid: int) -> Iterator[Event]:
    at = 0.0
    for k in kernels:
        if k.forecast is None: continue
        args = {"layer": k.layer, "bound": k.forecast.bound, "predicted_by": k.forecast.model}
        yield _complete(k.name, "predicted", pid, PREDICTED, at, k.forecast.seconds, args)
        at += k.forecast.seconds


def _spans(kernels: Sequence[KernelEvent], pid: int) -> list[Event]:
    """Around kernels that follow each other in a layer, outer ones first."""
    events: list[Event] = []
    def add(run: list[KernelEvent], depth: int) -> None:
        for name, group in groupby(run, lambda k: next(iter(parts(k.layer)[depth:]), "")):
            if not name: continue
            inside = list(group)
            begin, end = inside[0].begin_s, inside[-1].begin_s + inside[-1].seconds
            whole = ".".join(parts(inside[0].layer)[:depth + 1])
            events.append(_complete(name, "layer", pid, STREAM, begin, end - begin,
                                    {"layer": whole, "kernels": len(inside)}))
            add(inside, depth + 1)
    add(list(kernels), 0)
    return events


def parts(layer: str) -> list[str]:
    """A layer's name from the outermost part in; numbers stay with what they count: layers.3, attention."""
    out: list[str] = []
    for word in layer.split(".") if layer else ():
        if word.isdigit() and out: out[-1] += f".{word}"
        else: out.append(word)
    return out


def common(layers: Sequence[str]) -> str:
    """The innermost layer that holds all of these."""
    rows = [parts(layer) for layer in layers]
    same = takewhile(lambda words: len(set(words)) == 1, zip(*rows, strict=False))
    return ".".join(words[0] for words in same)


def _counters(readings: Sequence[GPUSample], pid: int, begun: float) -> Iterator[Event]:
    for reading in readings:
        for name, (title, unit, scale) in COUNTERS.items():
            if (value := getattr(reading, name)) is None: continue
            yield {"ph": "C", "name": title, "pid": pid, "ts": max(0, _ns(reading.seconds - begun)) / 1e3,
                   "args": {unit: value * scale}}
