"""A report as text: a line for each variable, aligned, and below it what does not fit."""
from __future__ import annotations

from tinygrad_nv.shapes.inference import Report
from tinygrad_nv.table import align_columns

HEAD = ("line", "variable", "shape", "dtype")


def text(report: Report) -> str:
    """A report's lines and mismatches; those of arguments have no number."""
    fixed = ", ".join(f"{name}={size}" for name, size in report.fixed.items())
    rows = [HEAD, *((str(one.line or ""), one.name, one.shape, one.dtype) for one in report.lines)]
    lines = [f"{report.function}" + (f", with {fixed}" if fixed else ""),
             *(f"  {row}" for row in align_columns(rows, numbers=(0,)))]
    for each in report.mismatches: lines += [f"  mismatch in {line}" if i == 0 else f"  {line}"
                                             for i, line in enumerate(str(each).splitlines())]
    return "\n".join(lines)


def data(report: Report) -> dict[str, object]:
    """The same for JSON."""
    return {"function": report.function, "file": report.file, "fixed": dict(report.fixed),
            "lines": [vars(one) for one in report.lines],
            "mismatches": [{**vars(one), "origins": list(one.origins)} for one in report.mismatches]}
