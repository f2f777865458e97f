"""Players that run the microbenchmarks of bench/gpu/calibrate.py: a GPU, the emulated one, or the timing
model.

Protocol. A player runs a probe (calibrate_probe.py) and says what it took: `cycles` of a CTA's loop, or
`seconds` of a whole launch by itself. `row` gives the seconds of many empty launches in a row: in a stream,
as nodes of a graph, as nodes with programmatic edges. `hertz` is the clock while a probe runs again and
again. The timing model plays a GPU that has exactly the figures it is given: what is calibrated on it must be
these figures.
"""
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import median

import numpy as np

from bench.gpu.calibrate_probe import CLOCKS, ENTRY, ROW_BYTES, WORDS, Probe, program
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import in_row, seconds
from tinygrad_nv.runtime.driver import Driver, Fill, Function, Launch, Node, TensorMapSpec, integer, pointer

ROWS = ("stream", "graph", "PDL")
LOAD_S = 1.0            # seconds of launches, until power and clock are steady
NO_HBM = 1e15           # bytes a second
STEADY = 50             # rounds after which the model's clock is that of any number


class Player(ABC):
    """Player that a probe runs on. `repeats`: how often a measurement is worth repeating."""
    arch: str
    sms: int
    l2_bytes: int
    repeats = 1

    @abstractmethod
    def cycles(self, probe: Probe, rounds: int) -> float:
        """Returns the cycles of the loop, from the first warp's begin to the last one's end."""

    @abstractmethod
    def seconds(self, probe: Probe, rounds: int) -> float:
        """Returns the seconds of a launch by itself."""

    @abstractmethod
    def row(self, count: int, how: str) -> float:
        """Seconds of `count` launches of an empty kernel, one of ROWS."""

    @abstractmethod
    def hertz(self, probe: Probe, rounds: int) -> float:
        """The clock of the SMs under this load."""

    def ctas(self, probe: Probe) -> int:
        """Returns the CTAs of a launch."""
        return probe.ctas or max(1, round(self.sms * probe.share)) * probe.ctas_of_sm


def empty(arch: str) -> str:
    """A kernel that lets the next one begin, and waits for the one before."""
    kb = Kernel(ENTRY, arch, 32)
    if kb.hopper:
        kb.launch_dependents()
        kb.wait_for_previous_grid()
    return kb.ptx()


# **** on a GPU ****

