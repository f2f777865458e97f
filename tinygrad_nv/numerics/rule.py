"""Rule over the names of matrices that stay in high precision.

Protocol: `HighPrecision(patterns)` has globs (fnmatch: `*` is any text, dots too) on names of modules as a
checkpoint has them, model.layers.0.mlp.down_proj. `why(name, shape)` is the reason for which a matrix is not
multiplied in FP8, or None. `ALWAYS` are those of every run, with reasons; a user's patterns come on top:
`model.layers.0.*` for the first layer, `*.down_proj` for one kind of matrix.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tinygrad_nv.functional import FP8_ALIGNED

ALWAYS: Mapping[str, str] = {
    "lm_head": "logits need more digits than FP8 has",
    "*embed*": "rows of a table are copied, not multiplied",
    "*norm*": "statistics of rows are float32",
    "*router*": "a rounded score chooses another expert",
    "*.gate": "a rounded score chooses another expert",
    "*.experts.*": "grouped matmuls of experts have no FP8 gradients here",
}


@dataclass(frozen=True)
class HighPrecision:
    """The rule of a run: `ALWAYS` and a user's patterns."""
    patterns: tuple[str, ...] = ()

    def excludes(self, name: str) -> bool:
        """Whether a user's pattern names a matrix."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def why(self, name: str, shape: tuple[int, int]) -> str | None:
        """The reason for which a matrix of a shape stays in high precision, None where it does not."""
        for pattern, reason in ALWAYS.items():
            if fnmatchcase(name, pattern): return reason
        for pattern in self.patterns:
            if fnmatchcase(name, pattern): return f"excluded by {pattern}"
        if any(extent % FP8_ALIGNED for extent in shape):
            return f"{shape[0]} x {shape[1]}, no multiples of {FP8_ALIGNED}"
        return None
