"""Atomic operations and CTAs that wait for one another: spin locks, semaphores, a scan over CTAs."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tests.support.ptx.triton_case import Case, Problem, Wanted, cases, exact, values
from tests.support.ptx.triton_pointwise import Rng, whole

I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
N = 256


@triton.jit
def bits_kernel(x, cells, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at)
    cell = tl.arange(0, BLOCK) % 16
    tl.atomic_add(cells + cell, a)
    tl.atomic_max(cells + 16 + cell, a)
    tl.atomic_min(cells + 32 + cell, a)
    tl.atomic_and(cells + 48 + cell, a)
    tl.atomic_or(cells + 64 + cell, a)
    tl.atomic_xor(cells + 80 + cell, a)


def bits(dtype: torch.dtype) -> Any:
    """Every integer operation, 16 cells hit by 32 values each."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 2 * N, low=-10**6, high=10**6, dtype=dtype)
        cells = torch.zeros(6, 16, dtype=dtype)
        cells[3] = -1
        a = values(x).reshape(-1, 16)
        want = np.stack([a.sum(0), np.maximum(a.max(0), 0), np.minimum(a.min(0), 0),
                         np.bitwise_and.reduce(a), np.bitwise_or.reduce(a), np.bitwise_xor.reduce(a)])
        return Problem({"x": x, "cells": cells}, {"cells": Wanted(want)}, (2,), {"BLOCK": N})
    return make


@triton.jit
def unsigned_kernel(x, cells, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at).to(tl.uint8).to(tl.uint32)
    to = cells.to(tl.pointer_type(tl.uint32)) + at % 16
    tl.atomic_max(to, a * 0x01010101)
    tl.atomic_min(to + 16, a * 0x01010101, sem="relaxed", scope="cta")


def unsigned(rng: Rng) -> Problem:
    """max and min of unsigned words, beyond the sign bit."""
    x = whole(rng, N, low=1, high=256)
    cells = torch.zeros(2, 16, dtype=I32)
    cells[1] = -1
    a = (values(x) * 0x01010101).reshape(-1, 16)
    want = np.stack([a.max(0), a.min(0)]).astype(np.uint32).view(np.int32).astype(np.int64)
    return Problem({"x": x, "cells": cells}, {"cells": Wanted(want)}, (1,), {"BLOCK": N})


@triton.jit
def float_kernel(x, total, most, least, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at)
    cell = tl.arange(0, BLOCK) % 32
    tl.atomic_add(total + cell, a, sem="relaxed")
    tl.atomic_max(most + cell, a)
    tl.atomic_min(least + cell, a)


def floats(dtype: torch.dtype) -> Any:
    """Sums of integers, and max and min of both signs (float max is an integer max in disguise)."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 2 * N, low=-500, high=500, dtype=dtype)
        a = x.view(-1, 32)
        inf = torch.full((32,), torch.inf, dtype=dtype)
        return Problem({"x": x, "total": torch.zeros(32, dtype=dtype), "most": -inf, "least": inf},
                       {"total": exact(a.sum(0)), "most": exact(a.amax(0)), "least": exact(a.amin(0))}, (2,),
                       {"BLOCK": N})
    return make


@triton.jit
def half_kernel(x, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total + tl.arange(0, BLOCK), tl.load(x + at), sem="relaxed")


def halves(dtype: torch.dtype) -> Any:
    """Sixteen-bit sums of four CTAs, in vectors where the machine has them."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 4, N, dtype=dtype)
        return Problem({"x": x, "total": torch.zeros(N, dtype=dtype)}, {"total": exact(x.sum(0))}, (4,),
                       {"BLOCK": N})
    return make


@triton.jit
def ticket_kernel(counter, drawn, cell, total, CTAS: tl.constexpr):
    me = tl.program_id(0)
    lane = tl.arange(0, 32)
    tl.atomic_add(drawn + tl.atomic_add(counter + lane * 0, 1), 1)
    tl.atomic_add(total, tl.atomic_xchg(cell, me))
    if tl.atomic_add(counter + 1, 1) == CTAS - 1:
        tl.atomic_add(total, tl.atomic_xchg(cell, 0))


def tickets(rng: Rng) -> Problem:
    """Every lane draws a ticket of its own; every value put into a cell by an exchange comes out once."""
    cell = torch.full((1,), -7, dtype=I32)
    return Problem({"counter": torch.zeros(2, dtype=I32), "drawn": torch.zeros(256, dtype=I32), "cell": cell,
                    "total": torch.zeros(1, dtype=I32)},
                   {"counter": exact(torch.tensor([256, 8])), "drawn": exact(torch.ones(256, dtype=I32)),
                    "total": exact(torch.tensor([sum(range(8)) - 7]))}, (8,), {"CTAS": 8})


