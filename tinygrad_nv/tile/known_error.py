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


TIMING = {"gemm": KnownError(9.6, 119, 0.06), "experts": KnownError(6.5, 87, -0.06),
          "attention forward": KnownError(10.0, 29, 0.93), "attention backward": KnownError(15.6, 10),
          "paged": KnownError(6.4, 56, 0.78), "quantised": KnownError(21.6, 58, 0.34),
          "norms": KnownError(19.8, 14)}
COST = {"gemm": KnownError(5.9, 119, -0.02), "experts": KnownError(6.1, 87, 0.44),
        "quantised": KnownError(7.2, 7, -0.19)}
MODELS: Mapping[str, Mapping[str, KnownError]] = {"timing": TIMING, "cost": COST}
# by the folder of tile/ that a spec's class is in; attention's gradients have a module of their own
FAMILIES = {"gemm": "gemm", "grouped_gemm": "experts", "attention": "attention forward", "decode": "paged",
            "scaled_gemm": "quantised", "quant_gemm": "quantised", "quant_grouped": "quantised",
            "norm": "norms"}


def family_of(spec: Any) -> str | None:
    """Returns the family of the kernels that compute a spec; None of one that no hardware has judged."""
    folder, _, module = type(spec).__module__.removeprefix("tinygrad_nv.tile.").partition(".")
    return "attention backward" if module == "backward_spec" else FAMILIES.get(folder)


def describe_error(spec: Any, model: str) -> str:
    """Says what is known of a model's error for a spec. Raises `SpecError` for an unknown model."""
    if model not in MODELS: raise SpecError(f"a model {model!r}", f"one of {', '.join(MODELS)}")
    found = MODELS[model].get(family_of(spec) or "")
    return "error not known: no hardware has judged such kernels" if found is None else str(found)
