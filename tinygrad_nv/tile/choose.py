"""Chooses the schedule of a spec on a GPU, for families whose schedules can be tuned.

Protocol: `choose` takes the winner that the schedule database has, else the family's default. With BEAM=N
candidates are tried (tune.py) where the database has nothing, or only what is known worse than a trial would
know it: where there is a GPU, what was modelled is measured. None means that no template takes the spec.
"""
from __future__ import annotations

from typing import Any

from tinygrad.helpers import BEAM

from tinygrad_nv.tile import database
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def choose(spec: Any, gpu: GPU) -> Any:
    """The schedule; None when there is none."""
    known = database.find_winner(spec, gpu.arch, gpu)
    if BEAM.value < 1 and known is not None: return known.schedule
    family = TABLE.family(gpu.kind, type(spec))
    default = None if family is None else family.default(spec, gpu)
    if BEAM.value < 1 or default is None: return default
    from tinygrad_nv.tile.tune import search  # the emulator is loaded only for tuning
    return search(spec, gpu, BEAM.value, known) or default
