"""Every template of matmuls, rows and attention computes what its spec's reference says, on the emulator and
on this processor: specs of each kind, with extents that no tile divides, times the templates that take them.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.lib import specs
from bench.lib.specs import BF16, E4M3, E5M2, F16, F32, S8, S32, U8, attention, backward, matmul
from tests.support.tile.reference_case import right, run, same, storages
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.expression import Load, Position, Sum, gelu, silu, where
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.norm.spec import NormSpec, apply_gate, gate_gradient
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HERE, AMX = replace(host(), threads=2), CPU(ISA("amx", bf16=True, vnni=True, emulated=True), 2)
ADA = GPU("sm_89", 142)     # asked for 8-bit floats: its other instructions are those of sm_80
TARGETS = (GPU("sm_80", 108), ADA, GPU("sm_90a", 132), HERE)
CAUSAL = Band(None, 0)
# of the largest result: what tensor cores cut of tf32 (2⁻¹⁰ of each operand), of sums of 8-bit floats (13
# bits below the largest term, for each of a few instructions), and what approximate exponentials lose
CUT = {F32: 2.0**-8, E4M3: 2.0**-10, E5M2: 2.0**-9}
FINE = 2.0**-16


def gemms() -> dict[str, GemmSpec]:
    """Matmuls: majors, dtypes, batches, epilogues."""
    placed = Sum() + (Position(0) * 3 + Position(1)).cast(F32) * Load(0, F16, 0, 0, (3, 1)).cast(F32)
    lower = where(Position("m") < Position("n"), 0.0 * Sum(), Sum())
    residual = gelu(Sum() + Load(0, BF16, 0, 1).cast(F32)).cast(BF16) + Load(1, BF16, 96, 1)
    narrow = (silu(Sum()) + Load(0, E5M2, 96, 1).cast(F32)).cast(E4M3)
    clamped = (Sum(S32) + Load(0, U8, 0, 1).cast(S32)).maximum(-128)
    return {
        **{f"{majors} {dtype.name}": matmul(70, 90, 136, dtype, majors, gap=8)
           for majors in ("KK", "KM", "MK", "MM") for dtype in (BF16, F16)},
        "few rows": matmul(3, 200, 264), "few rows f32": matmul(2, 90, 136, F32, "KM", batch=(3,)),
        "f32": matmul(70, 90, 136, F32), "columns": matmul(70, 90, 136, out_major="M", out=F32),
        "batch": matmul(40, 48, 96, F16, batch=(2, 3), epilogue=placed.cast(F16)),
        "gate and up": specs.gate_up(33, 64, 96), "lower": matmul(70, 96, 64, epilogue=lower.cast(BF16)),
        "residual": matmul(70, 96, 64, epilogue=residual), "e4m3": matmul(70, 96, 160, E4M3),
        "e5m2": matmul(20, 96, 160, E5M2), "to e4m3": matmul(70, 96, 64, out=E4M3, epilogue=narrow),
        "int8": matmul(70, 96, 160, S8), "uint8 clamped": matmul(5, 96, 64, U8, epilogue=clamped),
        "symbolic": replace(matmul(70, 90, 136), symbolic=True)}


def scaled() -> dict[str, GemmSpec]:
    """Matmuls with scales of groups."""
    return {"e4m3": specs.blocks(70, 144, 336), "e4m3 few rows": specs.blocks(3, 200, 256)}


def norms() -> dict[str, Any]:
    """Rows."""
    return {"rms": specs.rms(7, 77, F16), "rms long": specs.rms(2, 5000), "layer": specs.layer(5, 300),
            "layer f32": specs.layer(3, 129, F32), "softmax": specs.softmax(3, 100, F32),
            "softmax bf16": specs.softmax(9, 1030), "argmax": specs.argmax(4, 320),
            "counted": specs.int_rows(20, 100), "to e4m3": specs.codes(6, 256),
            "to e4m3 of groups": specs.codes(6, 384, 128), "elements": specs.elements(6, 200),
            "beside": gate_gradient(5, 72, BF16, "silu"),
            "beside f32": gate_gradient(3, 77, F32, "gelu"), "gated": apply_gate(6, 40, F16, "gelu_tanh"),
            "symbolic": specs.rms(12, 64, F32, symbolic=True)}


def column_sums() -> dict[str, Any]:
    """Gradients of weights and biases: one group of rows, several, columns beside a whole vector."""
    return {"norm": specs.norm_weight(70, 96), "norm f32": specs.norm_weight(5, 300, F32),
            "norm, groups": specs.norm_weight(330, 520, F16), "bias": specs.bias_sum(200, 77),
            "bias f32": specs.bias_sum(33, 1100, F32)}


def attentions() -> dict[str, Any]:
    """Attentions: bands, scores, layouts, ragged batches, dropout, scales; and their gradients."""
    two, small = {"heads": 2, "batch": 2}, {"heads": 1, "batch": 1}
    slopes = {"score": specs.alibi(32)}
    begins = specs.pack_sequences(attention(40, 50, bshd=True, band=CAUSAL), (80, 100))
    forward = {
        "causal": attention(70, 90, band=CAUSAL, group=2, lse=True, bshd=True, start=20, **small),
        "window": attention(70, 90, 128, F16, band=Band(-20, 3), lse=True, start=60, **small),
        "one row": attention(1, 130, 96, group=4, **small), "wide values": attention(33, 50, 64, d_v=128),
        "soft-cap": attention(40, 50, 32, F16, score=specs.soft_cap(32)),
        "slopes": attention(40, 50, 32, start=9, **slopes, **two),
        "bias": attention(40, 50, 32, score=specs.mask_and_bias(40, 50, 32)),
        "f32": attention(40, 50, 32, F32),
        "dropout": attention(40, 50, 32, kept=200, lse=True), "ragged": begins,
        "ragged dropout": replace(begins, kept=100),
        "sinks": attention(40, 50, 32, band=CAUSAL, group=2, lse=True, sinks=(0, 2, 1)),
        "ragged sinks": replace(begins, sinks=(0, begins.batch[2], 1)),
        "e4m3": specs.with_fp8_scales(attention(70, 130, 64, band=CAUSAL, **small), 32),
        "e4m3 by head": specs.with_fp8_scales(attention(70, 130, 128, **small), 0),
        "symbolic": attention(70, 90, symbolic=("s_q", "s_kv", "start"), band=CAUSAL, **small)}
    gradients = {
        "causal": backward(70, 90, band=CAUSAL, **small),
        "ordered": backward(70, 90, band=CAUSAL, group=2, deterministic=True, **small),
        "turned": backward(40, 60, 64, F16, bshd=True, heads=1, group=3, band=Band(-20, 3), start=20),
        "soft-cap": backward(40, 60, 64, F16, score=specs.soft_cap()),
        "slopes": backward(40, 50, 32, start=9, **slopes, **two),
        "bias": backward(40, 50, 32, score=specs.mask_and_bias(40, 50, 32)), "f32": backward(40, 50, 32, F32),
        "dropout": backward(40, 50, 32, kept=120), "wide values": backward(33, 50, 64, d_v=128, out=F32)}
    return forward | {f"gradient, {name}": spec for name, spec in gradients.items()}


FAMILIES = {"gemm": gemms(), "scaled_gemm": scaled(), "norm": norms(), "column_sum": column_sums(),
            "attention": attentions()}
SPECS = {f"{family}: {name}": spec for family, of in FAMILIES.items() for name, spec in of.items()}


def schedules(spec: Any, target: GPU | CPU) -> Iterator[Schedule]:
    """The first legal candidate of each template."""
    for template in TABLE.templates(target.kind, spec):
        legal = (s for s in template.candidates(spec, target) if not template.problems(spec, s, target))
        yield from (s for s, _ in zip(legal, range(1), strict=False))


CASES = [pytest.param(name, target, schedule, id=f"{name}, {schedule.template}, {target.arch}")
         for name, spec in SPECS.items() for target in (*TARGETS, *[AMX] * isinstance(spec, GemmSpec))
         if target != ADA or re.search("e4m3|e5m2", name)
         for schedule in schedules(spec, target)]


def integers(spec: Any) -> list[int]:
    """Of a symbolic spec, the most there can be."""
    if not getattr(spec, "symbolic", ()): return []
    return [spec.m] if spec.symbolic is True else [getattr(spec, name) for name in spec.symbolic]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "target", "schedule"), CASES)
def test_numbers(name: str, target: GPU | CPU, schedule: Schedule):
    spec = SPECS[name]
    given = storages(spec, seed=len(name))
    if "ragged" in name:  # 13 and 40 rows, 50 and 30 keys, and rows of no sequence
        for which, ends in (("q", (0, 13, 53)), ("k", (0, 50, 80))):
            given[f"cu_{which}"].copy_(torch.tensor(ends))
    got = run(spec, schedule, target, given, 0, integers(spec))
    cut = 0.0 if isinstance(spec, NormSpec) else FINE
    if isinstance(spec, GemmSpec): cut = CUT.get(spec.a.dtype, FINE) if target.kind == "gpu" else 0.0
    right(spec, given, got, cut=cut)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "target", "schedule"), [
    each for each in CASES if str(each.id).startswith("gemm") and SPECS[str(each.values[0])].plain])
def test_whole_numbers_are_exact(name: str, target: GPU | CPU, schedule: Schedule):
    """Sums of products of them are, in any order."""
    spec = SPECS[name]
    given = storages(spec, integers=True)
    same(spec, given, run(spec, schedule, target, given, 1, integers(spec)))


def test_every_template_is_asked():
    asked = {(target.kind, schedule.template) for _, target, schedule in (each.values for each in CASES)}
    assert asked == {(kind, template.name) for kind in ("gpu", "cpu") for family in TABLE.families(kind)
                     if family.name in FAMILIES for template in family.templates}
