"""What `tinygrad-nv doctor` found of one thing."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `needed` marks what nothing runs without."""
    subject: str
    state: State
    what: str
    fix: str = ""
    needed: bool = False
