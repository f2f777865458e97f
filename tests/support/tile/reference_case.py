"""Any template on any target, held against the reference of its spec.

Protocol: `storages(spec, seed, integers)` fills the arguments of a spec (TABLE.arguments): what lies between
elements is NaN, or GUARD of integers and of results. `run(spec, schedule, target, given, seed)` builds the
kernel and runs it, on the emulator or on this processor; nothing may be found, and nothing beside the results
written. `right(spec, given, got, …)` holds results against the reference: integers in, bits out; else an
element may be `C` times as far from the exact one as the reference in float32 is at most, and two roundings.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import NOOPT, Context

from tests.support.tile.gemm_case import GUARD, TORCH, bits, tensor_map
from tests.support.tile.report_case import told
from tinygrad_nv import hooks
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.arguments import calls, with_scratch
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.kernel import Chain
from tinygrad_nv.tile.reference import Argument, Place
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

C = 2.0
Given = dict[str, torch.Tensor]
KINDS = TORCH | {dtypes.uint32: torch.uint32, dtypes.int64: torch.int64}
UNIT = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8,
        dtypes.fp8e4m3: 2.0**-4, dtypes.fp8e5m2: 2.0**-3}


def view(storage: torch.Tensor, place: Place, once: bool = False) -> torch.Tensor:
    """A place of a storage; `once`: one element of those that share one."""
    extents = tuple(1 if once and not s else e for e, s in zip(place.extents, place.strides, strict=True))
    return torch.as_strided(storage, extents, place.strides, place.offset)


# **** memory ****

def storages(spec: Any, seed: int = 0, integers: bool = False, most: int = 4) -> Given:
    """Storages of every argument: normal numbers, or whole ones from −most to most."""
    random = torch.Generator().manual_seed(seed)
    made = {each.name: _storage(each, random, integers, most) for each in TABLE.arguments(spec)}
    if isinstance(spec, BackwardSpec): _saved(spec, made)
    return made


def _saved(spec: BackwardSpec, made: Given) -> None:
    """l and delta of a backward pass as its forward pass has them."""
    forward, grad = replace(spec.forward, lse=True), TABLE.arguments(spec)[6]
    out, l = answer(forward, made, exact=True).values()
    made["l"].copy_(l.flatten())
    made["delta"].copy_((out * view(made["grad"], grad.places[0]).double()).sum(-1).flatten())


def _storage(argument: Argument, random: torch.Generator, integers: bool, most: int) -> torch.Tensor:
    dtype, result = argument.dtype, argument.role == "out"
    whole = integers or not dtypes.is_float(dtype)
    nothing = torch.nan if dtypes.is_float(dtype) and not result else GUARD
    made = torch.full((argument.size,), nothing, dtype=torch.float64)
    for place in argument.places if not result else ():
        lies = view(made, place, once=True)
        if argument.values is not None:
            lies.copy_(torch.randint(argument.values.start, argument.values.stop, lies.shape,
                                     generator=random))
        elif whole: lies.copy_(torch.randint(0 if dtypes.is_unsigned(dtype) else -most, most + 1, lies.shape,
                                             generator=random))
        else: lies.copy_(torch.randn(lies.shape, generator=random, dtype=torch.float64))
        if argument.name.startswith("scale"): lies.abs_()
    if dtype == dtypes.bool: made = made > 0
    return made.to(KINDS[dtype])


# **** the kernel ****

def run(spec: Any, schedule: Schedule, target: GPU | CPU, given: Given, seed: int = 0,
        integers: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Results [*extents] in float64, by name. `integers`: those of a symbolic spec."""
    made, places = TABLE.build(spec, schedule, target), TABLE.arguments(spec)
    memory = {each.name: bits(given[each.name]) for each in places}
    if isinstance(made, Chain):
        memory["between"] = np.full(made.between.count * made.between.dtype.itemsize, 0xFF, np.uint8)
    for one, its in calls(made, spec):
        held = {each.name: memory[each.name] for each in its}
        if isinstance(target, GPU): _emulated(one, held, its, target, seed, integers)
        else: _called(one, held, its, integers)
    found = {}
    for each in places:
        storage = torch.from_numpy(memory[each.name]).view(given[each.name].dtype)
        if each.role == "in":
            assert torch.equal(storage.view(torch.uint8), given[each.name].view(torch.uint8)), each.name
            continue
        lies, before = view(storage, each.places[0]), view(given[each.name], each.places[0])
        found[each.name] = lies.to(torch.float64)
        lies.copy_(before.clone())
        assert torch.equal(storage.view(torch.uint8), given[each.name].view(torch.uint8)), \
            f"elements beside {each.name} were written"
    return found


