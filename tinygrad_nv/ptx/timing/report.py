"""A prediction for readers: a table, and JSON for programs."""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.ptx.timing.critical import PARTS, Link
from tinygrad_nv.ptx.timing.model import Timing, Wait

SHORTEST = 0.005    # shares of the critical path below this are left out
IDLE = 0.03         # of the SMs' time without a CTA: worth a line
MOVERS = 3          # rows that say what would shorten the launch


def as_text(timing: Timing) -> str:
    """A table for a reader."""
    rows = [("predicted, not measured", f"{timing.seconds * 1e6:,.1f} us ± {timing.uncertainty:.0%}"),
            ("GPU", f"{timing.gpu}, {timing.clock_hz / 1e9:.3f} GHz"), ("cycles", f"{timing.cycles:,}"),
            ("waves", f"{timing.waves:.2f}, {timing.ctas_of_sm} CTAs an SM, {timing.idle:.1%} idle"),
            ("tensor cores", f"{timing.tflops:,.1f} TFLOP/s"),
            ("SMs and L2", f"{timing.gbytes_per_s:,.0f} GB/s"),
            ("limiter", timing.limiter)]
    lines = [f"{name:<24}{value:>44}" for name, value in rows]
    lines += ["", "busy", *(f"  {name:<22}{share:>8.1%}" for name, share in
                            sorted(timing.units.items(), key=lambda each: -each[1]))]
    lines += ["", *_path(timing), "", *_movers(timing)]
    if timing.links:
        lines += ["", f"{'line':>6} {'share':>7}  {'steady state: critical':<26} SASS"]
        lines += [_row(each, each.cause) for each in timing.links]
    lines += ["", f"{'line':>6} {'share':>7}  {'warps wait for':<26} SASS"]
    lines += [_row(each, each.reason) for each in timing.waits]
    if timing.unknown: lines += ["", "without figures, taken for 20 cycles: " + ", ".join(timing.unknown)]
    return "\n".join(lines)


def _path(timing: Timing) -> Iterator[str]:
    yield "critical path"
    for name, share in sorted(timing.path.items(), key=lambda each: -each[1]):
        if share >= SHORTEST: yield f"  {name:<22}{share:>8.1%}"


def _movers(timing: Timing) -> Iterator[str]:
    """Yields what would shorten the launch: of the largest parts of the critical path, and of an uneven
    end."""
    yield "what would shorten it"
    advice = {part.name: part.advice for part in PARTS.values()}
    for name, share in sorted(timing.path.items(), key=lambda each: -each[1])[:MOVERS]:
        if share >= SHORTEST: yield f"  {name:<26}up to {share:>6.1%}  {advice[name]}"
    if timing.idle >= IDLE:
        yield f"  {'SMs without a CTA':<26}up to {timing.idle:>6.1%}  tiles that divide evenly"


def _row(each: Link | Wait, why: str) -> str:
    return f"{each.ptx_line:>6} {each.share:>7.1%}  {why:<26} {each.sass}"


def as_json(timing: Timing) -> dict[str, object]:
    """The same for a program."""
    plain = {name: value for name, value in vars(timing).items() if name not in ("shape", "code", "recorded")}
    return plain | {"units": dict(timing.units), "path": dict(timing.path),
                    "links": [vars(each) for each in timing.links],
                    "waits": [vars(each) for each in timing.waits]}
