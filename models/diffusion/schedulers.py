"""Schedulers, as coefficients of each step.

Protocol: `read_scheduler(directory)` reads scheduler_config.json; `plan(config, name, steps)` makes a `Plan`
of one of `NAMES`, in float64. A step of latents x with the UNet's output m of x · scale is then, whatever the
scheduler,

    x0   = p · x + q · m                            what x is without noise; clipped, if the config says so
    x'   = c · x + d · m + e · x0 + f · (x0 of the step before)

so a captured step serves all schedulers and all numbers of steps. With ᾱ the cumulative product of 1 − β and
σ = √((1 − ᾱ) / ᾱ):

    ddim    DDIM with η = 0 (arXiv 2010.02502)
    euler   Euler's method on the ODE of dx / dσ (arXiv 2206.00364); x is larger by √(σ² + 1)
    dpm++   DPM-Solver++ (2M), midpoint (arXiv 2211.01095), the first and the last step of first order

The network predicts noise (`epsilon`) or v = √ᾱ · noise − √(1 − ᾱ) · x0 (`v_prediction`, arXiv 2202.00512).
Timesteps, sigmas and orders of steps are those of diffusers, by the fields of its configurations.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, RequestError, brief, shorten

from ..config import read_json
from ..fields import CORRECT, Fields

NAMES = ("ddim", "euler", "dpm++", "euler-karras", "dpm++-karras")
CLASSES = {"DDIMScheduler": "ddim", "EulerDiscreteScheduler": "euler", "DPMSolverMultistepScheduler": "dpm++"}
# of networks that were trained as DDPM's: DDIM runs them
ALIKE = ("DDPMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "HeunDiscreteScheduler",
         "EulerAncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler",
         "DPMSolverSinglestepScheduler", "DPMSolverSDEScheduler", "DEISMultistepScheduler",
         "UniPCMultistepScheduler")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "trained_betas": (), "thresholding": (False,), "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,), "use_lu_lambdas": (False,), "use_flow_sigmas": (False,),
    "interpolation_type": ("linear",), "timestep_type": ("discrete",), "solver_order": (2,),
    "algorithm_type": ("dpmsolver++",), "solver_type": ("midpoint",), "variance_type": (),
    "sigma_min": (), "sigma_max": ()}
# what diffusers' classes have where a file says nothing
DEFAULTS = {"num_train_timesteps": 1000, "beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear",
            "prediction_type": "epsilon", "steps_offset": 0, "set_alpha_to_one": True,
            "clip_sample_range": 1.0, "final_sigmas_type": "zero", "lower_order_final": True}
SPACINGS = {"ddim": "leading", "euler": "linspace", "dpm++": "linspace"}
FEW_STEPS = 15      # fewer end with a step of first order
RHO = 7.0           # of Karras' sigmas


@dataclass(frozen=True)
class SchedulerConfig:
    """scheduler_config.json. `name` is the scheduler it is of, `spacing` None where it names none."""
    name: str = "ddim"
    train_steps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction: str = "epsilon"
    spacing: str | None = None
    offset: int = 0
    alpha_to_one: bool = True
    clip: float = 0.0
    zero_snr: bool = False
    karras: bool = False
    final_sigma: str = "zero"
    lower_order_final: bool = True
    euler_at_final: bool = False


@dataclass(frozen=True)
class Plan:
    """The steps, first to last: the timestep that the network sees, the factor of its input, and the six
    coefficients (p, q, c, d, e, f). Initial noise is multiplied by `noise`; x0 is clipped to ± `clip`, 0 for
    not at all."""
    timesteps: np.ndarray
    scales: np.ndarray
    coefficients: np.ndarray
    noise: float
    clip: float = 0.0

    def __len__(self) -> int: return len(self.timesteps)


def read_scheduler(directory: Path) -> SchedulerConfig:
    """Reads the configuration of a directory with scheduler_config.json. Raises `ModelError` for what is not
    implemented."""
    path = directory / "scheduler_config.json"
    if not path.is_file():
        raise ModelError(f"{directory} has no scheduler_config.json", "a diffusers directory",
                         "download the directory again")
    data = read_json(path)
    for key, values in NEUTRAL.items():
        if data.get(key) is not None and data[key] not in values:
            raise ModelError(f"{path}: {key} is {brief(data[key])}, which is not implemented",
                             " or ".join(map(repr, values)) or "no such field", "choose another scheduler")
    kind = str(data.get("_class_name") or "DDPMScheduler")
    if kind not in CLASSES and kind not in ALIKE:
        raise ModelError(f"{path}: a {shorten(kind)}", f"one of: {', '.join((*CLASSES, *ALIKE))}",
                         "choose another model: this one's network is not trained for these")
    name = CLASSES.get(kind, "ddim")
    f = Fields({**DEFAULTS, "clip_sample": kind == "DDIMScheduler",
                **{key: value for key, value in data.items() if value is not None}}, str(path))
    first, last = f.number("beta_start"), f.number("beta_end")
    if not 1e-9 <= min(first, last) <= max(first, last) < 1:
        raise ModelError(f"{path}: beta_start is {first:g}, beta_end {last:g}", "numbers below 1, from 1e-9",
                         CORRECT)
    spacing = None if f.get("timestep_spacing") is None else \
        f.one_of("timestep_spacing", ("linspace", "leading", "trailing"))
    return SchedulerConfig(
        name, f.positive("num_train_timesteps"), first, last,
        f.one_of("beta_schedule", ("linear", "scaled_linear", "squaredcos_cap_v2")),
        f.one_of("prediction_type", ("epsilon", "v_prediction")), spacing,
        int(f.number("steps_offset", zero=True)),
        f.flag("set_alpha_to_one"),
        f.number("clip_sample_range") if f.flag("clip_sample") and name == "ddim" else 0.0,
        f.flag("rescale_betas_zero_snr"), f.flag("use_karras_sigmas"),
        f.one_of("final_sigmas_type", ("zero", "sigma_min")),
        f.flag("lower_order_final"), f.flag("euler_at_final"))


def plan(config: SchedulerConfig, steps: int, name: str | None = None) -> Plan:
    """The steps of a scheduler, by default the config's. Raises `RequestError` for a name that there is not,
    or a number of steps below 1 or beyond those of the training."""
    if name is not None and name not in NAMES:
        raise RequestError(f"the scheduler is {name!r}", f"one of: {', '.join(NAMES)}")
    if not isinstance(steps, int) or not 1 <= steps <= config.train_steps:
        raise RequestError(f"{steps!r} steps", f"1 to {config.train_steps}, those of the training")
    if name is not None:
        config = replace(config, name=name.removesuffix("-karras"), karras=name.endswith("-karras"))
    made = PLANS[config.name](config, steps)
    if np.isfinite(made.coefficients).all(): return made
    raise RequestError(f"{steps} steps of {config.name}: two of them have one timestep",
                       f"fewer, such as {config.train_steps // 2}", "lower the number of steps")


# **** noise levels ****

def alphas(config: SchedulerConfig, sigmas: bool) -> np.ndarray:
    """ᾱ of each timestep of the training. `sigmas`: they become sigmas, so the last is above 0."""
    n, first, last = config.train_steps, config.beta_start, config.beta_end
    if config.beta_schedule == "linear": betas = np.linspace(first, last, n)
    elif config.beta_schedule == "scaled_linear": betas = np.linspace(first ** 0.5, last ** 0.5, n) ** 2
    else:   # squaredcos_cap_v2
        bar = np.cos((np.arange(n + 1) / n + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = np.minimum(1 - bar[1:] / bar[:-1], 0.999)
    made = np.cumprod(1 - betas)
    if not config.zero_snr: return made
    roots = np.sqrt(made)       # arXiv 2305.08891, algorithm 1
    made = ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2
    if sigmas: made[-1] = 2.0 ** -24
    return made


def timesteps(config: SchedulerConfig, steps: int, linspace: Callable[[], np.ndarray],
              leading: int) -> np.ndarray:
    """Timesteps, the last first, as arXiv 2305.08891 names their spacings. `leading` is into how many parts
    the training's are divided."""
    n, spacing = config.train_steps, config.spacing or SPACINGS[config.name]
    if spacing == "linspace": return linspace()
    if spacing == "leading":
        return np.minimum((np.arange(leading) * (n // leading))[::-1][:steps] + config.offset, n - 1)
    # a step that rounding has arange add is left out
    return np.round(np.arange(n, 0, -n / steps)[:steps]) - 1


def karras(levels: np.ndarray, steps: int) -> np.ndarray:
    """Sigmas between the largest and the smallest of `levels` (arXiv 2206.00364, equation 5)."""
    most, least = levels.max() ** (1 / RHO), levels.min() ** (1 / RHO)
    return (most + np.linspace(0, 1, steps) * (least - most)) ** RHO


def times_of(sigmas: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The timesteps, between whole ones, whose sigmas of `levels` these are."""
    return np.interp(np.log(sigmas), np.log(levels), np.arange(len(levels)))


# **** schedulers ****

def _ddim(config: SchedulerConfig, steps: int) -> Plan:
    levels, n = alphas(config, sigmas=False), config.train_steps
    times = timesteps(config, steps, lambda: np.linspace(0, n - 1, steps).round()[::-1], steps).astype(int)
    before = times - n // steps
    now = levels[times]
    then = np.where(before >= 0, levels[np.maximum(before, 0)], 1.0 if config.alpha_to_one else levels[0])
    a, s, b, z = np.sqrt(now), np.sqrt(1 - now), np.sqrt(then), np.sqrt(1 - then)
    zero = np.zeros(steps)
    if config.prediction == "epsilon": made = (1 / a, -s / a, zero, z, b, zero)
    else: made = (a, -s, z * s, z * a, b, zero)      # noise is √(1 − ᾱ) x + √ᾱ v
    return Plan(times.astype(float), np.ones(steps), np.stack(made, 1), 1.0, config.clip)


def _euler(config: SchedulerConfig, steps: int) -> Plan:
    bars, n = alphas(config, sigmas=True), config.train_steps
    levels = np.sqrt((1 - bars) / bars)
    times = timesteps(config, steps, lambda: np.linspace(0, n - 1, steps)[::-1], steps)
    sigmas = np.interp(times, np.arange(n), levels)
    if config.karras:
        sigmas = karras(sigmas, steps)
        times = times_of(sigmas, levels)
    sigma, then = sigmas, np.append(sigmas[1:], _last(config, levels))
    zero, ratio = np.zeros(steps), then / sigma
    x0 = _from_sigma(config, sigma)
    made = (*x0, ratio, zero, 1 - ratio, zero)      # x + (σ' − σ) (x − x0) / σ
    spacing = config.spacing or SPACINGS["euler"]
    most = sigma.max()
    noise = most if spacing in ("linspace", "trailing") else math.sqrt(most ** 2 + 1)
    return Plan(times, 1 / np.sqrt(sigma ** 2 + 1), np.stack(made, 1), float(noise))


def _from_sigma(config: SchedulerConfig, sigma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p and q of x0, of x that is larger by √(σ² + 1)."""
    if config.prediction == "epsilon": return np.ones_like(sigma), -sigma
    return 1 / (sigma ** 2 + 1), -sigma / np.sqrt(sigma ** 2 + 1)


def _last(config: SchedulerConfig, levels: np.ndarray) -> float:
    return float(levels[0]) if config.final_sigma == "sigma_min" else 0.0


def _dpm(config: SchedulerConfig, steps: int) -> Plan:
    bars, n = alphas(config, sigmas=True), config.train_steps
    levels = np.sqrt((1 - bars) / bars)
    times = timesteps(config, steps, lambda: np.linspace(0, n - 1, steps + 1).round()[::-1][:-1], steps + 1)
    if config.karras:
        sigmas = karras(levels, steps)
        times = times_of(sigmas, levels)
        if config.beta_schedule != "squaredcos_cap_v2": times = times.round()
    else: sigmas = np.interp(times, np.arange(n), levels)
    sigma, then = sigmas, np.append(sigmas[1:], _last(config, levels))
    a, b = 1 / np.sqrt(sigma ** 2 + 1), 1 / np.sqrt(then ** 2 + 1)
    s, z = sigma * a, then * b
    if config.prediction == "epsilon": p, q = 1 / a, -s / a
    else: p, q = a, -s
    with np.errstate(divide="ignore"): h = np.log(sigma) - np.log(then)
    # two steps of one timestep: `plan` refuses what is not finite
    if (h == 0).any(): return Plan(times, np.ones(steps), np.full((steps, 6), np.nan), 1.0)
    # 1 − e^−h is 1 of a last sigma of 0
    step = -b * np.expm1(-h)
    ratio = np.zeros(steps)     # h of this step by that of the step before, 0 in steps of first order
    for i in range(1, steps):
        if not _first_order(config, i, steps): ratio[i] = h[i] / h[i - 1]
    made = (p, q, z / s, np.zeros(steps), step * (1 + ratio / 2), -step * ratio / 2)
    return Plan(times, np.ones(steps), np.stack(made, 1), 1.0)


def _first_order(config: SchedulerConfig, i: int, steps: int) -> bool:
    few = config.lower_order_final and steps < FEW_STEPS
    return i == steps - 1 and (config.euler_at_final or few or config.final_sigma == "zero")


PLANS: dict[str, Callable[[SchedulerConfig, int], Plan]] = {"ddim": _ddim, "euler": _euler, "dpm++": _dpm}
