"""Backward passes of attentions for tests of the templates: operands in memory as a spec says, the answer in
float64, and a run on the emulator that allows no finding and no byte written outside the results.

Protocol: `backward(...)` makes a spec of dense operands, `arguments(spec, seed)` the storages, with l and
delta of the exact forward rounded to float32 (what lies between elements is NaN), `reference(spec, given)`
the gradients in float64 by the formulas of tile/attention/backward_spec.py, `run(kernel, spec, given)` the
kernel's own, `near` holds them against each other. Extents below the spec's are given by name, to `arguments`
too, since l and delta depend on them: `run(…, s_q=5, s_kv=70)`.

Gradients are `Gradients(dq, dk, dv)`, float64: [batch, heads, group, s_q, d], [batch, heads, s_kv, d] and
[batch, heads, s_kv, d_v].

`near` bounds the error by twice the largest error of `plain`, which has sums and softmax in float32 and
rounds p and ds to 16 bits (ds before or after it is scaled, whichever is worse), by the rounding of the
result, by FINE of the sum of magnitudes, which is what float32 may lose where nothing else is rounded, and
by 2⁻²³ of them times the largest |l|, since weights are exponentials of differences of numbers as large as l.
"""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile import attention_case
from tests.support.tile.attention_case import (
    LEAST,
    UNIT,
    Place,
    actual,
    attention,
    forget,
    matrix,
    rows,
    seen,
    tensor_map,
)
from tests.support.tile.gemm_case import GUARD, TORCH, bits, dense, evaluate, view
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, KEEP_ALL, AttentionSpec, Band
from tinygrad_nv.tile.expression import Expression
from tinygrad_nv.tile.kernel import BackwardKernel

C = 2.0         # of the plain implementation's error
FINE = 2.0**-21  # of a sum of magnitudes
RESULTS = ("dq", "dk", "dv")
Given = dict[str, torch.Tensor]


class Gradients(NamedTuple):
    """What a backward pass computes, in float64."""
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


# **** specs ****

def backward(s_q: int, s_kv: int, d: int = 64, dtype: DType = dtypes.bfloat16, batch: int = 1,
             heads: int = 1, group: int = 1, band: Band = FULL, score: Expression | None = None,
             start: int = 0, d_v: int | None = None, out: DType | None = None, order: str = "bhr",
             gap: int = 0, symbolic: tuple[str, ...] = (), deterministic: bool = False,
             kept: int = KEEP_ALL) -> BackwardSpec:
    """A backward pass of dense operands, scaled by 1/√d where no score is given; `out` is the dtype of dk and
    dv."""
    forward = attention(s_q, s_kv, d, dtype, batch, heads, group, band, score, start, d_v, None, order, gap,
                        symbolic, lse=True)
    forward = replace(forward, kept=kept)
    grad = rows(dtype, (batch, heads, group, s_q), forward.d_v, order, gap)
    dk, dv = (rows(out or dtype, (batch, heads, 0, s_kv), width, order, gap) for width in (d, forward.d_v))
    return BackwardSpec(forward, grad, dk, dv, deterministic)


# **** memory ****

def places(spec: BackwardSpec) -> dict[str, tuple[DType, Place]]:
    """Where the elements of each parameter lie, by the parameter's name, in the kernel's order."""
    one, theirs = spec.forward, attention_case.places(spec.forward)
    b, heads, _ = one.batch
    per_row = dtypes.float32, (0, (*one.batch, one.s_q), (*dense(one.batch, one.s_q), 1))
    made = {"dq": (dtypes.float32, (0, (*one.batch, one.s_q, one.d),
                                    (*dense(one.batch, one.s_q * one.d), one.d, 1)))}
    for name, kind, d in (("dk", spec.dk, one.d), ("dv", spec.dv, one.d_v)):
        made[name] = kind.dtype, (kind.offset, (b, heads, 1, one.s_kv, d), (*kind.batch, kind.row, 1))
    grad = spec.grad.offset, (*one.batch, one.s_q, one.d_v), (*spec.grad.batch, spec.grad.row, 1)
    return made | {name: theirs[name] for name in "qkv"} | {"grad": (spec.grad.dtype, grad), "l": per_row,
        "delta": per_row} | {name: at for name, at in theirs.items() if name[0] == "x" or name == "seed"}


