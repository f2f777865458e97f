"""One result of `tinygrad-nv doctor`."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. `needed`: nothing runs without it."""
    subject: str
    state: State
    what: str
    fix: str = ""
    needed: bool = False
