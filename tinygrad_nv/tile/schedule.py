"""How a spec is computed: the base of what templates have.

Protocol: a schedule is frozen and hashable; spec, schedule and target make a kernel, and nothing else does.
Which template it is of is a constant of its type, by `kind` of target and by name.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Schedule:
    """One template's numbers. `kind` says whether a GPU or a CPU runs its kernels."""
    kind: ClassVar[str] = "gpu"
    template: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