def lies(spec: BackwardSpec, given: Given, name: str) -> torch.Tensor:
    """A parameter's elements, to be read or written."""
    offset, shape, strides = places(spec)[name][1]
    return view(given[name], shape, strides, offset)


def arguments(spec: BackwardSpec, seed: int = 0, scale: float = 1.0, **extents: int) -> Given:
    """Storages of every parameter. dq is zero, dk and dv hold GUARD throughout."""
    random = torch.Generator().manual_seed(seed + 1000)
    forward = attention_case.arguments(spec.forward, seed, scale)
    made: Given = {}
    for name, (dtype, (offset, shape, strides)) in places(spec).items():
        if name in "qkv" or name[0] == "x" or name == "seed": made[name] = forward[name]
        else:
            size = offset + sum((e - 1) * s for e, s in zip(shape, strides, strict=True)) + 1
            value = 0 if name == "dq" else GUARD if name in RESULTS else torch.nan
            made[name] = torch.full((size,), value, dtype=TORCH[dtype])
    grad = lies(spec, made, "grad")
    grad.copy_(torch.randn(grad.shape, generator=random, dtype=torch.float64))
    given_forward(spec, made, **extents)
    return made


def given_forward(spec: BackwardSpec, given: Given, **extents: int) -> None:
    """Writes l and delta: of the exact forward of what q, k, v and grad hold."""
    s_q = actual(spec.forward, extents)["s_q"]
    out, log = attention_case.reference(spec.forward, given, **extents)
    lies(spec, given, "l")[..., :s_q] = log
    lies(spec, given, "delta")[..., :s_q] = (out * lies(spec, given, "grad")[..., :s_q, :].double()).sum(-1)


# **** the answer ****

