"""Attentions on the CPU for tests of cpu/attention/flash.py: the storages and the float64 answers of
attention_case.py, the kernel run on arrays.

Protocol: `run` gives the result and l as attention_case's does. What no row of the launch may read is NaN in
the kernel's copies: rows beyond the extents, and keys and values that no row sees; everything beside the
results must be as it was.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.support.tile.attention_case import GUARD, Extents, actual, arguments, matrix, near, places, seen
from tests.support.tile.gemm_case import view
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.attention.flash import CPUFlash
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.attention.spec import AttentionSpec

Given = dict[str, torch.Tensor]
Answer = tuple[torch.Tensor, torch.Tensor | None]
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16)
          if not isa.why_not(each.level) and (not each.bf16 or "avx512_bf16" in isa.flags())]
BEST = LEVELS[-1]


def scheduled(spec: AttentionSpec, level: isa.ISA = BEST, threads: int = 2, **changes: int) -> CPUFlash:
    """The default schedule of a level, with changes."""
    target = CPU(level, threads)
    made = replace(flash.default(spec, target), **changes)
    assert not flash.problems(spec, made)
    return made


def loaded(spec: AttentionSpec, schedule: CPUFlash | None = None) -> LoadedKernel:
    return load(flash.build(spec, schedule or scheduled(spec)))


def poisoned(spec: AttentionSpec, given: Given, extents: Extents) -> Given:
    """Copies of the storages, in which NaN stands where no kernel may read."""
    made, at = {name: x.clone() for name, x in given.items()}, actual(spec, extents)
    if spec.scales is not None: return made
    matrix(spec, made, "q")[..., at["s_q"]:, :] = torch.nan
    used = seen(spec, extents).any(0).nonzero().flatten().tolist()
    first, last = (used[0], used[-1] + 1) if used else (0, 0)
    for name in ("k", "v"):
        lies = matrix(spec, made, name)[:, :, 0]  # of all query heads
        lies[..., :first, :] = torch.nan
        lies[..., last:, :] = torch.nan
    return made


def run(kernel: LoadedKernel, spec: AttentionSpec, given: Given, order: Sequence[int] | None = None,
        **extents: int) -> Answer:
    """The result [*batch, s_q, d_v] and l [*batch, s_q] in float64. Nothing beside them may be written."""
    memory, at, got = poisoned(spec, given, extents), actual(spec, extents), []
    pointers = [memory[name].view(torch.uint8).numpy() for name in places(spec)]
    kernel(*pointers, *(at[name] for name in spec.symbolic), order=order)
    for name in [name for name in ("out", "l") if name in memory]:
        offset, shape, strides = places(spec)[name][1]
        lies = view(memory[name], shape, strides, offset)
        mine = lies[..., :at["s_q"], :] if name == "out" else lies[..., :at["s_q"]]
        got.append(mine.double())
        mine.fill_(GUARD)
        guard = torch.tensor(GUARD).to(memory[name].dtype).double()
        assert (memory[name].double() == guard).all(), f"elements beside {name} were written"
    return got[0], got[1] if spec.lse else None


def close(spec: AttentionSpec, schedule: CPUFlash | None = None, seed: int = 0, **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed)
    near(spec, given, run(loaded(spec, schedule), spec, given, **extents), **extents)


def same(x: Answer, y: Answer) -> None:
    """Asserts that no bit differs."""
    for one, other in zip(x, y, strict=True):
        if one is None or other is None: assert one is other
        else: assert np.array_equal(one.numpy().view(np.uint64), other.numpy().view(np.uint64))
