"""Two runs, kernel by kernel: where they part.

Protocol: kernels of one thread are compared in their order. The first of these differences is where two runs
part:

    another kernel    the one that runs here has another name, or other numbers of operands and results
    other operands    memory that no kernel of the run wrote: a weight, an input, what was loaded
    other results     of equal operands: this kernel computes something else

A kernel whose text changed and whose bits did not is counted (`rewritten`), and no difference. What comes
after a difference follows from it.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad_nv.numerics.replay.log import KernelRun, Log


@dataclass(frozen=True)
class Parted:
    """The kernel at which two runs part. `number` counts the kernels of the recorded run's thread, from 1."""
    number: int
    what: str
    before: KernelRun | None
    now: KernelRun | None

    def __str__(self) -> str:
        lines = [f"parts at kernel {self.number}, {self.before or self.now}: {self.what}"]
        for name, run in (("recorded", self.before), ("now", self.now)):
            if run is None: continue
            results = " ".join(run.written)
            lines.append(f"  {name:8}  {run.kernel}, source {run.text}, results {results}")
            if run.why: lines.append(f"            {run.why}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """Result of a replay: `kernels` that ran, those `rewritten` with the same bits, where it `parted`;"""
    kernels: int
    rewritten: int = 0
    parted: Parted | None = None
    changed: tuple[tuple[str, str, str], ...] = ()

    @property
    def same(self) -> bool:
        """Whether it was repeated bit for bit."""
        return self.parted is None

    def __str__(self) -> str:
        texts = f", {self.rewritten} of them with another source" if self.rewritten else ""
        if self.parted is None: return f"repeated bit for bit: {self.kernels} kernels{texts}"
        told = [f"  {name}: recorded with {before}, now {now}" for name, before, now in self.changed]
        return "\n".join([str(self.parted), *told])


def compare(recorded: Log, now: Sequence[KernelRun], result: str, depends: Mapping[str, str]) -> Report:
    """The report of a replay with these kernels and this result, where kernels depend on these versions and
    settings."""
    old, new = _threads(recorded.kernels), _threads(now)
    parted = [found for name in dict.fromkeys((*old, *new))
              if (found := _find_parting(old.get(name, []), new.get(name, []))) is not None]
    first = min(parted, key=lambda each: each.number, default=None)
    if first is None and result != recorded.result:
        first = Parted(len(now), "the same bits of every kernel, and another result", None, None)
    pairs = [pair for name in old for pair in zip(old[name], new.get(name, []), strict=False)]
    rewritten = sum(a.text != b.text for a, b in pairs)
    before = {**recorded.header.versions, **recorded.header.settings}
    changed = tuple((name, before.get(name, "none"), depends.get(name, "none"))
                    for name in dict.fromkeys((*before, *depends)) if before.get(name) != depends.get(name))
    return Report(len(now), rewritten, first, changed)


def _threads(runs: Sequence[KernelRun]) -> dict[str, list[KernelRun]]:
    made: dict[str, list[KernelRun]] = {}
    for run in runs: made.setdefault(run.thread, []).append(run)
    return made


def _find_parting(old: Sequence[KernelRun], new: Sequence[KernelRun]) -> Parted | None:
    for number, (before, now) in enumerate(zip(old, new, strict=False), 1):
        if what := _difference(before, now): return Parted(number, what, before, now)
    if len(old) == len(new): return None
    number = min(len(old), len(new))
    if len(old) > number: return Parted(number + 1, "it does not run now", old[number], None)
    return Parted(number + 1, "it did not run then", None, new[number])


def _difference(before: KernelRun, now: KernelRun) -> str:
    if (before.kernel, len(before.read), len(before.written)) != \
            (now.kernel, len(now.read), len(now.written)):
        return f"{now.kernel} runs in its place"
    if before.variables != now.variables:
        return f"variables {dict(now.variables)}, not {dict(before.variables)}"
    if others := [i for i, (a, b) in enumerate(zip(before.read, now.read, strict=True), 1) if a != b]:
        return f"operand {others[0]} of {len(before.read)} differs, and no kernel wrote it: it was loaded"
    if before.written == now.written: return ""
    source = "the same source" if before.text == now.text else "another source"
    return f"equal operands, {source}, other results"