def scored(spec: AttentionSpec, given: Given, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of sums, and their derivatives: float64, nodes rounded to their dtypes."""
    small = SimpleNamespace(batch=spec.batch, m=sums.shape[-2], n=sums.shape[-1])
    wide = sums.double().detach().requires_grad_(True)
    scores = evaluate(small, spec.score, [wide], given)  # type: ignore[arg-type]
    slope, = torch.autograd.grad(scores.sum(), wide)
    # torch's derivative of 1 / (1 + 2^x) is 0 · inf where 2^x is too large
    return scores.detach(), torch.nan_to_num(slope, nan=0.0)


def differentiated(spec: BackwardSpec, given: Given, wide: torch.dtype, rounded: str = "",
                   magnitudes: bool = False, **extents: int) -> Gradients:
    """The gradients of a launch, computed in `wide`; with p and ds `rounded` to the operands' dtype: ds
    "before" or "after" it is multiplied by the derivative of the score. Of `magnitudes`: the sums of what
    each float32 operation may lose a unit of, relative."""
    one, at = spec.forward, actual(spec.forward, extents)
    s_q, s_kv = at["s_q"], at["s_kv"]
    q, k, v = (matrix(one, given, name)[..., :count, :].to(wide)
               for name, count in (("q", s_q), ("k", s_kv), ("v", s_kv)))
    grad = lies(spec, given, "grad")[..., :s_q, :].to(wide)
    log, delta = (lies(spec, given, name)[..., :s_q, None].to(wide) for name in ("l", "delta"))
    scores, slope = (each.to(wide) for each in scored(one, given, q @ k.transpose(-1, -2)))
    hidden = ~seen(one, extents) | (scores == -torch.inf) | (log == -torch.inf)
    p = torch.where(hidden, 0, torch.exp(scores - log))
    slope = torch.where(hidden, 0, slope)
    keep = attention_case.keep(one, given, s_q, s_kv).to(wide) if one.kept < KEEP_ALL else 1
    if magnitudes:
        q, k, v, grad, delta, slope = (each.abs() for each in (q, k, v, grad, delta, slope))
        p = p * (1 + torch.where(hidden, 0, scores.abs() + log.abs()))
        delta = -delta
    def short(x: torch.Tensor) -> torch.Tensor: return x.to(TORCH[one.q.dtype]).to(wide) if rounded else x
    ds = p * (grad @ v.transpose(-1, -2) * keep - delta)
    ds = short(ds) * slope if rounded == "before" else short(ds * slope)
    p = short(p * keep)
    dk, dv = ((left.transpose(-1, -2) @ right).double().sum(2) for left, right in ((ds, q), (p, grad)))
    return Gradients((ds @ k).double(), dk, dv)


def reference(spec: BackwardSpec, given: Given, **extents: int) -> Gradients:
    """The exact gradients of given l and delta."""
    return differentiated(spec, given, torch.float64, **extents)


def plain(spec: BackwardSpec, given: Given, rounded: str = "after", **extents: int) -> Gradients:
    """The gradients with scores and softmax in float32, p and ds rounded to 16 bits."""
    return differentiated(spec, given, torch.float32, rounded, **extents)


# **** the kernel ****

def launched(made: BackwardKernel, spec: BackwardSpec, given: Given, arch: str, seed: int = 0,
             check: bool = True, **extents: int) -> tuple[Given, Report]:
    """The storages of the results after a launch, and the report."""
    emu, one = Emulator(arch, seed=seed, check=check), spec.forward
    at = actual(one, extents)
    pointers = {name: emu.alloc(bits(given[name])) for name in places(spec)}
    forget(one, {"q": pointers["q"], "k": pointers["k"], "v": pointers["v"]}, at)
    for name in ("grad", "l", "delta"):
        dtype, (offset, shape, strides) = places(spec)[name]
        written = torch.ones(pointers[name].data.nbytes // dtype.itemsize, dtype=torch.bool)
        view(written, shape, strides, offset)[:, :, :, at["s_q"]:] = False
        pointers[name].valid = np.repeat(written.numpy(), dtype.itemsize).astype(np.uint8)
    order = list(pointers.values())
    if made.flags: order.insert(1, emu.alloc(np.zeros(4 * made.flags, np.uint8)))
    counts = [at[name] for name in one.symbolic]
    maps = [tensor_map(order, argument, counts) for argument in made.maps]
    report = emu.launch(made.ptx, made.grid_for(at["s_kv"]), made.threads,
                        [*order, *map(np.uint32, counts), *maps], dynamic_smem=made.dynamic_smem,
                        cluster=made.cluster)
    return {name: torch.frombuffer(bytearray(pointers[name].numpy().tobytes()), dtype=given[name].dtype)
            for name in RESULTS}, report


def run(made: BackwardKernel, spec: BackwardSpec, given: Given, arch: str = "sm_80", seed: int = 0,
        **extents: int) -> Gradients:
    """The gradients. Nothing may be found, and nothing beside them written."""
    storages, report = launched(made, spec, given, arch, seed, **extents)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    at, got = actual(spec.forward, extents), []
    for name, storage in storages.items():
        mine = lies(spec, storages, name)[..., :at["s_q" if name == "dq" else "s_kv"], :]
        got.append(mine.double())
        beside = given[name].double()[0]
        mine.fill_(beside)
        assert (storage.double() == beside).all(), f"elements beside {name} were written"
    dq, dk, dv = got
    return Gradients(dq, dk.squeeze(2), dv.squeeze(2))


def near(spec: BackwardSpec, given: Given, got: Gradients, c: float = C, **extents: int) -> None:
    """Asserts that gradients are near the exact ones; see the module."""
    exact = reference(spec, given, **extents)
    usual = [plain(spec, given, rounded, **extents) for rounded in ("before", "after")]
    sizes = differentiated(spec, given, torch.float64, magnitudes=True, **extents)
    log = lies(spec, given, "l")
    fine = FINE + 2.0**-23 * torch.where(log.isfinite(), log, 0).abs().max().item()
    for name, mine, right, size, *others in zip(RESULTS, got, exact, sizes, *usual, strict=True):
        dtype, error = places(spec)[name][0], max((other - right).abs().max() for other in others)
        bound = c * error + UNIT[dtype] * right.abs() + fine * size + LEAST[dtype]
        assert mine.shape == right.shape, f"{name}: {mine.shape}, {right.shape}"
        wrong = (mine - right).abs()
        worst = torch.where(wrong.isnan(), torch.inf, wrong - bound).max()
        assert worst <= 0, f"{name}: an error {worst:g} above the bound, a plain one is {error:g}"
