"""Every template of decode attention, appends, embeddings, sampling and mixtures of experts computes what its
spec's reference says, as test_references.py: in two orders of warps, with indices that kernels may get."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tinygrad.dtype import dtypes

from bench.lib import specs
from bench.lib.specs import BF16, E4M3, E5M2, F16, F32, S8, S32, append, decode
from tests.emu.tile.test_references import HERE, schedules
from tests.support.tile.reference_case import GUARD, Given, answer, right, run, same, storages
from tinygrad_nv.cpu.isa import AVX2, PORTABLE, why_not
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import MXFP4, Q4_0, Q4_K, UINT4, Layout, QType, per_group_scale
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec, Tokens
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import (
    GroupedGemmSpec,
    MixedGroupedSpec,
    ScaledGroupedGemmSpec,
    TransposedGroupedSpec,
)
from tinygrad_nv.tile.kv_append.spec import AppendSpec
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec, LoraSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.router.spec import GroupRowsSpec, Policy, RouterSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.usefixtures("in_order")
LEVELS = [replace(HERE, isa=isa) for isa in (PORTABLE, AVX2) if not why_not(isa.level)]
TARGETS = GPU("sm_80", 108), GPU("sm_90a", 132), HERE, *LEVELS
FAMILIES = ("rope", "decode", "kv_append", "embedding", "sampling", "router", "grouped_gemm", "quant_grouped",
            "lora")


def caches() -> dict[str, DecodeSpec]:
    """Decode attentions: kinds of caches, lengths, scores."""
    bias = Load(0, F32, 300, 1, (600, 0, 0)) + Load(1, BF16, 0, 0, (8, 4, 1)).cast(F32)
    apart = {"table": False, "pages": 1}
    return {
        "pages": decode(3, group=3, d=64, pages=9),
        "window": decode(3, 1, 3, 3, 96, 8, 11, F16, window=20, score=specs.soft_cap(96)),
        "8 rows": decode(2, 1, 8, 8, 32, pages=5),
        "slopes": decode(3, 2, 3, 2, 64, 32, 3, score=specs.alibi()),
        "e4m3": decode(3, 2, 2, 1, 64, 32, 3, kv=E4M3), "e5m2": decode(2, 1, 2, 1, 32, 32, 3, kv=E5M2),
        "sinks, chunks": decode(2, 1, 3, 2, 32, pages=5, window=20, chunked=True, sinks=True),
        "int8": decode(3, 2, 2, 2, 64, 16, 5, F16, S8, causal=False),
        "f32": decode(2, 1, 3, 2, 20, 8, 9, F32),
        "latents": specs.latent(2, 8, 2, 64, 16, pages=3),
        "latents of 128": specs.latent(2, 16, 1, 128, 64, pages=3),
        "wide latents": specs.latent(2, 20, 2, 288, 16, pages=3),
        "several splits": decode(1, 1, 2, 1, 64, 1100, length="argument", **apart),
        "bias": decode(2, 2, 2, 2, 32, 300, length="most", score=Sum() * 0.1 + bias, **apart)}


def appends() -> dict[str, AppendSpec]:
    """Appends: rotations, kinds of pages, caches."""
    exact: dict[str, Any] = {"rounded": True, "new": 3}
    few = {"stored": 15, "pages": 3}
    made = {
        "bf16": append(new=5), "f16 interleaved": append(F16, interleaved=True, new=2, angles=F16),
        "to e4m3": append(BF16, E4M3, angles=BF16, **exact), "to e5m2": append(F32, E5M2, half=0, q_heads=0),
        "to int8": append(F32, S8, half=12, **exact),
        "copies": append(F32, BF16, 0, 0, new=7), "f32": append(F32, half=16, q_heads=3, **exact),
        "rounded": append(F16, angles=F16, interleaved=True, **exact)}
    there = {name: replace(spec, **few) for name, spec in made.items()}
    wide = replace(append(BF16, angles=BF16, half=8, q_heads=0, **exact), d_v=24, **few)
    return there | {"contiguous": replace(append(BF16, angles=BF16, table=False, **exact), page_size=40),
                    "values of another width": wide,
                    "keys alone": replace(there["f16 interleaved"], d_v=0, v=None, v_pages=None)}


def ropes() -> dict[str, RopeSpec]:
    """Rotations of whole sequences: parts of heads, angles of each sequence, and back."""
    own = Angles(F32, 16, 5 * 16, 3)
    return {"bf16": RopeSpec(2, 5, 3, 1, 32, 16, BF16, Angles(BF16, 16)),
            "f32": RopeSpec(1, 7, 2, 2, 14, 7, F32, Angles(F32, 9, 0, 1)),
            "in part": RopeSpec(2, 3, 2, 1, 40, 12, F16, Angles(F32, 12)),
            "gradient": RopeGradientSpec(2, 5, 3, 1, 32, 16, BF16, own),
            "gradient, q of float32": RopeGradientSpec(2, 5, 3, 1, 32, 16, BF16, own, wide_q=True),
            "gradient f16, q of float32": RopeGradientSpec(1, 7, 2, 1, 14, 7, F16, Angles(F32, 9, 0, 1),
                                                           wide_q=True),
            "gradient f32": RopeGradientSpec(2, 5, 2, 2, 32, 16, F32, Angles(F32, 16)),
            "gradient in part": RopeGradientSpec(2, 3, 2, 1, 24, 8, F32, Angles(F32, 8))}


def tables() -> dict[str, EmbeddingSpec]:
    """Rows of tables, and their gradients."""
    some, long = Tokens(S32, (3, 5), (2, 7), 1), Tokens(dtypes.int64, (30,), (2,), 3)
    return {"bf16": EmbeddingSpec(20, 33, BF16, some), "f32 odd": EmbeddingSpec(11, 301, F32, long),
            "f16": EmbeddingSpec(40, 2056, F16, some), "gradient": EmbeddingGradientSpec(9, 37, BF16, some),
            "gradient f32": EmbeddingGradientSpec(7, 100, F32, long)}


def samplers() -> dict[str, Any]:
    """Filters, choices and counts."""
    return {"top-k": FilterSpec(4, 300, Number.top_k, counted=True),
            "top-p": FilterSpec(4, 515, Number.top_p), "draw": ChoiceSpec(5, 700),
            "draw of few": ChoiceSpec(40, 3), "draw in pieces": ChoiceSpec(1, 20000),
            "largest": ChoiceSpec(4, 130, draw=False), "count": CountSpec(70, 90, 3)}


def routers() -> dict[str, RouterSpec | GroupRowsSpec]:
    """Scores, groups, biases; orders of experts that are given."""
    return {"softmax": RouterSpec(7, 20, Policy(3, renormalize=True), BF16),
            "groups": RouterSpec(5, 24, Policy(4, "sigmoid", True, 2.5, 4, 2), F32, biased=True),
            "largest of groups": RouterSpec(5, 24, Policy(3, "softmax", False, 1., 6, 2, "max"), F16),
            "chosen": RouterSpec(1, 33, Policy(8, "chosen")),
            "each chosen": RouterSpec(3, 5, Policy(1, "chosen_sigmoid"), biased=True),
            "given": GroupRowsSpec(9, 3, 5)}


def grouped() -> dict[str, GroupedGemmSpec | GroupedOuterSpec]:
    """Grouped matmuls: places of rows, activations; sums of outer products."""
    return {"in order": GroupedGemmSpec(3, 30, 20, 40, BF16),
            "gate and up": GroupedGemmSpec(5, 36, 42, 33, F16, 12, gather=3, activation="silu", biased=True),
            "down": GroupedGemmSpec(4, 26, 35, 64, F32, scatter=True, weighted=True),
            "gelu": GroupedGemmSpec(2, 20, 36, 31, F32, activation="gelu"),
            "gelu_tanh": GroupedGemmSpec(2, 20, 32, 32, BF16, activation="gelu_tanh"),
            "mixed": MixedGroupedSpec(3, 30, 28, 40, F32, 15, gather=2, half=BF16),
            "clamped": GroupedGemmSpec(2, 20, 36, 70, BF16, activation="swiglu_clamped", biased=True),
            "gathered": GroupedGemmSpec(3, 40, 64, 72, BF16, 20, gather=2, activation="silu", biased=True),
            "8 bits": ScaledGroupedGemmSpec(3, 40, 48, 272, scatter=True, weighted=True),
            "transposed": TransposedGroupedSpec(3, 30, 28, 40, F16, 10, gather=3, scatter=True),
            "transposed, aligned": TransposedGroupedSpec(3, 30, 32, 40, BF16),
            "outer, aligned": GroupedOuterSpec(4, 40, 64, 64, BF16),
            "outer": GroupedOuterSpec(4, 26, 35, 50, F32), "outer, of slots": GroupedOuterSpec(
                3, 24, 20, 28, BF16, 24, 8, 1, 3)}


def quantised() -> dict[str, QuantGroupedSpec]:
    """Grouped matmuls with matrices in tiles, and in fragments: scales, minima, codes of floats, orders of
    columns."""
    def of(type: QType, one: GroupedGemmSpec, int8: bool = False,
           layout: Layout = "tiles") -> QuantGroupedSpec:
        return QuantGroupedSpec(one, replace(type, layout=layout), int8)
    down = GroupedGemmSpec(4, 30, 35, 128, F32, scatter=True, weighted=True)
    both = GroupedGemmSpec(3, 36, 40, 256, BF16, 12, gather=3, activation="silu", biased=True)
    return {"q4_0": of(Q4_0, down, True), "q4_k": of(Q4_K, both, True), "mxfp4": of(MXFP4, down),
            "mxfp4 in fragments": of(MXFP4, both, layout="fragments"),
            "more columns": of(MXFP4, replace(both, n=512, k=256), layout="fragments"),
            "zeros": of(QType(UINT4, per_group_scale(32, F16), zeros=True, permuted=True), both)}


def adapters() -> dict[str, LoraSpec]:
    """Shrink and expand of adapters: dtypes, ranks, segments."""
    return {"shrink": LoraShrinkSpec(3, 30, 11, F32, F32, 45, 2),
            "shrink 16 bits": LoraShrinkSpec(3, 20, 4, BF16, BF16, 72, 3),
            "expand": LoraExpandSpec(3, 30, 8, BF16, BF16, (64, 32, 32)),
            "expand, odd": LoraExpandSpec(4, 26, 11, F16, F16, (48, 37)),
            "expand, one": LoraExpandSpec(2, 40, 64, BF16, BF16, (100,)),
            "expand of 16 bits": LoraExpandSpec(3, 20, 5, F32, BF16, (33, 64))}


SPECS = {f"{family}: {name}": spec
         for family, of in zip(FAMILIES, (ropes(), caches(), appends(), tables(), samplers(), routers(),
                                                 grouped(), quantised(), adapters()), strict=True)
         for name, spec in of.items()}
CASES = [pytest.param(name, target, schedule, id=f"{name}, {schedule.template}, {target.arch}",
                      marks=[pytest.mark.slow] * ("e5m2" in name))
         for name, spec in SPECS.items() for target in TARGETS for schedule in schedules(spec, target)]


def prepared(spec: Any, integers: bool = False) -> Given:
    """Storages: slots and entries of a table are different ones, scales not 0, masses positive."""
    made, random = storages(spec, integers=integers), torch.Generator().manual_seed(1)
    if isinstance(spec, CountSpec):
        made["slots"].copy_(torch.randperm(spec.slots + 2, generator=random)[:spec.rows] - 1)
    if isinstance(spec, AppendSpec) and spec.table:
        made["table"].copy_(torch.randperm(spec.stored + 2, generator=random)[:spec.batch * spec.pages] - 1)
    for name in (each for each in made if each.startswith("scale") and made[each].is_floating_point()):
        made[name].mul_(0.02).add_(0.01)
    if isinstance(spec, QuantGroupedSpec):
        if spec.type.scale.e8m0: made["scales"].add_(124)
        for row in made["columns"].view(-1, spec.grouped.k) if "columns" in made else ():
            row.copy_(torch.randperm(spec.grouped.k, generator=random))
        spec = spec.grouped
    if isinstance(spec, GroupedGemmSpec | GroupedOuterSpec):
        ends = torch.randint(spec.rows // 2, spec.rows + 1, (spec.groups - 1,), generator=random)
        made["offsets"].copy_(torch.tensor([0, *ends.sort().values, spec.rows]))
        if spec.has_order: made["order"].copy_(torch.randperm(spec.rows, generator=random))
    if isinstance(spec, LoraSpec):
        ends = torch.randint(1, spec.rows, (spec.adapters,), generator=random)
        made["offsets"].copy_(torch.tensor([0, *ends.sort().values, spec.rows]))
        made["order"].copy_(torch.randperm(spec.rows, generator=random))
    if isinstance(spec, FilterSpec | ChoiceSpec) and "numbers" in made: numbered(spec, made, random)
    return made


def numbered(spec: FilterSpec | ChoiceSpec, made: Given, random: torch.Generator) -> None:
    """Targets, some of which are not reached; temperatures, seeds, tokens left out."""
    numbers = made["numbers"].view(spec.rows, -1)
    if isinstance(spec, ChoiceSpec):
        numbers[:, Number.temperature] = torch.arange(1, spec.rows + 1) % 3
        numbers[:, Number.seed:] = torch.randint(1 << 16, (spec.rows, 4), generator=random)
        made["logits"].view(spec.rows, -1)[:, 1] = -torch.inf
        return
    if not spec.counted: made["weights"].copy_(made["logits"].view(spec.rows, -1).softmax(-1).flatten())
    numbers[:, spec.number] = torch.tensor([5, 77, 1000, torch.inf]) if spec.counted else \
        torch.tensor([0.1, 0.9, 0.999999, torch.inf])


def runs(schedule: Schedule, target: GPU | CPU) -> list[tuple[Schedule, int]]:
    """Schedules and seeds: two orders of warps, or in one part or three."""
    if target.kind == "gpu": return [(schedule, seed) for seed in (0, 1)]
    return [(replace(schedule, parts=1 if target == HERE else 3), 0)]


def is_exact(spec: Any) -> bool:
    """Whether sums have one order, and products are rounded before they are added."""
    if isinstance(spec, AppendSpec): return spec.rope is None or spec.rope.rounded
    grouped = GroupedGemmSpec | GroupedOuterSpec | QuantGroupedSpec | LoraSpec
    return not isinstance(spec, DecodeSpec | RopeSpec | RouterSpec | grouped)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "target", "schedule"), CASES)
def test_numbers(name: str, target: GPU | CPU, schedule: Schedule):
    spec = SPECS[name]
    given, integers, asked = prepared(spec), [], spec
    if isinstance(spec, DecodeSpec) and spec.length == "argument":
        asked, integers = replace(spec, length="memory"), [1013]
        given["lengths"] = torch.tensor(integers * spec.batch, dtype=torch.int32)
    for one, seed in runs(schedule, target):
        got = run(spec, one, target, given, seed, integers)
        if is_exact(spec): same(asked, given, got)
        else: right(asked, given, got)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "target", "schedule"), [
    each for each in CASES if isinstance(spec := SPECS[str(each.values[0])], AppendSpec)
    and not is_exact(spec)])
def test_rotations_by_whole_numbers_are_exact(name: str, target: GPU | CPU, schedule: Schedule):
    spec = SPECS[name]
    given = prepared(spec, integers=True)
    same(spec, given, run(spec, schedule, target, given))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_fewer_tokens(target: GPU | CPU):
    spec = EmbeddingSpec(20, 33, F16, Tokens(S32, (12,), (3,), 2), symbolic=True)
    given, few = prepared(spec), replace(spec, tokens=Tokens(S32, (7,), (3,), 2))
    for schedule, seed in (each for s in schedules(spec, target) for each in runs(s, target)):
        out = run(spec, schedule, target, given, seed, [7])["out"]
        same(few, given, {"out": out[:7]})
        assert (out[7:] == GUARD).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if isinstance(spec, ChoiceSpec)])
def test_draws_are_those_of_exact_noise(name: str):
    given = prepared(SPECS[name])
    assert torch.equal(answer(SPECS[name], given, exact=True)["out"], answer(SPECS[name], given)["out"])


def test_every_template_is_asked():
    asked = {(target.kind, schedule.template) for _, target, schedule in (each.values for each in CASES)}
    assert asked == {(kind, template.name) for kind in ("gpu", "cpu") for family in TABLE.families(kind)
                     if family.name in FAMILIES for template in family.templates}
