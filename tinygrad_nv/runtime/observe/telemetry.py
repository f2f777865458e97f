"""Clocks, power, memory and temperature of a GPU, through NVML (the package nvidia-ml-py). Changes nothing.

Protocol: `Telemetry(device)` finds the GPU; `now()` is one `GPUSample`; `with telemetry.sampled() as
samples:` reads in a thread until the block ends, after which `samples` has means, extremes and joules. What
NVML does not tell (no permission, a MIG instance, a field that this GPU lacks) is None, never an error. Where
there is no NVML at all `missing()` says why in words, `Telemetry(...).available` is False and every field is
None: a bench runs the same, and says that clocks were not read.

CUDA numbers GPUs in an order of its own (the fastest first, CUDA_VISIBLE_DEVICES applied), NVML by PCI bus:
an ordinal is CUDA's, and translated by the bus id that CUDA gives for it. A UUID ("GPU-…", "MIG-…") or a bus
id ("0000:65:00.0") names a GPU directly.

Joules are the difference of the GPU's energy counter where it has one (from Volta on; it moves every few
hundredths of a second, so blocks below a second are rough), else watts integrated over the samples. Both are
of the whole board, and of all processes that use it.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from tinygrad_nv.errors import DriverError

T = TypeVar("T")
# why clocks are not the highest: NVML's clocks-event-reasons, by bit
REASONS = {0x1: "idle", 0x2: "application clocks are set", 0x4: "power cap", 0x8: "hardware slowdown",
           0x10: "sync boost", 0x20: "too hot (software)", 0x40: "too hot (hardware)",
           0x80: "external power brake", 0x100: "display clocks", 0x200: "board limit", 0x400: "reliability"}


@dataclass(frozen=True)
class GPUSample:
    """One look at a GPU. `seconds` is of time.perf_counter; None is what NVML did not tell.
    `throttle_reasons` says why clocks are below the highest, and is empty where nothing holds them back."""
    seconds: float
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    watts: float | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest of what was read."""
    mean: float
    low: float
    high: float


@dataclass
class Samples:
    """Readings during a block. Complete when the block has ended: the first reading is of its begin, the last
    of its end. `counted_joules` is the energy counter's difference, None where there is none."""
    readings: list[GPUSample] = field(default_factory=list)
    counted_joules: float | None = None

    def spread(self, name: str) -> Spread | None:
        """Returns the spread of a field of the readings, over those that have it."""
        values = [value for each in self.readings if (value := getattr(each, name)) is not None]
        return Spread(sum(values) / len(values), min(values), max(values)) if values else None

    @property
    def sm_mhz(self) -> Spread | None: return self.spread("sm_mhz")

    @property
    def memory_mhz(self) -> Spread | None: return self.spread("memory_mhz")

    @property
    def watts(self) -> Spread | None: return self.spread("watts")

    @property
    def temperature_c(self) -> Spread | None: return self.spread("temperature_c")

    @property
    def seconds(self) -> float:
        """From the first reading to the last."""
        return self.readings[-1].seconds - self.readings[0].seconds if self.readings else 0.0

    @property
    def throttle_reasons(self) -> tuple[str, ...]:
        """All reasons that were seen, in the order of their first time."""
        return tuple(dict.fromkeys(reason for each in self.readings for reason in each.throttled or ()))

    @property
    def joules(self) -> float | None:
        """Energy of the block; `joules_from` says how it is known."""
        return self.counted_joules if self.counted_joules is not None else self.joules_from_watts

    @property
    def joules_from(self) -> str:
        """"energy counter", "watts over time", or "" where there are no joules."""
        if self.counted_joules is not None: return "energy counter"
        return "watts over time" if self.joules_from_watts is not None else ""

    @property
    def joules_from_watts(self) -> float | None:
        """Trapezoids under the watts that were read."""
        known = [(each.seconds, each.watts) for each in self.readings if each.watts is not None]
        if len(known) < 2: return None
        return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairwise(known))

    def per_joule(self, count: float) -> float | None:
        """`count` (tokens, floating-point operations) for each joule; None where joules are not known."""
        return count / joules if (joules := self.joules) else None

    def record(self) -> dict[str, Any]:
        """Returns what a result file keeps of it, plain values."""
        names = ("sm_mhz", "memory_mhz", "watts", "temperature_c", "memory_used_bytes")
        return {**{name: vars(spread) if (spread := self.spread(name)) else None for name in names},
                "joules": self.joules, "joules_from": self.joules_from, "seconds": self.seconds,
                "readings": len(self.readings), "throttled": list(self.throttle_reasons)}

    def __str__(self) -> str:
        def describe(name: str, unit: str) -> str:
            if (s := self.spread(name)) is None: return f"{unit} not read"
            return f"{s.mean:.0f} {unit} ({s.low:.0f} … {s.high:.0f})"
        joules = "joules not known"
        if self.joules is not None: joules = f"{self.joules:.3g} J ({self.joules_from})"
        held = f"; held back by: {', '.join(self.throttle_reasons)}" if self.throttle_reasons else ""
        clocks = f"SM {describe('sm_mhz', 'MHz')}, memory {describe('memory_mhz', 'MHz')}"
        return f"{clocks}, {describe('watts', 'W')}, {joules}{held}"


def missing() -> str:
    """Returns what telemetry lacks on this machine, in words; \"\" when it works."""
    return _nvml()[1]


