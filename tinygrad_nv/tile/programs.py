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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import FunctionType
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.expression import Expression, Load, loads
from tinygrad_nv.tile.kernel import Chain, ProgramsInTurn, Scratch
from tinygrad_nv.tile.language.ir import STORES, Program, TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import LIMITS, trace_program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.reference import Argument
from tinygrad_nv.tile.schedule import Schedule, count_words
from tinygrad_nv.tile.template import GPU, Family, Template

Grid = tuple[int, int, int]
VECTOR = TileSchedule().vector_width
PART_ELEMENTS = 1 << 14     # of a CPU's part: fewer are done before another thread has begun


@dataclass(frozen=True)
class Blocks:
    """Parts that programs of the grid compute: `rows` and `columns` are what the function says. `groups` of
    rows have results of their own, which another launch joins; `lanes` of a block's rows, or of a row's
    columns, are joined at its end. Programs along z are `cluster`s of so many, on Hopper."""
    rows: int = 16
    columns: int = 1
    groups: int = 1
    lanes: int = 1
    cluster: int = 1

    @property
    def blocks(self) -> Blocks:
        """Itself, without what a schedule has besides."""
        return Blocks(self.rows, self.columns, self.groups, self.lanes, self.cluster)

    def block_words(self) -> list[str]:
        """The blocks as a schedule shows them."""
        return [f"blocks of {self.rows}x{self.columns}", *[f"{self.groups} groups"] * (self.groups > 1),
                *[f"clusters of {self.cluster}"] * (self.cluster > 1)]


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
    `steps`: specs and blocks of the launches, of two the first writes float32 that the second reads. `fixed`:
    no blocks but those of `cut` may be, as others would add up in another order. `vector`: elements that
    a thread has side by side at most. `entry`: the name of the kernel, where that is not its own.
    `scratch`: int32 tensors behind the outputs, by name; where there are such, the program `following` goes
    on with these and the outputs, by warps of its own. `held`: what a prediction finds in scratch, by the
    arrays of the arguments. `kinds` of targets that have it. `by_rows`: names of
    the tensors of whose first axis a symbolic spec says how many there are, where expressions do not."""
    name: str
    spec: type
    function: Callable[..., None]
    grid: Callable[[Any, Blocks], Grid]
    cut: Callable[[Any, Any], Sequence[tuple[Blocks, int]]]
    elements: Callable[[Any], int]
    problems: Callable[[Any, str], list[str]] = lambda spec, kind: []
    expressions: Callable[[Any], tuple[Expression, ...]] = lambda spec: ()
    steps: Callable[[Any, Blocks], Sequence[tuple[Any, Blocks]]] = lambda spec, blocks: [(spec, blocks)]
    fixed: bool = False
    vector: Callable[[Any], int] = lambda spec: VECTOR
    entry: Callable[[Any], str] | None = None
    scratch: Callable[[Any, Blocks], Mapping[str, tuple[int, ...]]] = lambda spec, blocks: {}
    following: TileProgram | None = None
    held: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] = lambda spec, given: {}
    kinds: tuple[str, ...] = ("gpu", "cpu")
    by_rows: tuple[str, ...] = ()

    def refuse(self, spec: Any, blocks: Blocks, kind: str) -> list[str]:
        """Why no kernel can be for a kind of target, in words; empty when one can."""
        out = [f"{name} {value}" for name, value in vars(blocks).items() if value < 1]
        dealt = blocks.rows if blocks.rows > 1 else blocks.columns
        if not out and dealt % blocks.lanes: out = [f"{dealt} in {blocks.lanes} lanes"]
        if out: return out
        for count, most, axis in zip(self.grid(spec, blocks), LIMITS, "xyz", strict=True):
            if count > most: out.append(f"{count} programs along {axis}, at most {most}")
        return self.problems(spec, kind) + out

    def refuse_on_gpu(self, spec: Any, s: ProgramSchedule, gpu: GPU) -> list[str]:
        """Returns why a GPU has no kernel by a schedule, in words; empty when it can."""
        from tinygrad_nv.tile import epilogue
        if found := self.refuse(spec, s.blocks, gpu.kind): return found
        for root in self.expressions(spec): found += epilogue.problems(root, gpu.arch)
        if self.fixed and (s.blocks, s.warps) not in (own := self.cut(spec, gpu)):
            found.append(f"{s} is not one of {own[0][0]} by {count_words(own[0][1], 'warp')}")
        return found

    def launches(self, spec: Any, blocks: Blocks) -> list[tuple[TileProgram, Program]]:
        """The programs of all launches, with their records."""
        made = [(self, trace_spec(self, one, its)) for one, its in self.steps(spec, blocks)]
        if self.following is None or not self.scratch(spec, blocks): return made
        return made + self.following.launches(spec, blocks)

    def build(self, spec: Any, blocks: Blocks, build_one: Callable[[TileProgram, Program], Any]) -> Any:
        """The kernel of a spec, or all."""
        launches = self.launches(spec, blocks)
        kernels, between = tuple(build_one(*each) for each in launches), launches[0][1].tensors[0]
        if found := self.scratch(spec, blocks):
            given = (Scratch(dtypes.int32, prod(shape), held=self._find_held(spec, name))
                     for name, shape in found.items())
            return ProgramsInTurn(kernels, tuple(given))
        if len(kernels) == 1: return kernels[0]
        return Chain(kernels[0], kernels[1], Scratch(between.dtype, between.numel))

    def _find_held(self, spec: Any, name: str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda arrays: self.held(spec, arrays).get(name)


@functools.lru_cache(256)
def trace_spec(program: TileProgram, spec: Any, blocks: Blocks) -> Program:
    """The program of a spec."""
    from tinygrad_nv.tile.templates import TABLE
    roots = program.expressions(spec)
    reads = list(dict.fromkeys(load for root in roots for load in loads(root)))
    batch, rows = getattr(spec, "batch", ()) if roots else (), getattr(spec, "symbolic", False)
    tensors = [_tensor(each, bool(roots), len(batch) if rows and (roots or each.name in program.by_rows)
                       else None) for each in TABLE.arguments(spec)]
    outs = sum(each.output for each in tensors)
    tensors[outs:outs] = [TensorParameter(name, dtypes.int32, shape, output=True)
                          for name, shape in program.scratch(spec, blocks).items()]
    given: dict[str, Any] = {each.name: TensorRef(each) for each in tensors if each.output or not roots}
    views = {load: _view(load, number, spec, batch) for number, load in enumerate(reads)}
    if roots: given["loads"] = {load: TensorRef(view) for load, view in views.items()}
    function = program.function
    assert isinstance(function, FunctionType)
    launch = {"name": program.entry(spec) if program.entry else program.name,
              "rows": blocks.rows if rows else 0, "cluster": blocks.cluster}

    def trace() -> Program:
        made = trace_program(function, {**given, "spec": spec, "blocks": blocks}, tensors,
                             TileSchedule(), program.grid(spec, blocks), None, tuple(views.values()),
                             **launch)
        written = {name for op in made.body.walk() if op.name in STORES for name in made.tensor_names(op)}
        own = tuple(replace(each, output=each.name in written) for each in made.tensors)
        return replace(made, tensors=own, retrace=trace)
    return trace()


def _tensor(argument: Argument, viewed: bool, symbolic: int | None) -> TensorParameter:
    """An argument as it lies; of one that is read by views alone, the pointer. Integers of 64 bits are two
    words along a new last axis, the lower one first."""
    output, place, dtype = argument.role != "in", argument.places[0], argument.dtype
    if viewed and not output: return TensorParameter(argument.name, dtype, (1,))
    extents, steps, offset = place.extents, place.strides, place.offset
    if dtype in (dtypes.int64, dtypes.uint64):
        extents, steps = (*extents, 2), (*(2 * each for each in steps), 1)
        offset, dtype = 2 * offset, dtypes.uint32
    if extents[-1] == 1: steps = (*steps[:-1], 1)
    elif steps[-1] != 1: extents, steps = (*extents, 1), (*steps, 1)    # elements of a row that lie apart
    return TensorParameter(argument.name, dtype, extents, output, steps=steps, offset=offset,
                           symbolic=symbolic)


def _view(load: Load, number: int, spec: Any, batch: Sequence[int]) -> TensorParameter:
    """The tensor that a Load reads: [*batch, m, n], 1 along an axis that it does not depend on."""
    steps = *(load.batch or (0,) * len(batch)), load.m, 1
    extents = zip((*batch, spec.m, spec.n), (*steps[:-1], load.n), strict=True)
    symbolic = len(batch) if load.m and getattr(spec, "symbolic", False) else None
    shape = tuple(extent if step else 1 for extent, step in extents)
    return TensorParameter(f"load{number}", load.dtype, shape, steps=steps, offset=load.offset,
                           of=f"x{load.parameter}", symbolic=symbolic)


def make_family(name: str, programs: Sequence[TileProgram], determinism_class: str) -> Family:
    """The family of programs on a GPU."""
    own = tuple(_template(each) for each in programs if "gpu" in each.kinds)
    return Family(name, own, determinism_class=determinism_class)


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

    def tile_schedule(one: TileProgram, spec: Any, s: ProgramSchedule, gpu: GPU) -> TileSchedule:
        """A launch's: of one that follows by its own number of warps."""
        warps = s.warps if one is program else one.cut(spec, gpu)[0][1]
        return TileSchedule(warps=warps, vector=one.vector(spec))

    def problems(spec: Any, s: ProgramSchedule, gpu: GPU) -> Sequence[str]:
        from tinygrad_nv.tile.language import gpu as target
        found = program.refuse_on_gpu(spec, s, gpu)
        return found or [each for one, made in program.launches(spec, s.blocks)
                         for each in target.problems(made, tile_schedule(one, spec, s, gpu), gpu, pdl=True)]

    def build(spec: Any, s: ProgramSchedule, gpu: GPU, integers: tuple[Integer, ...] = ()) -> Any:
        from tinygrad_nv.tile.language import gpu as target
        made = program.build(spec, s.blocks, lambda one, made: target.build(
            made, tile_schedule(one, spec, s, gpu), gpu, pdl=True))
        return made.with_integers(integers) if integers else made

    def candidates(spec: Any, gpu: GPU) -> Sequence[ProgramSchedule]:
        return [schedule(**vars(blocks), warps=warps) for blocks, warps in program.cut(spec, gpu)]
    return Template(program.name, program.spec, schedule, problems, candidates, build)