@triton.jit
def claim_kernel(cells, winners, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cell = at % 16
    before = tl.atomic_cas(cells + cell, at * 0, at + 1)
    tl.atomic_add(winners + cell, (before == 0).to(tl.int32))


def claim(rng: Rng) -> Problem:
    """512 lanes compare and swap 16 cells: one wins each."""
    return Problem({"cells": torch.zeros(16, dtype=I32), "winners": torch.zeros(16, dtype=I32)},
                   {"winners": exact(torch.ones(16, dtype=I32))}, (2,), {"BLOCK": N})


@triton.jit
def lock_kernel(x, total, lock, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + tl.program_id(0) * n + at, mask=at < n, other=0)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + at, tl.load(total + at, mask=at < n, other=0) + a, mask=at < n)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def lock(rng: Rng) -> Problem:
    """Plain loads and stores under a spin lock, by six CTAs."""
    x = whole(rng, 6, 200)
    return Problem({"x": x, "total": torch.zeros(200, dtype=I32), "lock": torch.zeros(1, dtype=I32),
                    "n": 200}, {"total": exact(x.sum(0)), "lock": exact(torch.zeros(1))}, (6,),
                   {"BLOCK": N})


@triton.jit
def turns_kernel(x, state, turn, BLOCK: tl.constexpr):
    me = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    a = tl.load(x + me * BLOCK + at)
    while tl.atomic_cas(turn, me, me, sem="acquire") != me:
        pass
    tl.store(state + at, tl.load(state + at) * 3 + a)
    tl.debug_barrier()
    tl.atomic_xchg(turn, me + 1, sem="release")


def turns(rng: Rng) -> Problem:
    """A semaphore lets CTAs update a state in order: h = 3 h + x."""
    x = whole(rng, 5, N)
    want = np.zeros(N, np.int64)
    for row in values(x): want = want * 3 + row
    return Problem({"x": x, "state": torch.zeros(N, dtype=I32), "turn": torch.zeros(1, dtype=I32)},
                   {"state": Wanted(want)}, (5,), {"BLOCK": N})


@triton.jit
def lookback_kernel(x, out, prefix, ready, BLOCK: tl.constexpr):
    me = tl.program_id(0)
    at = me * BLOCK + tl.arange(0, BLOCK)
    inside = tl.cumsum(tl.load(x + at))
    before = 0
    if me > 0:
        while tl.atomic_add(ready + me - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(prefix + me - 1)
    tl.store(prefix + me, before + tl.sum(tl.load(x + at)))
    tl.debug_barrier()
    tl.atomic_xchg(ready + me, 1, sem="release")
    tl.store(out + at, inside + before)


def lookback(rng: Rng) -> Problem:
    """A scan over five CTAs, each waiting for the sum before it."""
    x = whole(rng, 5 * N)
    return Problem({"x": x, "out": torch.zeros(5 * N, dtype=I32), "prefix": torch.zeros(5, dtype=I32),
                    "ready": torch.zeros(5, dtype=I32)},
                   {"out": exact(x.cumsum(0)), "prefix": exact(x.view(5, N).sum(1).cumsum(0))}, (5,),
                   {"BLOCK": N})


@triton.jit
def grid_barrier_kernel(x, half, out, arrived, CTAS: tl.constexpr, BLOCK: tl.constexpr):
    me = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    tl.store(half + me * BLOCK + at, tl.load(x + me * BLOCK + at) * 2)
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")
    while tl.atomic_add(arrived, 0, sem="acquire") < CTAS:
        pass
    tl.debug_barrier()
    tl.store(out + me * BLOCK + at, tl.load(half + (me + 1) % CTAS * BLOCK + at) + 1)


def grid_barrier(rng: Rng) -> Problem:
    """Every CTA reads what its neighbour wrote before all of them had arrived."""
    x = whole(rng, 4, N)
    return Problem({"x": x, "half": torch.zeros(4, N, dtype=I32), "out": torch.zeros(4, N, dtype=I32),
                    "arrived": torch.zeros(1, dtype=I32)}, {"out": exact(x.roll(-1, 0) * 2 + 1)}, (4,),
                   {"CTAS": 4, "BLOCK": N})


CASES: list[Case] = [
    *cases("atomics-i32", bits_kernel, bits(I32)),
    *cases("atomics-i64", bits_kernel, bits(I64)),
    *cases("atomics-u32", unsigned_kernel, unsigned),
    *cases("atomics-f32", float_kernel, floats(F32)),
    *cases("atomics-f64", float_kernel, floats(F64)),
    *cases("atomics-f16", half_kernel, halves(torch.float16)),
    *cases("atomics-bf16", half_kernel, halves(torch.bfloat16), archs=(90,)),
    *cases("atomics-f32-vector", half_kernel, halves(F32)),
    *cases("tickets", ticket_kernel, tickets),
    *cases("compare-and-swap", claim_kernel, claim),
    *cases("spin-lock", lock_kernel, lock),
    *cases("semaphore", turns_kernel, turns),
    *cases("lookback", lookback_kernel, lookback),
    *cases("grid-barrier", grid_barrier_kernel, grid_barrier),
]
