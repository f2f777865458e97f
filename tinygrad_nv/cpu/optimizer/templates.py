"""The templates of optimisers on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.optimizer import adamw, squares
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.optimizer.spec import AdamWSpec, SquaresSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

ADAMW = template(AdamWSpec, adamw.CPUAdamW, adamw.default, None, adamw.__name__)
SQUARES = template(SquaresSpec, squares.CPUSquares, squares.default, None, squares.__name__)
FAMILY = Family("optimizer", (ADAMW, SQUARES), determinism_class=OVER_ROWS)
