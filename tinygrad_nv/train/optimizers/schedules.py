"""Learning rates of steps, by transformers' names (`get_scheduler`).

Protocol. `schedule(name, …)` gives a function from the number of steps done (0 before the first) to what the
learning rate is multiplied by: a plain number, so that a resumed run needs the step alone. All but "constant"
warm up in a line over `warmup_steps`.

    constant, constant_with_warmup, linear, cosine       to 0 after `steps`
    cosine_with_min_lr                                   to `min_lr_rate`
    warmup_stable_decay                                  1 until `decay_steps` before the end; `decay_type`
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tinygrad_nv.errors import ConfigError

Factor = Callable[[int], float]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of schedules that have such: cycles of a cosine (1/2: from 1 to 0), the least factor, steps of
    decay (WSD), and the curves of WSD's warm-up and decay: linear, cosine or 1-sqrt."""
    num_cycles: float = 0.5
    min_lr_rate: float = 0.0
    decay_steps: int = 0
    warmup_type: str = "linear"
    decay_type: str = "cosine"


def schedule(name: str, steps: int, warmup_steps: int = 0,
             options: ScheduleOptions | None = None) -> Factor:
    """The factor of each step. Raises `ConfigError` for a name or numbers that cannot be."""
    o = options or ScheduleOptions()
    if name not in SCHEDULES: raise ConfigError(f"lr_scheduler_type {name!r}", ", ".join(SCHEDULES))
    if steps < 1 or warmup_steps < 0:
        raise ConfigError(f"{warmup_steps} warm-up steps of {steps}", "steps from 1, warm-up from 0")
    if not 0 <= o.min_lr_rate <= 1: raise ConfigError(f"min_lr_rate {o.min_lr_rate}", "0 to 1")
    for curve in (o.warmup_type, o.decay_type):
        if curve not in RISES: raise ConfigError(f"a curve {curve!r}", ", ".join(RISES))
    if name == "warmup_stable_decay" and warmup_steps + o.decay_steps > steps:
        raise ConfigError(f"{warmup_steps} steps of warm-up and {o.decay_steps} of decay in {steps}",
                          "no more than there are")
    made = SCHEDULES[name](steps, warmup_steps, o)
    return made if name in ("constant", "warmup_stable_decay") else _warm_up(made, warmup_steps)


def _warm_up(after: Factor, warmup: int) -> Factor:
    """In a line to 1 over the warm-up, then a curve."""
    return lambda step: step / max(1, warmup) if step < warmup else after(step)


def _constant(steps: int, warmup: int, o: ScheduleOptions) -> Factor: return lambda step: 1.0


def _linear(steps: int, warmup: int, o: ScheduleOptions) -> Factor:
    return lambda step: max(0.0, (steps - step) / max(1, steps - warmup))


def _cosine(steps: int, warmup: int, o: ScheduleOptions) -> Factor:
    """Returns a cosine that is zero at the end, whatever the least factor is."""
    return lambda step: max(0.0, _fall((step - warmup) / max(1, steps - warmup), o.num_cycles))


def _cosine_with_min_lr(steps: int, warmup: int, o: ScheduleOptions) -> Factor:
    cosine = _cosine(steps, warmup, o)
    return lambda step: max(0.0, cosine(step) * (1 - o.min_lr_rate) + o.min_lr_rate)


def _warmup_stable_decay(steps: int, warmup: int, o: ScheduleOptions) -> Factor:
    first = steps - o.decay_steps   # step of the decay

    def factor(step: int) -> float:
        if step < warmup: curve = RISES[o.warmup_type](step / max(1, warmup))
        elif step < first: return 1.0
        elif step < steps: curve = FALLS[o.decay_type]((step - first) / max(1, o.decay_steps), o.num_cycles)
        else: return o.min_lr_rate
        return max(0.0, curve * (1 - o.min_lr_rate) + o.min_lr_rate)
    return factor


def _fall(progress: float, cycles: float) -> float:
    """A cosine from 1."""
    return 0.5 * (1 + math.cos(math.pi * cycles * 2 * progress))


RISES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: x, "cosine": lambda x: 0.5 * (1 - math.cos(math.pi * x)),
    "1-sqrt": lambda x: 1 - math.sqrt(1 - x)}
FALLS: dict[str, Callable[[float, float], float]] = {
    "linear": lambda x, _: 1 - x, "cosine": _fall, "1-sqrt": lambda x, _: 1 - math.sqrt(x)}
SCHEDULES: dict[str, Callable[[int, int, ScheduleOptions], Factor]] = {
    "constant": _constant, "constant_with_warmup": _constant, "linear": _linear, "cosine": _cosine,
    "cosine_with_min_lr": _cosine_with_min_lr, "warmup_stable_decay": _warmup_stable_decay}
