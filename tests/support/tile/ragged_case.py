"""Ragged batches for tests of the templates: sequences of many lengths in one storage, each held against the
attention of that sequence alone.

Protocol: `ragged(lengths, …)` makes a `Case` of (rows, keys) of each sequence, with `slack` rows of NaN
before the first sequence and after the last, that was never written; `arguments(case)` the storages, `run`
the kernel's results with everything that attention_case.run asks for, `near` holds each sequence against its
own answer.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile import attention_case as dense
from tests.support.tile.gemm_case import GUARD, TORCH, bits
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.attention.spec import FULL, KEEP_ALL, SYMBOLS, AttentionSpec, Band, Rows
from tinygrad_nv.tile.expression import Expression, Sum, loads
from tinygrad_nv.tile.kernel import AttentionKernel

Given = dict[str, torch.Tensor]
SEED = (0x243F6A88, 0x85A308D3)


@dataclass(frozen=True)
class Case:
    """A spec, and rows and keys of each sequence."""
    spec: AttentionSpec
    lengths: tuple[tuple[int, int], ...]
    slack: int = 0

    @property
    def begins(self) -> tuple[list[int], list[int]]:
        """cu_q and cu_k."""
        q, keys = zip(*self.lengths, strict=True)
        begin = self.slack
        return (list(itertools.accumulate(q, initial=begin)), list(itertools.accumulate(keys, initial=begin)))

    def whole(self) -> AttentionSpec:
        """A dense attention whose operands have the same storages."""
        assert self.spec.total is not None
        rows, keys = self.spec.total
        return replace(self.spec, total=None, kept=KEEP_ALL, batch=(1, *self.spec.batch[1:]), s_q=rows,
                       s_kv=keys, score=Sum(), lse=False)

    def alone(self, number: int) -> tuple[AttentionSpec, dict[str, int]]:
        """A sequence's own attention, and its extents."""
        (rows, keys), begins, spec = self.lengths[number], self.begins, self.spec
        def moved(one: Rows, which: int) -> Rows:
            return replace(one, offset=one.offset + begins[which][number] * one.row)
        return replace(spec, total=None, batch=(1, *spec.batch[1:]), s_q=max(rows, 1), s_kv=max(keys, 1),
                       q=moved(spec.q, 0), k=moved(spec.k, 1), v=moved(spec.v, 1), out=moved(spec.out, 0),
                       symbolic=SYMBOLS), {"s_q": rows, "s_kv": keys, "start": keys - rows}


def ragged(lengths: Sequence[tuple[int, int]], d: int = 64, dtype: DType = dtypes.bfloat16, heads: int = 1,
           group: int = 1, band: Band = FULL, score: Expression | None = None, d_v: int | None = None,
           out: DType | None = None, gap: int = 0, lse: bool = True, slack: int = 0, more: int = 0,
           kept: int = KEEP_ALL) -> Case:
    """Rows [row, heads, d]; `more` than the most rows are allowed for."""
    d_v = d if d_v is None else d_v
    if score is None: score = Sum() * (1 / math.sqrt(d))
    def rows(width: int, kind: DType, query: int) -> Rows:
        pitch, many = width + gap, max(query, 1)
        return Rows(kind, pitch * heads * many, (0, pitch * many, pitch if query else 0))
    q, keys = zip(*lengths, strict=True)
    spec = AttentionSpec(max(*q, 1) + more, max(*keys, 1) + more, d, d_v, rows(d, dtype, group),
                         rows(d, dtype, 0), rows(d_v, dtype, 0), rows(d_v, out or dtype, group),
                         (len(lengths), heads, group), score, band, lse=lse,
                         total=(sum(q) + 2 * slack + 1, sum(keys) + 2 * slack + 1), kept=kept)
    return Case(spec, tuple(lengths), slack)


def arguments(case: Case, seed: int = 0) -> Given:
    """Storages of every parameter."""
    spec, made = case.spec, dense.arguments(case.whole(), seed)
    if spec.lse:
        made["l"] = torch.full((spec.matrices * spec.s_q,), GUARD, dtype=torch.float32)
    made["cu_q"], made["cu_k"] = (torch.tensor(each, dtype=torch.int32) for each in case.begins)
    made["seed"] = torch.tensor(np.array(SEED, np.uint32).view(np.int32))
    random = torch.Generator().manual_seed(seed + 100)
    for load in loads(spec.score):
        strides = (*(load.batch or (0, 0, 0)), load.m, load.n)
        extents = (*spec.batch, spec.s_q, spec.s_kv)
        size = load.offset + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + 1
        values = torch.randn(size, generator=random, dtype=torch.float64)
        made[f"x{load.parameter}"] = values.to(TORCH[load.dtype])
    return made