def _emulated(made: Any, memory: dict[str, np.ndarray], places: Sequence[Argument], gpu: GPU, seed: int,
              integers: Sequence[int]) -> None:
    emu = Emulator(gpu.arch, seed=seed)
    buffers = {name: emu.alloc(data) for name, data in memory.items()}
    order = with_scratch(made, list(buffers.values()), places, lambda some: emu.alloc(some.nbytes))
    for each in made.kernels:
        for zero in each.launch.zeroed:
            order[zero.pointer].data[:zero.nbytes] = 0
            order[zero.pointer].valid = None
        maps = [tensor_map(order, one, integers[one.integer] if one.dynamic >= 0 else 0)
                for one in each.launch.maps]
        report = emu.launch(each.ptx, each.grid, each.threads, [*order, *map(np.uint32, integers), *maps],
                            dynamic_smem=each.dynamic_smem, cluster=each.cluster)
        found = told(report)
        assert found == [], "\n".join(map(str, found))
    for name, buffer in buffers.items(): memory[name][:] = np.frombuffer(buffer.numpy().tobytes(), np.uint8)


def _called(made: Any, memory: dict[str, np.ndarray], places: Sequence[Argument],
            integers: Sequence[int]) -> None:
    order = with_scratch(made, list(memory.values()), places,
                         lambda some: np.full(some.nbytes, 0xFF, np.uint8))
    for each in made.kernels: load(each)(*order, *integers, order=range(each.parts)[::-1])


def require_same_bits(spec: Any, schedule: Schedule, target: GPU | CPU, given: Given,
                      got: dict[str, torch.Tensor]) -> None:
    """Asserts that warps of a GPU in another order have the same results."""
    if not isinstance(target, GPU): return
    for name, other in run(spec, schedule, target, given, seed=1).items():
        assert torch.equal(got[name], other), name


# **** what is right ****

def answer(spec: Any, given: Given, exact: bool = False) -> dict[str, torch.Tensor]:
    """The reference's results in float64, by name."""
    known = (each.name for each in TABLE.arguments(spec) if each.name in given)
    return _answer(spec, tuple((name, bits(given[name]).tobytes()) for name in known), exact)


@lru_cache(16)
def _answer(spec: Any, memory: tuple[tuple[str, bytes], ...], exact: bool) -> dict[str, torch.Tensor]:
    kinds = {each.name: each.dtype for each in TABLE.arguments(spec)}
    names = [each.name for each in TABLE.arguments(spec) if each.role != "in"]
    # float64 is exact enough in any order of sums, and kernels that are not optimised are compiled sooner;
    # plain float32, which bounds are of, adds up as tinygrad usually does
    with hooks.disabled(), Context(NOOPT=1 if exact else NOOPT.value, SPEC=0):
        tensors = {name: Tensor(np.frombuffer(data, np.uint8), device="CPU").bitcast(kinds[name])
                   for name, data in memory}
        found = TABLE.reference(spec, tensors, exact)
        return {name: torch.from_numpy(np.array(x.cast(dtypes.float64).numpy()))
                for name, x in zip(names, found, strict=True)}


def right(spec: Any, given: Given, got: dict[str, torch.Tensor], c: float = C, cut: float = 0.0) -> None:
    """Asserts that results are near the exact ones; `cut`: of the largest, what tensor cores may cut."""
    exact, plain = answer(spec, given, exact=True), answer(spec, given)
    for each in (each for each in TABLE.arguments(spec) if each.role != "in"):
        mine, true, usual = got[each.name], exact[each.name], plain[each.name]
        assert mine.shape == true.shape, (each.name, mine.shape, true.shape)
        said = ~true.isnan()    # NaN: rows of l that a sequence of a ragged batch lacks, which nothing writes
        assert said.all() or (each.name == "l" and spec.is_ragged), f"the reference of {each.name} has NaN"
        finite = said & true.isfinite()
        assert torch.equal(mine[said & ~finite], true[said & ~finite]), each.name
        mine, true, usual = mine[finite], true[finite], usual[finite]
        over = ((mine - true).abs() - bound(each.dtype, true, usual, c, cut)).max()
        error = (usual - true).abs().max()
        assert over <= 0, f"{each.name}: {over:g} above the bound; float32 is {error:g} off"


def bound(dtype: DType, true: torch.Tensor, usual: torch.Tensor, c: float = C,
          cut: float = 0.0) -> torch.Tensor:
    """How far results of a dtype may be from the exact ones, `usual` being those of float32."""
    return c * (usual - true).abs().max() + 2 * UNIT.get(dtype, 0) * true.abs() + cut * true.abs().max()


def same(spec: Any, given: Given, got: dict[str, torch.Tensor]) -> None:
    """Asserts that results are the reference's to the bit."""
    for name, wanted in answer(spec, given).items(): assert torch.equal(got[name], wanted), name