class GPUPlayer(Player):
    """A GPU, or the emulated one, whose times mean nothing. `sms`: fewer than it has, for that one."""

    def __init__(self, driver: Driver, sms: int = 0, seed: int = 0) -> None:
        self.driver, self.arch = driver, driver.properties.arch
        self.sms, self.repeats = sms or driver.properties.sm_count, 1 if driver.emulated else 5
        self.l2_bytes = driver.properties.l2_bytes
        self.load_s = 0.0 if driver.emulated else LOAD_S
        self.random = np.random.default_rng(seed)
        self.loaded: dict[str, Function] = {}
        self.kept: tuple[int, bool, int] | None = None
        self.out = driver.alloc(8 * WORDS * 64 * self.sms)
        self.events = driver.event(), driver.event()

    @cached_property
    def scratch(self) -> int:
        """Twice what L2 holds: once it is written, L2 has nothing else."""
        return self.driver.alloc(self.scratch_bytes)

    @property
    def scratch_bytes(self) -> int:
        return 4096 if self.driver.emulated else 2 * self.l2_bytes

    def cycles(self, probe: Probe, rounds: int) -> float: return float(np.ptp(self._clocks(probe, rounds)[0]))

    def _clocks(self, probe: Probe, rounds: int) -> np.ndarray:
        """[clock, warp, before or after] of all warps, or of those of a cluster's first CTA."""
        work = self.launch(probe, rounds)
        self._flush(probe)
        self.driver.submit(work)
        warps = self.ctas(probe) * probe.threads // 32
        found = np.zeros((min(warps, 64 * self.sms), len(CLOCKS), 2), np.int64)
        self.driver.copy_out(found.data.cast("B"), self.out)
        if probe.cluster > 1: found = found[:probe.threads // 32]  # clocks of SMs are not the same
        return found.transpose(1, 0, 2)

    def seconds(self, probe: Probe, rounds: int) -> float:
        work, found = self.launch(probe, rounds), []
        for _ in range(self.repeats):
            self._flush(probe)
            self.driver.synchronize()
            found.append(self._time(lambda: self.driver.submit(work)))
        return median(found)

    def _flush(self, probe: Probe) -> None:
        """Empties L2 of what the probe reads, unless it must be there."""
        if not probe.near: self.driver.submit(Fill(self.scratch, 0, self.scratch_bytes))

    def _time(self, run: Callable[[], object]) -> float:
        begin, end = self.events
        self.driver.record(begin)
        run()
        self.driver.record(end)
        self.driver.wait_for(end)
        return self.driver.ms_between(begin, end) * 1e-3

    def row(self, count: int, how: str) -> float:
        work = Launch(self.function(empty(self.arch)), (1, 1, 1), (32, 1, 1), pdl=how == "PDL")
        if how == "stream":
            self.driver.submit(work)
            self.driver.synchronize()
            return self._time(lambda: [self.driver.submit(work) for _ in range(count)])
        graph = self.driver.graph()
        after: list[Node] = []
        for _ in range(count): after = [graph.add(work, after)]
        executable = graph.instantiate()
        executable.launch()
        self.driver.synchronize()
        return self._time(executable.launch)

    def hertz(self, probe: Probe, rounds: int) -> float:
        if self.driver.emulated: rounds = 1
        work, end = self.launch(probe, rounds), time.perf_counter() + self.load_s
        while time.perf_counter() < end:
            for _ in range(20): self.driver.submit(work)
            self.driver.synchronize()
        clocks = self._clocks(probe, rounds)
        cycles, nanoseconds = (clocks[i, :, 1] - clocks[i, :, 0] for i in range(2))
        return float(1e9 * cycles.sum() / max(1, nanoseconds.sum()))

    # what a launch needs

    def function(self, text: str) -> Function:
        """A kernel, compiled once."""
        if text not in self.loaded: self.loaded[text] = self.driver.load(text.encode()).function(ENTRY)
        return self.loaded[text]

    def launch(self, probe: Probe, rounds: int) -> Launch:
        """A probe's, with its memory as it must be."""
        text, smem = program(probe, self.arch)
        memory = self.memory(probe.nbytes, probe.random)
        args = [pointer(self.out), pointer(memory), integer(rounds)]
        if probe.box:
            shape = (64, probe.nbytes // ROW_BYTES), (ROW_BYTES,), (64, probe.box)
            args.append(self.driver.tensor_map(TensorMapSpec("bf16", memory, *shape, swizzle="128B")))
        return Launch(self.function(text), (self.ctas(probe), 1, 1), (probe.threads, 1, 1), tuple(args),
                      smem + probe.smem, (probe.cluster, 1, 1))

    def memory(self, nbytes: int, random: bool) -> int:
        """Zeros or random bytes; those of the last probe where they fit. What is written here is in L2, if
        it has room."""
        if self.kept is not None:
            address, was_random, had = self.kept
            if (was_random, had) == (random, nbytes): return address
            self.driver.synchronize()
            self.driver.free(address)
        address = self.driver.alloc(nbytes)
        self.kept = address, random, nbytes
        if random:
            numbers = self.random.standard_normal(nbytes // 2, np.float32).view(np.uint32) >> 16    # bfloat16
            self.driver.copy_in(address, numbers.astype(np.uint16).data.cast("B"))
        else: self.driver.submit(Fill(address, 0, nbytes))
        return address


# **** on the timing model ****

@dataclass
class ModelPlayer(Player):
    """A GPU of these figures. What is in L2 already comes from there: then HBM is as near and fast."""
    gpu: GPUFigures

    def __post_init__(self) -> None:
        self.arch, self.sms, self.l2_bytes = self.gpu.arch, self.gpu.sms, self.gpu.l2_bytes

    def cycles(self, probe: Probe, rounds: int) -> float: return self.timing(probe, rounds).cycles

    def seconds(self, probe: Probe, rounds: int) -> float: return self.timing(probe, rounds).seconds

    def row(self, count: int, how: str) -> float:
        one = emptiness(self.gpu)
        found = in_row([one] * count, self.gpu, pdl=how == "PDL", graph=how != "stream")
        return seconds(found, self.gpu)

    def hertz(self, probe: Probe, rounds: int) -> float:
        return self.timing(probe, min(rounds, STEADY)).clock_hz

    def timing(self, probe: Probe, rounds: int) -> Timing:
        """The prediction of a launch."""
        near = replace(self.gpu, hbm_latency=self.gpu.l2_latency, hbm_bytes_per_s=NO_HBM)
        text, smem = program(probe, self.arch)
        emu = Emulator(self.arch, check=False)
        out = emu.alloc(np.zeros(WORDS * self.ctas(probe) * probe.threads // 32, np.int64))
        memory = emu.alloc(np.zeros(probe.nbytes, np.uint8))
        args: list[object] = [out, memory, rounds]
        if probe.box:
            dims = (probe.nbytes // ROW_BYTES, 64)
            args.append(TensorMap.of_tiles(memory.ptr, (probe.box, 64), "128B", dims, dtype="bf16"))
        found = emu.launch(text, self.ctas(probe), probe.threads, args, ENTRY, probe.cluster,
                           smem + probe.smem, timing=near if probe.near else self.gpu).timing
        assert found is not None
        return found


@lru_cache(8)
def emptiness(gpu: GPUFigures) -> Timing:
    """A launch of the empty kernel."""
    found = Emulator(gpu.arch, check=False).launch(empty(gpu.arch), 1, 32, timing=gpu).timing
    assert found is not None
    return found
