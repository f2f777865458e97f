"""Decode attentions for tests of the CPU's kernels: those of decode_case.py, run on this machine.

Protocol: `run(spec, given, isa=…, …)` loads the kernels of a schedule, which may divide a request's keys
among units (`divided`), and calls them on the storages of `given`; what no query sees is NaN there. Nothing
beside the result may be written. `near` is that of decode_case.py; of float32 one may be off by twice 8
units of the largest too, as of few numbers a plain attention's error says little.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tinygrad import dtypes

from tests.support.tile.decode_case import LEAST, UNIT, C, Given, named, place, plain, reference, size_of
from tests.support.tile.gemm_case import GUARD, TORCH, bits, view
from tinygrad_nv.cpu.decode import kernel as decode
from tinygrad_nv.cpu.isa import AVX2, AVX512, ISA, PORTABLE, detect, why_not
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.decode.spec import DecodeSpec

ISAS = tuple(dict.fromkeys(isa for isa in (PORTABLE, AVX2, AVX512, detect()) if not why_not(isa.level)))


def on(isa: ISA) -> CPU:
    """This machine with another instruction set."""
    return replace(host(), isa=isa)


def run(spec: DecodeSpec, given: Given, isa: ISA | None = None, divided: bool | None = None, parts: int = 0,
        order: Sequence[int] | None = None) -> torch.Tensor:
    """The result [batch, heads, group, s_q, d_v]. Parts run in `order` on this thread, if given."""
    here = on(isa or detect())
    schedule = decode.default(spec, here)
    assert not decode.problems(spec, schedule)
    if divided is not None: schedule = replace(schedule, divided=divided)
    made = decode.build(spec, replace(schedule, parts=parts or schedule.parts))
    out = bits(torch.full((size_of(spec, spec.out, spec.d_v),), GUARD, dtype=TORCH[spec.out.dtype]))
    arguments: list[np.ndarray | int] = [out]
    if made.workspace_bytes: arguments.append(np.full(made.workspace_bytes // 4, np.nan, np.float32))
    for name in named(spec):
        if name == "v" and given.together: arguments.append(arguments[-1])
        elif name in given.storages: arguments.append(bits(given.storages[name]))
    if spec.length == "argument": arguments.append(given.lengths[0])
    for kernel in made.kernels: load(kernel)(*arguments, order=order)
    storage = torch.frombuffer(bytearray(out.tobytes()), dtype=TORCH[spec.out.dtype])
    lies = view(storage, *place(spec, spec.out, spec.d_v))
    got = lies.clone()
    lies.fill_(GUARD)
    assert (storage == GUARD).all(), "elements beside the result were written"
    return got


def near(spec: DecodeSpec, given: Given, got: torch.Tensor) -> None:
    """Asserts |got − exact| ≤ C × the largest error of a plain attention + the rounding of the result."""
    exact = reference(spec, given)
    usual = (plain(spec, given) - exact).abs().max()
    least = 8 * UNIT[dtypes.float32] * exact.abs().max()
    if spec.q.dtype == dtypes.float32: usual = torch.maximum(usual, least)
    bound = C * usual + UNIT[spec.out.dtype] * exact.abs() + LEAST[spec.out.dtype]
    worst = ((got.double() - exact).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound, a plain one is {usual:g}"
