"""Measurements of bench/gpu/calibrate.py, and the figures of ptx/timing/gpus/ that follow from them.

Protocol. A `Measure` has a value on any player (calibrate_players.py). A `Constant` is a figure of the model,
and the measure that tells it. Where the measure has it pure, such as a clock, that is it. Else the model
finds it: the value with which the model, playing a GPU, measures what was measured. So the microbenchmark's
other instructions take what they take in the model, and figures are found in an order in which each depends
on those before it alone.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from bench.gpu import (
    calibrate_causes,  # noqa: F401 (registers its probes)
    calibrate_memory,  # noqa: F401
    calibrate_sm,  # noqa: F401
)
from bench.gpu.calibrate_players import ModelPlayer, Player
from bench.gpu.calibrate_probe import PROBES, Loop, Probe, fits
from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.timing.gpu import GPUFigures

FEW, MANY = 16, 80          # launches in a row
WAVES = 10, 60              # CTAs of each SM, one after the other
LOAD_ROUNDS = 2000          # of a probe under which the clock is read: a millisecond, of which
IDLE_ROUNDS = 200_000       # globaltimer may count microseconds only
UNLIMITED = 0.995           # of the highest clock: power limits what is below
NOT_LIMITED = "power does not limit the clock"
CLOSE, STEPS = 0.002, 8     # relative: when the model is near enough; its tries at most
INSENSITIVE = 0.02          # of the relative change that a constant has: less is none


@dataclass(frozen=True)
class Measure:
    """Something to measure: `value(player)`, in `unit`."""
    name: str
    unit: str
    value: Callable[[Player], float]
    needs: str = "sm_80"
    probe: Probe | None = None

    def of(self, arch: str) -> bool:
        """Whether the architecture has it."""
        return arch[:5] >= self.needs[:5] and (self.probe is None or fits(self.probe, arch))


def per_round(probe: Probe, took: Callable[[Probe, int], float]) -> float:
    """Returns the time of a further round."""
    few, many = probe.rounds
    return (took(probe, many) - took(probe, few)) / (many - few)


def of_probe(probe: Probe) -> Measure:
    """The probe's value: of a CTA in cycles, of a whole GPU in bytes a second."""
    def value(player: Player) -> float:
        if not probe.ctas: return probe.count * player.sms / per_round(probe, player.seconds)
        took = per_round(probe, player.cycles)
        return probe.count / took if probe.rate else took / probe.count
    return Measure(probe.name, probe.unit if probe.ctas else "bytes/s", value, probe=probe)


def read_latency(player: Player) -> float:
    """Returns the time of a read that has no bytes."""
    probe = PROBES["HBM read"]
    return player.seconds(probe, probe.rounds[0]) - probe.rounds[0] * per_round(probe, player.seconds)


def further_load(player: Player) -> float:
    """Cycles for each of many TMA loads of one thread."""
    few, many = (PROBES[f"TMA loads of a row, {count} and a wait"] for count in (8, 32))
    whole = [probe.count * of_probe(probe).value(player) for probe in (few, many)]
    return (whole[1] - whole[0]) / (many.count - few.count)


def of_row(how: str) -> Callable[[Player], float]:
    """Seconds of a further launch in a row."""
    return lambda player: (player.row(MANY, how) - player.row(FEW, how)) / (MANY - FEW)


def alone(kb: Kernel, memory: Value, tensor: Value | None) -> Loop:
    return Loop(lambda: kb.sync())


WAVE = Probe("wave", alone, ctas=0, rounds=(8, 8))


def wave(player: Player) -> float:
    """Cycles that a further CTA takes on an SM that has room for one."""
    few, many = (player.seconds(replace(WAVE, ctas_of_sm=count, smem=_most_smem(player.arch)), 8)
                 for count in WAVES)
    return (many - few) / (WAVES[1] - WAVES[0]) * player.hertz(WAVE, IDLE_ROUNDS)


def _most_smem(arch: str) -> int: return {"sm_80": 160, "sm_89": 96, "sm_90": 220}[arch[:5]] << 10


def under_load(player: Player, name: str, random: bool) -> float:
    """The clock while all SMs run a probe."""
    return player.hertz(replace(PROBES[name], ctas=0, random=random), LOAD_ROUNDS)


TENSOR = {"sm_90": "wgmma m64n256k16 bf16 SS"}


def tensor_load(random: bool) -> Callable[[Player], float]:
    """The clock while tensor cores are busy."""
    def value(player: Player) -> float:
        name = TENSOR.get(player.arch[:5], "mma.sync m16n8k16 bf16 of an SM")
        return under_load(player, name, random)
    return value


def measures() -> Iterator[Measure]:
    yield Measure("SMs", "", lambda player: player.sms)
    yield Measure("L2", "bytes", lambda player: player.l2_bytes)
    yield Measure("clock of idle SMs", "Hz", lambda player: player.hertz(WAVE, IDLE_ROUNDS))
    yield from map(of_probe, PROBES.values())
    yield Measure("a further TMA load of a row", "cycles", further_load, "sm_90a")
    yield Measure("HBM read of no bytes", "s", read_latency)
    for how in ("stream", "graph"): yield Measure(f"empty kernel, {how}", "s", of_row(how))
    yield Measure("empty kernel, PDL", "s", of_row("PDL"), "sm_90a")
    yield Measure("a further CTA on an SM", "cycles", wave)
    yield Measure("clock, tensor cores on zeros", "Hz", tensor_load(False))
    yield Measure("clock, tensor cores on random numbers", "Hz", tensor_load(True))
    yield Measure("clock, L2", "Hz", lambda player: under_load(player, "L2 bytes of all SMs, near", True))


