"""Matmuls on a CPU as text: spec, schedule and C.

Protocol: as levels.py for GPUs. A `CPUMatmul` is spec, schedule and target; `show(matmul, level)` is the
text of a level, `table` a line for each of several matmuls. Times are the roofline of what was measured here
(cpu/measure.py); for a matmul by itself that is another instruction set's too.
"""
from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from tinygrad.dtype import DType

from tinygrad_nv.cpu import measure
from tinygrad_nv.cpu.gemm.schedules import CPUGemmSchedule
from tinygrad_nv.cpu.kernel import CPUKernel, header
from tinygrad_nv.cpu.measure import LAUNCH_SECONDS, Rates
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.errors import RequestError
from tinygrad_nv.explain.levels import (
    WIDEST,
    least_bytes,
    nbytes,
    seconds,
    shorten,
    spec_of,
    with_prefix,
    with_tuned,
)
from tinygrad_nv.patterns.target import Chosen
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.gemm.spec import GemmSpec

LEVELS = ("spec", "tile", "c")


@dataclass(frozen=True)
class CPUMatmul:
    """A matmul by a schedule on a target."""
    spec: GemmSpec
    schedule: CPUGemmSchedule
    target: CPU

    @property
    def choice(self) -> Chosen:
        """Spec and schedule that make the kernel."""
        return Chosen(self.spec, self.schedule, self.target)

    @property
    def kernel(self) -> CPUKernel:
        """The kernel."""
        return cast(CPUKernel, self.choice.build())

    @property
    def seconds(self) -> float:
        """How long it takes at best."""
        return predict(self.spec, self.schedule, self.spec.flops, least_bytes(self.spec),
                         measure.rates(self.target))


def predict(spec: Hashable, schedule: Hashable, flops: float, moved: float, rates: Rates) -> float:
    """How long a kernel takes at best."""
    return rates.seconds(flops, moved, _rate(spec, schedule, rates))


def _rate(spec: Hashable, schedule: Hashable, rates: Rates) -> float:
    """Operations in a second on what the kernel multiplies."""
    operand = getattr(spec, "a", None) or getattr(spec, "q", None)
    dtype = getattr(operand, "dtype", None)
    widens = isinstance(schedule, CPUSchedule) and schedule.widens
    return rates.of(dtype) if isinstance(dtype, DType) and not widens else rates.f32


def show(matmul: CPUMatmul, level: str) -> str:
    """The matmul at a level. Raises `RequestError` for one that matmuls on CPUs do not have."""
    check(level, matmul.kernel.name)
    if level == "spec": return spec_of(matmul.spec)
    return matmul.kernel.source if level == "c" else tile_text(matmul)


def legible(source: str) -> str:
    """The text of a kernel to be read: vector.h is named instead, and of long lines each statement gets its
    own."""
    text = source.replace(header("vector.h"), '#include "vector.h"  // tinygrad_nv/cpu/vector.h\n')
    lines = []
    for line in text.splitlines():
        macro = line.startswith("#") or line.endswith("\\")
        lines += [line.rstrip()] if macro or len(line) <= 100 else _statements(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def _statements(line: str) -> list[str]:
    """A long line of C, a line for each statement and brace, indented from where it began. Braces of values
    (`= {0, 1}`) and what stands in parentheses or strings stay as they are."""
    depth, values, begun = (len(line) - len(line.lstrip())) // 2, 0, ""
    lines: list[str] = []
    for piece in re.findall(r'"(?:[^"\\]|\\.)*"|//.*|.', line.lstrip()):
        kept = values > 0 or piece == "(" or (piece == "{" and begun.rstrip().endswith("="))
        if kept: values += (piece in ("(", "{")) - (piece in (")", "}"))
        elif piece == "}":
            if begun.strip(): lines.append("  " * depth + begun.strip())
            depth, begun = depth - 1, ""
        begun += piece
        if not kept and piece in (";", "{", "}"):
            lines.append("  " * depth + begun.strip())
            depth, begun = depth + (piece == "{"), ""
    return [*lines, *(["  " * depth + begun.strip()] if begun.strip() else [])]


def check(level: str, name: str) -> None:
    """Raises `RequestError` for a level that kernels for CPUs do not have."""
    if level not in LEVELS:
        raise RequestError(f"{level.upper()} of {name} on CPU", "a kernel for an NVIDIA GPU",
                           "--level c, or run with DEV=EMU")


def table(matmuls: Sequence[tuple[str, CPUMatmul]]) -> list[str]:
    """A line for each of several matmuls, each with the words before it."""
    rows = [("", "schedule", "predicted", "bound", "matmul", "tuned")]
    for words, matmul in matmuls:
        rows.append((words, str(matmul.schedule), seconds(matmul.seconds), _limiting_resource(matmul),
                     shorten(str(matmul.spec), WIDEST), matmul.choice.tuning_note))
    return align_columns(with_tuned(rows), numbers=(2,))


def _times(matmul: CPUMatmul) -> dict[str, float]:
    found = measure.rates(matmul.target)
    rate = _rate(matmul.spec, matmul.schedule, found)
    return {"memory": least_bytes(matmul.spec) / found.bandwidth, "arithmetic": matmul.spec.flops / rate,
            "launch": LAUNCH_SECONDS}


def _limiting_resource(matmul: CPUMatmul) -> str:
    times = _times(matmul)
    return max(times, key=lambda name: times[name])


def tile_text(matmul: CPUMatmul) -> str:
    """How it is computed."""
    schedule, target, kernel = matmul.schedule, matmul.target, matmul.kernel
    found, times = measure.rates(target), _times(matmul)
    rate = _rate(matmul.spec, schedule, found)
    rows = [("parts", f"{kernel.parts} for {target.threads} threads")]
    rows.append(("block", f"{schedule.block} (m, n, k) in the caches of a core"))
    if any(held := schedule.registers): rows.append(("registers", f"{held[0]} x {held[1]} of the result"))
    if kernel.workspace_bytes: rows.append(("workspace", nbytes(kernel.workspace_bytes)))
    reached = with_prefix(matmul.spec.flops / matmul.seconds, "FLOP/s")
    rows += [("predicted", f"{seconds(matmul.seconds)}, {reached}, bound: {_limiting_resource(matmul)}"),
             ("", ", ".join(f"{name} {seconds(part)}" for name, part in times.items())),
             ("measured", f"{with_prefix(found.bandwidth, 'B/s')} read, {with_prefix(rate, 'FLOP/s')}"),
             ("caches", ", ".join(nbytes(n) for n in (target.l1_bytes, target.l2_bytes, target.l3_bytes)))]
    return "\n".join([f"{schedule} on {measure.processor()}", "", *align_columns(rows)])
