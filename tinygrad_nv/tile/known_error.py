"""How far predicted times were from those that an H100 measured, by family of kernels.

Protocol: `describe_error(spec, model)` says it in words of the kernels that compute a spec, for the "timing"
model (ptx/timing) and for the "cost" model (cost.py of a template). Errors are means over kernels, in percent
of the measured time; the rank correlation is that of a spec's schedules by predicted and by measured time, 1
where a model orders them as the GPU does, and 0 where it might as well draw lots. Figures are those of
bench/timing_hardware.py, in docs/timing.md; other GPUs have judged nothing.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import SpecError


@dataclass(frozen=True)
class KnownError:
    """Mean error in percent over so many `kernels`, and the rank correlation where schedules were swept."""
    percent: float
    kernels: int
    rank: float | None = None

    def __str__(self) -> str:
        words = f"{self.percent:.1f}% off in mean on an H100 ({self.kernels} kernels)"
        if self.rank is None: return words
        return f"{words}, whose schedules it orders with a rank correlation of {self.rank:.2f}"


TIMING: dict[str, KnownError] = {
    "gemm": KnownError(4.8, 119, 0.61), "experts": KnownError(5.2, 87, -0.15),
    "attention forward": KnownError(4.9, 29, 0.97), "attention backward": KnownError(5.6, 10),
    "paged": KnownError(3.5, 56, 0.40), "quantised": KnownError(10.0, 58, 0.64),
    "norms": KnownError(5.8, 14)}
COST = {"gemm": KnownError(5.0, 119, 0.34), "experts": KnownError(4.4, 87, 0.64),
        "quantised": KnownError(6.6, 7, -0.19)}
TIE = 1.01      # of modelled times: nearer ones are the same
ORDERS = 0.7    # rank correlation from which on a model orders schedules
MODELS: Mapping[str, Mapping[str, KnownError]] = {"timing": TIMING, "cost": COST}
# by the folder of tile/ that a spec's class is in; attention's gradients have a module of their own
FAMILIES = {"gemm": "gemm", "grouped_gemm": "experts", "attention": "attention forward", "decode": "paged",
            "scaled_gemm": "quantised", "quant_gemm": "quantised", "quant_grouped": "quantised",
            "norm": "norms"}


def family_of(spec: Any) -> str | None:
    """Returns the family of the kernels that compute a spec; None of one that no hardware has judged."""
    folder, _, module = type(spec).__module__.removeprefix("tinygrad_nv.tile.").partition(".")
    return "attention backward" if module == "backward_spec" else FAMILIES.get(folder)


def find_least_ratio(spec: Any) -> float:
    """Returns the ratio of two modelled times of a spec from which on the longer one says that its schedule
    is slower: the model's mean error where it orders such schedules badly, else `TIE`."""
    found = TIMING.get(family_of(spec) or "")
    if found is None or found.rank is None or found.rank >= ORDERS: return TIE
    return 1 + found.percent / 100


def describe_error(spec: Any, model: str) -> str:
    """Says what is known of a model's error for a spec. Raises `SpecError` for an unknown model."""
    if model not in MODELS: raise SpecError(f"a model {model!r}", f"one of {', '.join(MODELS)}")
    found = MODELS[model].get(family_of(spec) or "")
    return "error not known: no hardware has judged such kernels" if found is None else str(found)