def order(spec: AttentionSpec) -> list[str]:
    """The kernel's pointers."""
    extras = [f"x{i}" for i in range(len(spec.parameters))]
    without = set() if spec.lse else {"l"}
    if not spec.is_ragged: without |= {"cu_q", "cu_k"}
    if spec.kept == KEEP_ALL: without.add("seed")
    names = ["out", "l", "q", "k", "v", "cu_q", "cu_k", "seed", *extras]
    return [name for name in names if name not in without]


def given_alone(case: Case, given: Given, number: int) -> Given:
    """The storages as a sequence's own attention has them: the score's begin with its own elements."""
    _, heads, group = case.spec.batch
    made = given | {"first matrix": torch.tensor(number * heads * group)}
    for load in loads(case.spec.score):
        made[f"x{load.parameter}"] = given[f"x{load.parameter}"][(load.batch or (0,))[0] * number:]
    return made


Answer = list[tuple[torch.Tensor, torch.Tensor | None]]  # of each sequence


def run(made: AttentionKernel, case: Case, given: Given, arch: str = "sm_80", seed: int = 0) -> Answer:
    """Each sequence's result [1, heads, group, rows, d_v] and l. Nothing may be found, nothing beside the
    results written, nothing read that lies before all sequences, nor, without TMA, after them."""
    emu, spec = Emulator(arch, seed=seed), case.spec
    pointers = {name: emu.alloc(bits(given[name])) for name in order(spec)}
    for name, begin in (("q", case.begins[0]), ("k", case.begins[1]), ("v", case.begins[1])):
        rows: Rows = getattr(spec, name)
        size, valid = rows.row * rows.dtype.itemsize, pointers[name].valid
        valid = np.ones(pointers[name].data.nbytes, np.uint8) if valid is None else valid
        valid[:begin[0] * size] = 0
        if not made.maps: valid[begin[-1] * size:] = 0  # TMA's boxes reach beyond a sequence
        pointers[name].valid = valid
    arguments = list(pointers.values())
    maps = [dense.tensor_map(arguments, argument, []) for argument in made.maps]
    report = emu.launch(made.ptx, made.grid, made.threads, [*arguments, *maps],
                        dynamic_smem=made.dynamic_smem, cluster=made.cluster)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    storages = {name: torch.frombuffer(bytearray(pointers[name].numpy().tobytes()), dtype=given[name].dtype)
                for name in order(spec) if name in ("out", "l")}
    return results(case, storages)


def results(case: Case, storages: Given) -> Answer:
    """Of each sequence; all else must be as it was."""
    spec, found = case.spec, []
    logs = storages["l"].view(*spec.batch, spec.s_q) if spec.lse else None
    for number, (rows, _) in enumerate(case.lengths):
        mine, log = dense.matrix(case.alone(number)[0], storages, "out")[..., :rows, :], None
        out = mine.double()
        mine.fill_(GUARD)
        if logs is not None:
            log = logs[number:number + 1, ..., :rows].double()
            logs[number, ..., :rows] = GUARD
        found.append((out, log))
    rest = dense.matrix(case.whole(), storages, "out")[..., case.begins[0][-1]:, :]
    assert (rest == 0).all(), "rows after the last sequence are not zeros"
    rest.fill_(GUARD)
    for name, storage in storages.items():
        guard = torch.tensor(GUARD).to(storage.dtype).double()
        assert (storage.double() == guard).all(), f"elements beside {name} were written"
    return found


def near(case: Case, given: Given, got: Answer) -> None:
    """Asserts that every sequence is as near its answer as an attention of its own has to be."""
    for number, ((rows, keys), (out, log)) in enumerate(zip(case.lengths, got, strict=True)):
        if not rows: continue
        spec, extents = case.alone(number)
        if keys: dense.near(spec, given_alone(case, given, number), (out, log), **extents)
        else:
            assert (out == 0).all()
            assert log is None or (log == -torch.inf).all()