class Telemetry:
    """One GPU, by CUDA's ordinal, UUID or PCI bus id. Raises `DriverError` where NVML works and has no such
    GPU."""

    def __init__(self, device: int | str = 0) -> None:
        self.nvml, self.missing = _nvml()
        self.handle: Any = None
        if self.available: self.handle = _handle(self.nvml, device)

    @property
    def available(self) -> bool: return not self.missing

    @property
    def name(self) -> str:
        """Name that NVML has for the GPU; \"\" where that is not known."""
        return self._ask(lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu))) or ""

    @property
    def uuid(self) -> str:
        """The GPU's own name, the same in every order of devices."""
        return self._ask(lambda nvml, gpu: _text(nvml.nvmlDeviceGetUUID(gpu))) or ""

    @property
    def driver_version(self) -> str:
        """The NVIDIA driver's version, as nvidia-smi shows it; "" where that is not known."""
        return self._ask(lambda nvml, gpu: _text(nvml.nvmlSystemGetDriverVersion())) or ""

    def throttle_reasons(self) -> tuple[str, ...]:
        """Returns what holds the clocks back now; nothing where that is not known."""
        return self._ask(
            lambda nvml, gpu: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))) or ()

    def now(self) -> GPUSample:
        """One look. Takes from 10 µs to some milliseconds, by driver."""
        seconds = time.perf_counter()
        return GPUSample(
            seconds,
            self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))),
            self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM))),
            self._watts(),
            self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
            self._ask(lambda nvml, gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))),
            self._ask(lambda nvml, gpu: _reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))))

    def energy_joules(self) -> float | None:
        """The energy counter, since the driver was loaded; None where the GPU has none."""
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) * 1e-3)

    @contextmanager
    def sample(self, period_s: float = 0.05) -> Iterator[Samples]:
        """Reads now, every `period_s` seconds, and when the block ends."""
        samples, stop = Samples(), threading.Event()
        def read() -> None:
            while not stop.wait(period_s): samples.readings.append(self.now())
        thread = threading.Thread(target=read, name="telemetry", daemon=True)
        samples.readings.append(self.now())
        before = self.energy_joules()
        if self.available: thread.start()
        try: yield samples
        finally:
            stop.set()
            if self.available: thread.join()
            after = self.energy_joules()
            samples.readings.append(self.now())
            if before is not None and after is not None: samples.counted_joules = after - before

    def _watts(self) -> float | None:
        """Returns the watts of this moment; of the last second where the GPU tells only that (from Ampere on,
        without the field)."""
        def instant(nvml: Any, gpu: Any) -> float:
            value, = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
            if value.nvmlReturn: raise nvml.NVMLError(value.nvmlReturn)
            return value.value.uiVal * 1e-3
        if (watts := self._ask(instant)) is not None: return watts
        return self._ask(lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) * 1e-3)

    def _ask(self, ask: Callable[[Any, Any], T]) -> T | None:
        """NVML's answer, or None where it gives none."""
        if not self.available: return None
        try: return ask(self.nvml, self.handle)
        except self.nvml.NVMLError: return None


def _nvml() -> tuple[Any, str]:
    """The module, initialised (NVML counts its users), or what is missing."""
    try:
        import pynvml
    except ImportError: return None, "nvidia-ml-py is not installed: pip install nvidia-ml-py"
    try: pynvml.nvmlInit()
    except pynvml.NVMLError as error: return None, f"NVML does not answer: {error}"
    return pynvml, ""


def _handle(nvml: Any, device: int | str) -> Any:
    """NVML's handle of a GPU."""
    try:
        if isinstance(device, int): return _of_ordinal(nvml, device)
        if device.upper().startswith(("GPU-", "MIG-")): return nvml.nvmlDeviceGetHandleByUUID(device)
        return nvml.nvmlDeviceGetHandleByPciBusId(device)
    except nvml.NVMLError as error:
        raise DriverError(f"telemetry of GPU {device}: {error}", f"one of {_list_gpus(nvml)}",
                          "an ordinal is CUDA's, after CUDA_VISIBLE_DEVICES") from error


def _of_ordinal(nvml: Any, ordinal: int) -> Any:
    """By the bus id that CUDA gives for its ordinal; where CUDA cannot be asked, by CUDA_VISIBLE_DEVICES over
    NVML's order."""
    if (bus := _bus_id(ordinal)) is not None: return nvml.nvmlDeviceGetHandleByPciBusId(bus)
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    entry = visible[ordinal] if 0 <= ordinal < len(visible) else str(ordinal)
    return nvml.nvmlDeviceGetHandleByIndex(int(entry)) if entry.isdigit() else _handle(nvml, entry)


def _bus_id(ordinal: int) -> str | None:
    """The PCI bus id of CUDA's device, "" if CUDA has no such device, None where CUDA cannot be asked. Makes
    no context."""
    try:
        from cuda.bindings import driver
        if driver.cuInit(0)[0]: return None
    except (ImportError, RuntimeError): return None  # no package, or no libcuda
    failed, device = driver.cuDeviceGet(ordinal)
    if failed: return ""
    failed, name = driver.cuDeviceGetPCIBusId(16, device)
    return None if failed else _text(name).strip("\0")


def _reasons(bits: int) -> tuple[str, ...]:
    """In words; a bit that is not in the table by its number."""
    known = tuple(words for bit, words in REASONS.items() if bits & bit)
    rest = bits & ~sum(REASONS)
    return (*known, f"reason {rest:#x}") if rest else known


def _list_gpus(nvml: Any) -> str:
    """The GPUs there are, in NVML's order."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return ", ".join(_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles) or "none: NVML sees no GPU"


def _text(value: str | bytes) -> str: return value.decode() if isinstance(value, bytes) else value
