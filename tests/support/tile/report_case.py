"""What tests of templates look at in the report of a launch."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.report import Finding, Report


def told(report: Report) -> list[Finding]:
    """Findings, and notes but those of tiles that are refilled after ordinary reads: templates leave out the
    fence there, as CUTLASS's pipelines do."""
    return [*report.findings,
            *(note for note in report.notes if "PTX asks for before a copy writes there" not in note.message)]
