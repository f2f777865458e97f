"""Bursts of contenders, in turns, with cycles and time of every SM.

Protocol. `Bursts(run, sets).set_size(seconds)` is as many runs of a contender as take so long, on a GPU the
replay of one CUDA graph, so that the host's launches are not what is timed. `in_turns` warms all until power
is steady (3 s at least, at first), then takes a burst of each in turn, another one first in each round.

A burst begins and ends with a kernel that writes the cycle counter and the global timer of every SM it runs
on (`Stamps`). So the SMs' clock during a burst is known, which NVML tells as means that are 5 to 10 % off,
and kernels can be compared in cycles where power changes the clock.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench.gpu.compare import Run
from tinygrad_nv.runtime.driver import Launch, pointer
from tinygrad_nv.runtime.observe.telemetry import GPUSample, Samples, Telemetry

Row = dict[str, Any]

BURST_S, WARM_S = 0.02, 3.0     # seconds of a burst; of warm-up at least
AGAIN_S = 0.5                   # of warm-up when the GPU has just been timed
STEADY = 0.02                   # the last five readings of power are as near as this
LEAST_BURSTS, MOST_RUNS = 5, 2000

# **** cycles ****

# each CTA: 1 + its SM, the cycle counter, the timer
STAMP = """
.version 8.0
.target {target}
.address_size 64
.visible .entry stamp(.param .u64 to) {{
  .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %d<5>;
  mov.u32 %r0, %tid.x;
  setp.ne.u32 %p, %r0, 0;
  @%p ret;
  ld.param.u64 %d0, [to];
  cvta.to.global.u64 %d0, %d0;
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %d1, %r1, 24;
  add.u64 %d2, %d0, %d1;
  mov.u32 %r2, %smid;
  add.u32 %r2, %r2, 1;
  cvt.u64.u32 %d1, %r2;
  mov.u64 %d3, %clock64;
  mov.u64 %d4, %globaltimer;
  st.global.b64 [%d2], %d1;
  st.global.b64 [%d2+8], %d3;
  st.global.b64 [%d2+16], %d4;
  ret;
}}
"""
CTAS_OF_SM, WORDS = 2, 3    # CTAs for each SM, so that each has one, and words of a CTA


class Stamps:
    """Cycle counters and timers of the SMs where a burst begins and where it ends. `words` is int64 memory of
    the device, [2, CTAs, `WORDS`], that `address` is of."""

    def __init__(self, driver: Any, words: Any, address: int) -> None:
        properties = driver.properties
        self.driver, self.words, self.ctas = driver, words, CTAS_OF_SM * properties.sm_count
        self.function = driver.load(STAMP.format(target=properties.arch).encode()).function("stamp")
        self.addresses = [address + place * 8 * WORDS * self.ctas for place in range(2)]

    def write(self, place: int, stream: Any = None) -> None:
        """Puts the stamps of the beginning (0) or the end (1) into a stream."""
        self.driver.submit(Launch(self.function, (self.ctas, 1, 1), (32, 1, 1),
                                  (pointer(self.addresses[place]),)), stream)


def open_stamps() -> Stamps | None:
    """Returns the stamps of torch's GPU; None where there is none."""
    import torch
    if not torch.cuda.is_available(): return None
    from bench.gpu.launch import device
    driver = device()
    ctas = CTAS_OF_SM * driver.properties.sm_count
    words = torch.zeros(2, ctas, WORDS, dtype=torch.int64, device="cuda")
    return Stamps(driver, words, words.data_ptr())


def read_stamps(words: np.ndarray) -> tuple[float, float]:
    """Returns the cycles and the seconds between both stamps, medians of the SMs that have both; words are
    [2, CTAs, `WORDS`]. NaN where no SM has both."""
    begin, end = ({int(sm): (int(cycles), int(ns)) for sm, cycles, ns in place if sm} for place in words)
    spans = [np.subtract(end[sm], begin[sm]) for sm in begin.keys() & end.keys()]
    if not spans: return float("nan"), float("nan")
    cycles, ns = np.median(spans, axis=0)
    return float(cycles), float(ns) / 1e9


# **** bursts ****

warm = False    # whether something was timed in this process

