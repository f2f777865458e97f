"""Templates of the CPU.

Protocol: a template is made of a schedule's type and of three functions: `default(spec, target)`, the
schedule where no other was tried; `problems(spec, schedule)`; and `build(spec, schedule)` of a module.
`template` makes the record of it that the table has (tile/template.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.template import Template

MOST_PARTS, MOST = 4096, 1 << 20

S = TypeVar("S")
C = TypeVar("C", bound=CPUSchedule)


def template(spec: type[S], schedule: type[C], default: Callable[[S, CPU], C],
             problems: Callable[[S, C], Sequence[str]] | None, module: str,
             build: str = "build") -> Template[S, C, CPU]:
    """The record. `problems` None: the template takes every spec. What is wrong is remembered, for a schedule
    that was chosen is asked about once more when its kernel is built. `build` takes the integers that the
    kernel computes from the variables of its launch as well, where a spec has such."""
    @lru_cache(4096)
    def find_problems(one: S, s: C) -> tuple[str, ...]:
        out = [] if 1 <= s.parts <= MOST_PARTS else [f"{s.parts} parts, 1 to {MOST_PARTS}"]
        out += [f"{name} {value}" for name, value in vars(s).items()
                if name != "parts" and type(value) is int and not 0 <= value <= MOST]
        return tuple(out or ([] if problems is None else problems(one, s)))

    def all_problems(one: S, s: C, target: CPU) -> Sequence[str]:
        return find_problems(one, s) if s.isa == target.isa else [f"for {s.isa}, here is {target.isa}"]

    def build_kernel(one: S, s: C, target: CPU, integers: tuple[Integer, ...] = ()) -> Any:
        return getattr(import_module(module), build)(one, s, *([integers] if integers else []))

    def candidates(one: S, target: CPU) -> Sequence[C]: return default(one, target),
    return Template(schedule.template, spec, schedule, all_problems, candidates, build_kernel)
