"""Templates that are programs of the tile language: one for every kind of target.

Protocol: `program.py` of a family's folder has `PROGRAMS`, a record for each type of spec. `trace_spec` is
the program of a spec (language/ir.py), cut into `Blocks`; its tensors are the spec's arguments
(reference.py), in their order. `make_family(name, programs)` is the family for GPUs, cpu/programs.py has that
for CPUs: a schedule of theirs is `Blocks` and what else the target wants to know.

A program's function takes its tensors by name, `spec` and `blocks`. Parameters that expressions of the spec
load come as `loads` instead, a tensor for each Load (language/expressions.py).
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.expression import Expression, Load, loads
from tinygrad_nv.tile.kernel import Chain, Scratch
from tinygrad_nv.tile.language.ir import Program, TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import LIMITS, trace_program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.reference import Argument
from tinygrad_nv.tile.schedule import Schedule, count_words
from tinygrad_nv.tile.template import GPU, Family, Template

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Blocks:
    """Parts that programs of the grid compute: `rows` and `columns` are what the function says. `groups` of
    rows have results of their own, which another launch joins; `lanes` of a block's rows are joined at its
    end."""
    rows: int = 16
    columns: int = 1
    groups: int = 1
    lanes: int = 1

    @property
    def blocks(self) -> Blocks:
        """Itself, without what a schedule has besides."""
        return Blocks(self.rows, self.columns, self.groups, self.lanes)

    def block_words(self) -> list[str]:
        """The blocks as a schedule shows them."""
        return [f"blocks of {self.rows}x{self.columns}", *[f"{self.groups} groups"] * (self.groups > 1)]


@dataclass(frozen=True)
class ProgramSchedule(Blocks, Schedule):
    """Blocks, and the warps that compute one."""
    warps: int = 4

    def words(self) -> list[str]: return [*self.block_words(), count_words(self.warps, "warp")]


@dataclass(frozen=True)
class TileProgram:
    """A program for specs of a type. `grid` is how many programs there are, `cut` the blocks by which it is
    computed on a target and the warps of each, those liked best first; `problems`: why no kernel can
    be. `elements`: how many there are to compute. `expressions` are those of the spec that load parameters.
    `steps`: specs and blocks of the launches, of two the first writes float32 that the second reads."""
    name: str
    spec: type
    function: Callable[..., None]
    grid: Callable[[Any, Blocks], Grid]
    cut: Callable[[Any, Any], Sequence[tuple[Blocks, int]]]
    elements: Callable[[Any], int]
    problems: Callable[[Any], list[str]] = lambda spec: []
    expressions: Callable[[Any], tuple[Expression, ...]] = lambda spec: ()
    steps: Callable[[Any, Blocks], Sequence[tuple[Any, Blocks]]] = lambda spec, blocks: [(spec, blocks)]

    def refuse(self, spec: Any, blocks: Blocks) -> list[str]:
        """Why no kernel can be, in words; empty when one can."""
        out = [f"{name} {value}" for name, value in vars(blocks).items() if value < 1]
        if not out and blocks.rows % blocks.lanes: out = [f"{blocks.rows} rows in {blocks.lanes} lanes"]
        if out: return out
        grid = zip(self.grid(spec, blocks), LIMITS, "xyz", strict=True)
        return self.problems(spec) + [f"{count} programs along {axis}, at most {most}"
                                      for count, most, axis in grid if count > most]

    def build(self, spec: Any, blocks: Blocks, build_one: Callable[[Program], Any]) -> Any:
        """The kernel of a spec, or both."""
        first, *others = [trace_spec(self, one, its) for one, its in self.steps(spec, blocks)]
        if not others: return build_one(first)
        between = first.tensors[0]
        return Chain(build_one(first), build_one(others[0]), Scratch(between.dtype, between.numel))


@functools.lru_cache(256)
def trace_spec(program: TileProgram, spec: Any, blocks: Blocks) -> Program:
    """The program of a spec."""
    from tinygrad_nv.tile.templates import TABLE
    roots = program.expressions(spec)
    reads = list(dict.fromkeys(load for root in roots for load in loads(root)))
    tensors = [_tensor(each, bool(roots)) for each in TABLE.arguments(spec)]
    given: dict[str, Any] = {each.name: TensorRef(each) for each in tensors if each.output or not roots}
    views = {load: _view(load, number, spec) for number, load in enumerate(reads)}
    if roots: given["loads"] = {load: TensorRef(view) for load, view in views.items()}
    assert isinstance(program.function, FunctionType)
    made = trace_program(program.function, {**given, "spec": spec, "blocks": blocks}, tensors, TileSchedule(),
                         program.grid(spec, blocks), None, tuple(views.values()))
    return replace(made, name=program.name)


def _tensor(argument: Argument, viewed: bool) -> TensorParameter:
    """An argument as it lies; of one that is read by views alone, the pointer."""
    output, place = argument.role == "out", argument.places[0]
    if viewed and not output: return TensorParameter(argument.name, argument.dtype, (1,))
    return TensorParameter(argument.name, argument.dtype, place.extents, output, steps=place.strides,
                           offset=place.offset)


def _view(load: Load, number: int, spec: Any) -> TensorParameter:
    """The tensor that a Load reads: [m, n], 1 along an axis that it does not depend on."""
    shape = spec.m if load.m else 1, spec.n if load.n else 1
    return TensorParameter(f"load{number}", load.dtype, shape, steps=(load.m, 1), offset=load.offset,
                           of=f"x{load.parameter}")


def make_family(name: str, programs: Sequence[TileProgram], determinism_class: str) -> Family:
    """The family of programs on a GPU."""
    return Family(name, tuple(map(_template, programs)), determinism_class=determinism_class)


@functools.cache
def make_schedule(base: type[Any], name: str) -> type[Any]:
    """The type of a template's schedules: `base`, with the name of the template. They are pickled as JSON."""
    own = {"template": name, "__reduce__": lambda self: (_read_schedule, (self.kind, self.to_json()))}
    return dataclass(frozen=True)(type(f"{base.__name__}_{name}", (base,), own))


def _read_schedule(kind: str, data: Any) -> Schedule:
    from tinygrad_nv.tile.templates import TABLE
    return TABLE.read(kind, data)


def _template(program: TileProgram) -> Template[Any, Any, GPU]:
    schedule = make_schedule(ProgramSchedule, program.name)

    def problems(spec: Any, s: ProgramSchedule, gpu: GPU) -> Sequence[str]:
        from tinygrad_nv.tile.language import gpu as target
        found = program.refuse(spec, s.blocks)
        for root in program.expressions(spec): found += epilogue.problems(root, gpu.arch)
        return found or [each for one, blocks in program.steps(spec, s.blocks) for each in target.problems(
            trace_spec(program, one, blocks), TileSchedule(warps=s.warps), gpu, pdl=True)]

    def build(spec: Any, s: ProgramSchedule, gpu: GPU, integers: tuple[Integer, ...] = ()) -> Any:
        from tinygrad_nv.tile.language import gpu as target
        made = program.build(spec, s.blocks, lambda one: target.build(one, TileSchedule(warps=s.warps), gpu,
                                                                      pdl=True))
        return made.with_integers(integers) if integers else made

    def candidates(spec: Any, gpu: GPU) -> Sequence[ProgramSchedule]:
        return [schedule(**vars(blocks), warps=warps) for blocks, warps in program.cut(spec, gpu)]
    return Template(program.name, program.spec, schedule, problems, candidates, build)