MEASURES: dict[str, Measure] = {each.name: each for each in measures()}


# **** figures ****

@dataclass(frozen=True)
class Constant:
    """A figure of `GPUFigures`, and the measure that tells it. `exact` computes it; else the model finds it,
    from `estimate` on if there is one, which also stands where the model does not depend on the figure. Both
    are None for a measurement that says nothing, for the reason `silent`."""
    name: str
    measure: str
    exact: Callable[[float, GPUFigures], float | None] | None = None
    estimate: Callable[[float, GPUFigures], float | None] | None = None
    silent: str = ""


def watts(hertz: float, gpu: GPUFigures) -> float | None:
    """What, always busy, leaves this clock; None of the highest, which says nothing."""
    if hertz > UNLIMITED * gpu.clock_hz: return None
    return (gpu.power_w - gpu.static_w) / (hertz / gpu.clock_hz) ** gpu.power_exponent


def same(measured: float, gpu: GPUFigures) -> float: return measured


CONSTANTS = (
    Constant("sms", "SMs", same),
    Constant("l2_bytes", "L2", same),
    Constant("clock_hz", "clock of idle SMs", same),
    Constant("mma_macs", "mma.sync m16n8k16 bf16 of an SM", lambda cycles, gpu: 16 * 8 * 16 / cycles / 4),
    Constant("fp32_cycles", "FFMA of an SM", lambda cycles, gpu: 4 * cycles),
    Constant("tensor_w", "clock, tensor cores on random numbers", None, watts, NOT_LIMITED),
    Constant("memory_w", "clock, L2", None, watts, NOT_LIMITED),
    Constant("mma_latency", "mma.sync m16n8k16 bf16, 1 warp, ILP 1", estimate=same),
    Constant("shared_bytes_per_cycle", "LDS.128 bytes", same),
    Constant("shared_latency", "LDS latency"),
    Constant("wait_latency", "mbarrier round trip of 128"),
    Constant("wgmma_latency", "wgmma m64n8k16 bf16, 1 and a wait"),
    Constant("wgmma_ahead", "wgmma issued ahead"),
    Constant("l2_latency", "load latency, 4 MiB"),
    Constant("hbm_latency", "load latency, 256 MiB"),
    Constant("l2_bytes_per_cycle", "L2 bytes of all SMs, near", lambda rate, gpu: rate / gpu.clock_hz),
    Constant("hbm_bytes_per_s", "HBM read", same),
    Constant("tma_issue", "a further TMA load of a row"),
    Constant("tma_latency", "TMA load of 128 bytes"),
    Constant("write_latency", "store and fence", estimate=same),
    Constant("begin_latency", "a further CTA on an SM"),
    Constant("launch_s", "HBM read of no bytes"),
    Constant("gap_s", "empty kernel, graph"),
    Constant("pdl_gap_s", "empty kernel, PDL"),
    Constant("submit_s", "empty kernel, stream"))


@dataclass(frozen=True)
class Found:
    """A figure: as it is now and was, the relative spread of what was measured, and why it stays, if so."""
    value: float
    old: float
    spread: float = 0.0
    why: str = ""
    measure: str = ""


def calibrate(measured: Mapping[str, Sequence[float]],
              gpu: GPUFigures) -> tuple[GPUFigures, dict[str, Found]]:
    """Figures that give what was measured, and what became of each. Those that nothing tells stay."""
    found = {each.name: Found(old, old, why="not measured") for each in fields(GPUFigures)
             if not isinstance(old := getattr(gpu, each.name), str)}
    for constant in CONSTANTS:
        old = getattr(gpu, constant.name)
        if not (values := measured.get(constant.measure)): continue
        middle = median(values)
        value, why = find_figure(constant, middle, gpu)
        if value is not None: gpu = with_figure(gpu, constant.name, value)
        spread = (max(values) - min(values)) / abs(middle) if middle else 0.0
        found[constant.name] = Found(getattr(gpu, constant.name), old, spread, why, constant.measure)
    return gpu, found


def find_figure(constant: Constant, measured: float, gpu: GPUFigures) -> tuple[float | None, str]:
    """The figure, or None and why not."""
    if constant.exact is not None: return constant.exact(measured, gpu), constant.silent
    begin = getattr(gpu, constant.name)
    if constant.estimate is not None and (begin := constant.estimate(measured, gpu)) is None:
        return None, constant.silent
    value = solve_figure(constant, measured, with_figure(gpu, constant.name, begin))
    if value is not None: return max(0.0, value), ""
    return (begin, "") if constant.estimate is not None else (None, "the model does not depend on it")


def with_figure(gpu: GPUFigures, name: str, value: float) -> GPUFigures:
    """The same with one other figure, whole where it must be."""
    whole = isinstance(getattr(gpu, name), int)
    return GPUFigures(**{**vars(gpu), name: round(value) if whole else value})


def solve_figure(constant: Constant, measured: float, gpu: GPUFigures) -> float | None:
    """The figure with which the model measures what was measured, by secants; None where it does not depend
    on it."""
    def model(value: float) -> float:
        return MEASURES[constant.measure].value(ModelPlayer(with_figure(gpu, constant.name, value)))
    here = float(getattr(gpu, constant.name))
    other = here * 1.25 + (8 if isinstance(getattr(gpu, constant.name), int) else 1e-7)
    at_here, at_other = model(here), model(other)
    if abs(at_other - at_here) < INSENSITIVE * 0.25 * abs(at_here): return None
    for _ in range(STEPS):
        if abs(at_here - measured) <= CLOSE * abs(measured) or at_other == at_here: break
        here, other = here + (measured - at_here) * (other - here) / (at_other - at_here), here
        at_here, at_other = model(max(0.0, here)), at_here
    return here
