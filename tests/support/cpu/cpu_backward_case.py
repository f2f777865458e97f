"""Backward passes of attentions on the CPU for tests: run on the operands of backward_case.py, which says
what is right. Results hold NaN before a launch, and so do rows that a launch with smaller extents lacks;
nothing beside results may be written."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.support.tile.attention_case import actual
from tests.support.tile.backward_case import RESULTS, Given, Gradients, arguments, lies, near, places
from tests.support.tile.gemm_case import GUARD
from tinygrad_nv.cpu.attention.backward import kernel as flash_backward
from tinygrad_nv.cpu.attention.backward.kernel import CPUFlashBackward
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec


def here(isa: ISA | None = None, threads: int = 2) -> CPU:
    """This machine, with another instruction set."""
    return replace(host(), isa=isa or host().isa, threads=threads)


def scheduled(spec: BackwardSpec, isa: ISA | None = None, **changes: int) -> CPUFlashBackward:
    """The default schedule, changed."""
    return replace(flash_backward.default(spec, here(isa)), **changes)


def launched(spec: BackwardSpec, given: Given, schedule: CPUFlashBackward | None = None,
             order: Sequence[int] | None = None, **extents: int) -> Given:
    """All storages after a launch."""
    assert flash_backward.problems(spec, scheduled(spec)) == []
    at, memory = actual(spec.forward, extents), {name: given[name].clone() for name in places(spec)}
    for name in memory:
        rows = at["s_kv" if name in ("k", "v", "dk", "dv") else "s_q"]
        if name in RESULTS: lies(spec, memory, name)[..., :rows, :] = torch.nan
        elif name in ("l", "delta"): lies(spec, memory, name)[..., rows:] = torch.nan
        elif name in ("q", "grad"): lies(spec, memory, name)[..., rows:, :] = torch.nan
        elif name in ("k", "v"): lies(spec, memory, name)[:, :, :1, rows:] = torch.nan
    arrays = [storage.view(torch.uint8).numpy() for storage in memory.values()]
    kernel = load(flash_backward.build(spec, schedule or scheduled(spec)))
    kernel(*arrays, *(at[name] for name in spec.forward.symbolic), order=order)
    return memory


def run(spec: BackwardSpec, given: Given, schedule: CPUFlashBackward | None = None,
        order: Sequence[int] | None = None, **extents: int) -> Gradients:
    """The gradients. Nothing beside them may be written."""
    at, got = actual(spec.forward, extents), []
    for name, storage in launched(spec, given, schedule, order, **extents).items():
        if name not in RESULTS: continue
        mine = lies(spec, {name: storage}, name)[..., :at["s_q" if name == "dq" else "s_kv"], :]
        got.append(mine.double())
        beside = 0.0 if name == "dq" else float(torch.tensor(GUARD).to(storage.dtype))
        mine.fill_(beside)
        assert (storage.double() == beside).all(), f"elements beside {name} were written"
    dq, dk, dv = got
    return Gradients(dq, dk.squeeze(2), dv.squeeze(2))


def close(spec: BackwardSpec, schedule: CPUFlashBackward | None = None, seed: int = 0, scale: float = 1.0,
          **extents: int) -> Gradients:
    """Asserts that the gradients of a random attention are near the exact ones."""
    given = arguments(spec, seed, scale, **extents)
    got = run(spec, given, schedule, **extents)
    near(spec, given, got, **extents)
    return got
