"""Selective scans held to the recurrence in float64, on any target.

Protocol: `table(…)` has sequences one after the other, with borders, gaps and empty ones, and pages that are
also read; `right(spec, rows, target)` runs a target's kernel in place, with NaN in rows of no sequence and in
pages that none reads, and holds results and pages to `recurrence`.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tinygrad.dtype import DType

from tests.support.tile.gemm_case import GUARD
from tests.support.tile.reference_case import Given, run, storages, view
from tests.support.tile.sequences_case import Row, follow, read_inputs, tokens_of
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.selective_scan.spec import Rows, SelectiveScanSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


def recurrence(spec: SelectiveScanSpec, given: Given, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Results and pages in float64."""
    states, x, step, a, b, c = read_inputs(spec, given).values()
    out = np.full((spec.tokens, spec.channels), float(GUARD))

    def advance(state: np.ndarray, t: int) -> np.ndarray:
        state = np.exp(step[t] * a) * state + step[t] * x[t] * b[t][:, None]
        out[t] = c[t] @ state
        return state
    return out, follow(rows, states, advance)


def table(counts: Sequence[int], seed: int = 0, border: int = 3) -> tuple[list[Row], int]:
    """Sequences of so many tokens, and how many pages they have: some begin with zeros, some with a page that
    they write, or with another; some keep their state at a multiple of `border` tokens."""
    random, rows, first, pages = np.random.default_rng(seed), list[Row](), 0, 0
    for count in counts:
        source, target, kept, at = -1, pages, -1, 0
        pages += 1
        if random.integers(3):
            source = target if random.integers(2) else pages
            pages += source != target
        if count >= border and random.integers(4):
            at, kept = int(random.integers(1, count // border + 1)) * border, pages
            pages += 1
        rows.append((first, count, source, at, kept, target if random.integers(8) else -1))
        first += count + int(random.integers(2))     # rows of no sequence between some
    return rows, pages


def spec_of(rows: Sequence[Row], pages: int, channels: int, states: int, dtype: DType, more: int = 0,
            single: bool = False) -> SelectiveScanSpec:
    """The spec of a table: rows with gaps, B and C side by side, and `more` tokens of no sequence."""
    tokens = len(rows) if single else max(row[0] + row[1] for row in rows) + more
    return SelectiveScanSpec(tokens, len(rows), channels, states, pages, Rows(dtype, channels + 8, 3),
                             Rows(dtype, 2 * states + 8, 8), Rows(dtype, 2 * states + 8, 8 + states), single)


def given_of(spec: SelectiveScanSpec, rows: Sequence[Row], seed: int = 0) -> Given:
    """Storages of a table's scan: steps and decays have their signs."""
    given = storages(spec, seed)
    given["step"].abs_()
    given["a"].abs_().neg_()
    given["sequences"].copy_(torch.tensor(rows, dtype=torch.int32).flatten())
    return given


def right(spec: SelectiveScanSpec, rows: Sequence[Row], target: GPU | CPU, seed: int = 0) -> None:
    """Raises where results or pages are not the recurrence's, or others are written."""
    given = given_of(spec, rows, seed)
    owned = set(tokens_of(rows))
    for each in TABLE.arguments(spec)[2:7]:
        if each.name == "a": continue
        lies = view(given[each.name], each.places[0])
        for t in range(spec.tokens):
            if t not in owned: lies[t] = torch.nan
    pages = given["states"].view(spec.pages, -1)
    for page in range(spec.pages):
        if page not in {row[2] for row in rows}: pages[page] = torch.nan
    wanted, states = recurrence(spec, given, rows)
    found = run(spec, TABLE.choose(spec, target), target, given, seed)
    for name, ideal in (("out", wanted), ("states", states)):
        # sums of products, each within a few units, over some dozens of tokens
        size = max(1.0, float(np.nanmax(np.abs(ideal), initial=0.0)))
        np.testing.assert_allclose(found[name].numpy(), ideal, rtol=0, atol=32 * 2.0**-24 * size,
                                   err_msg=f"{name} of {spec}")
