"""The templates of optimisers on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.optimizer.spec import CHUNK, AdamWSpec, SquaresSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, make_template


@dataclass(frozen=True)
class AdamW(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "adamw_update"


@dataclass(frozen=True)
class Squares(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "squared_sums"


def problems(spec: AdamWSpec | SquaresSpec, arch: str) -> list[str]:
    """Why no kernel can do it; empty when one can."""
    kinds = 1 if isinstance(spec, SquaresSpec) else len(spec.kinds)
    pointers, chunks = kinds * len(spec.counts) + 1, sum(-(-count // CHUNK) for count in spec.counts)
    out = [f"{pointers} pointers, at most {GPU.pointers}"] if pointers > GPU.pointers else []
    if chunks > MOST or max(spec.counts) > MOST: out.append(f"{chunks} chunks, tensors of {max(spec.counts)}")
    return out


MODULE = "tinygrad_nv.tile.optimizer.kernel"
FAMILY = Family("optimizer", (make_template(AdamWSpec, AdamW, problems, MODULE, "adamw"),
                              make_template(SquaresSpec, Squares, problems, MODULE, "squares")),
                determinism_class=OVER_ROWS)