@dataclass
class Bursts:
    """A contender's runs, `count` in a row. On a GPU a burst is the replay of a CUDA graph."""
    run: Run
    sets: int
    count: int = 1
    graph: Any = None
    stream: Any = None
    why_eager: str = ""
    stamps: Stamps | None = None

    def set_size(self, seconds: float) -> Bursts:
        """So many runs that a burst takes `seconds`, and a graph of them."""
        import torch
        self.eager(3)
        self.count = max(1, min(MOST_RUNS, round(seconds / max(self.eager(10) / 10, 1e-7))))
        try:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(stream): self.run(0)  # what a library makes for a stream is made before
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream): self._run_stamped(self.count)
            self.graph, self.stream = graph, stream
        except Exception as error:  # whatever a contender does that cannot be captured
            self.why_eager = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            torch.cuda.synchronize()
        return self

    def eager(self, count: int, meanwhile: Callable[[], Any] = lambda: None) -> float:
        """Seconds of `count` runs, launched one after the other."""
        return time_on_device(lambda: self._run_stamped(count), meanwhile)

    def _run_stamped(self, count: int) -> None:
        if self.stamps is None: stream = None
        else:
            import torch
            stream = self.stamps.driver.external_stream(torch.cuda.current_stream().cuda_stream)
            self.stamps.words.zero_()
            self.stamps.write(0, stream)
        for i in range(count): self.run(i % self.sets)
        if self.stamps is not None: self.stamps.write(1, stream)

    def cycles(self) -> tuple[float, float]:
        """Returns the cycles of one run of the last burst, and the SMs' clock in MHz; NaN without stamps."""
        if self.stamps is None: return float("nan"), float("nan")
        cycles, seconds = read_stamps(self.stamps.words.cpu().numpy())
        return cycles / self.count, cycles / max(seconds, 1e-9) / 1e6

    def seconds(self, meanwhile: Callable[[], Any] = lambda: None) -> float:
        """Returns the seconds of one run, by one burst. The host does `meanwhile` while the device works."""
        if self.graph is None: return self.eager(self.count, meanwhile) / self.count
        return time_on_device(self.graph.replay, meanwhile) / self.count


def time_on_device(work: Callable[[], Any], meanwhile: Callable[[], Any] = lambda: None) -> float:
    """Seconds on the device, by events around the work."""
    import torch
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    meanwhile()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def warm_up(bursts: Sequence[Bursts], telemetry: Telemetry, most_s: float) -> None:
    """Bursts of all in turn until power is steady: after WARM_S at the soonest, AGAIN_S where others were
    timed before; of each once at least."""
    global warm
    begun, watts, least_s = time.perf_counter(), [0.0], AGAIN_S if warm else WARM_S
    while True:
        for burst in bursts: burst.seconds()
        watts = [*watts[-4:], telemetry.now().watts or 0.0]
        spent = time.perf_counter() - begun
        if spent > most_s or (spent > least_s and max(watts) - min(watts) <= STEADY * max(watts)): break
    warm = True


def in_turns(bursts: dict[str, Bursts], budget_s: float) -> Row:
    """Bursts of all contenders, one after the other, until time is up, each round from another one on: who
    comes first meets another temperature. Clocks and power meanwhile, and by contender."""
    telemetry, names = Telemetry(0), list(bursts)
    warm_up(list(bursts.values()), telemetry, min(2 * WARM_S, 2 * budget_s))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    stamped: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    readings: dict[str, list[GPUSample]] = {name: [] for name in names}
    begun = time.perf_counter()
    with telemetry.sample() as samples:
        while (turn := len(seconds[names[-1]])) < LEAST_BURSTS or time.perf_counter() - begun < budget_s:
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                seconds[name].append(bursts[name].seconds(
                    lambda into=readings[name]: into.append(telemetry.now())))  # type: ignore[misc]
                stamped[name].append(bursts[name].cycles())
    return {"seconds": {name: [float(f"{s:.5g}") for s in done] for name, done in seconds.items()},
            "count": {name: burst.count for name, burst in bursts.items()},
            "eager": {name: burst.why_eager for name, burst in bursts.items() if burst.why_eager},
            **_summarize_stamps(stamped),
            "clocks": {name: clocks(done) for name, done in readings.items()},
            "telemetry": samples.record()}


def _summarize_stamps(stamped: dict[str, list[tuple[float, float]]]) -> Row:
    """Returns cycles of each burst's run, and the median clock; nothing of contenders without stamps."""
    have = {name: done for name, done in stamped.items() if not np.isnan(done).any()}
    return {"cycles": {name: [float(f"{cycles:.6g}") for cycles, _ in done] for name, done in have.items()},
            "mhz": {name: round(median(mhz for _, mhz in done), 1) for name, done in have.items()}}


def clocks(readings: list[GPUSample]) -> dict[str, Any]:
    """Returns the clocks of a contender's bursts: mean, lowest and highest of SM clock, watts and
    temperature; None where these are not told."""
    some = Samples(readings)
    return {name: vars(spread) if (spread := some.spread(name)) else None
            for name in ("sm_mhz", "watts", "temperature_c")}
