"""Tiles: specs, schedules, and the kernel templates that compute them.

Each family is a folder: gemm/ attention/ decode/ norm/ sampling/ embedding/ kv_append/. It has its spec
(what is computed), its schedules (how: legality, candidates, defaults, cost) and a folder for each
template. What families share is here. Read in this order:

  operations.py      element operations, a row each: value, slope, PTX and C
  expression.py      epilogues and scores as expressions
  schedule.py        the base of schedules, and the fields that several have
  template.py        the record of a template; templates.py: the table of them; programs.py: those that are
                     programs of the tile language, for every target
  kernel.py          a finished kernel: PTX and, by launch.py, how it is launched
  layout.py          tiles in shared memory, with swizzle; operands of wgmma there
  ops.py             a CTA's copies to shared memory (cp.async); fragments.py: a warp's operands of mma.sync
  pipeline.py        the stages between a TMA producer and its consumers, with full and empty barriers
  tile_scheduler.py  which work tile a CTA computes
  epilogue.py        expressions in instructions; lanes.py: one element or two; access.py: in memory
  result_store.py    from sums to the result in memory, also through shared memory; store_plan.py: how
  gpu.py             figures of GPUs, for the cost model
  choose.py          the schedule of a spec: database.py has tuned ones (spec_json.py writes specs), tune.py
                     tries some by a clock (clock.py; emulated.py: without a GPU)
  arguments.py       memory and integers of a call that no graph makes; emulated.py: on the emulator

Then gemm/, whose spec.py, schedules.py and cost.py the others follow. Nothing here knows
of tinygrad's graphs. A template's kernel is the same on the emulator and on a GPU.
"""
from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The tile language's functions: tile.load, tile.dot (language/names.py)."""
    from importlib import import_module, util
    if util.find_spec(f"{__name__}.{name}"): raise AttributeError(name)     # the import system's `from` asks

    from tinygrad_nv.tile.language.names import NAMES
    if name not in NAMES:
        from tinygrad_nv.tile.language.trace import no_attribute
        raise no_attribute("tile", NAMES, "", name)
    module, function = NAMES[name]
    return getattr(import_module(f"tinygrad_nv.tile.language.{module}"), function)
