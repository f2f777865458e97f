"""Tables of bench/timing/hardware.py's record for docs/timing.md: predicted beside measured, by family, and
FlashAttention-3 over tinygrad_nv's attention."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.lib.report_cpu import NOT_MEASURED, Record, markdown

COLUMNS = ("", "rows", "mean error, %", "of judging halves, %", "bias, %", "worst, %", "rank", "regret",
           "worst regret", "cost model: mean error, %", "rank", "regret")
FA3_COLUMNS = ("FlashAttention-3 over tinygrad_nv", "measured", "modelled", "off, %", "same sign")
FORMS = (("mape", ".1f"), ("judge_mape", ".1f"), ("bias", "+.1f"), ("worst", "+.0f"), ("rank", ".2f"),
         ("regret", ".3f"), ("worst_regret", ".2f"))
COST_FORMS = (("mape", ".1f"), ("rank", ".2f"), ("regret", ".3f"))


def lines(families: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each family; empty where it has no such figure."""
    def cells(figures: Mapping[str, float], forms: Sequence[tuple[str, str]]) -> Iterator[str]:
        for name, form in forms: yield format(figures[name], form) if name in figures else ""
    for family, both in families.items():
        yield (family, str(both["timing"]["rows"]), *cells(both["timing"], FORMS),
               *cells(both["cost"], COST_FORMS))


def fa3_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each shape: times of FlashAttention-3 over tinygrad_nv's."""
    for row in rows:
        same = (row["modelled"] < 1) == (row["measured"] < 1)
        yield (row["shape"], f"{row['measured']:.2f}", f"{row['modelled']:.2f}",
               f"{100 * (row['modelled'] / row['measured'] - 1):+.0f}", "yes" if same else "no")


def section(record: Record | None) -> str:
    """Both tables, and the plot."""
    if record is None: return f"`bench/timing_hardware.py`: {NOT_MEASURED}."
    made = [markdown(COLUMNS, lines(record["families"]))]
    if record["fa3"]: made.append(markdown(FA3_COLUMNS, fa3_lines(record["fa3"])))
    return "\n\n".join([*made, "![predicted over measured](../bench/results/timing_hardware.png)"])
