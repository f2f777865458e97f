"""Cases that timing/gates.py watches: of each template of GPUs, specs at the sizes of models, with its
default schedule. `cases()` has them by name; those whose name ends with "*" are left out of the default run
of the tests, which is to take less than a minute of one core."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from bench.lib.specs import (
    BF16,
    E4M3,
    F32,
    QTYPES,
    S8,
    append,
    argmax,
    attention,
    backward,
    bias_sum,
    blocks,
    codes,
    decode,
    elements,
    gate_up,
    latent,
    layer,
    matmul,
    norm_weight,
    quant_matmul,
    rms,
    softmax,
    sparse,
    with_fp8_scales,
)
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.causal_conv.spec import CausalConvSpec
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec, Tokens
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.linear_attention.spec import Heads, LinearAttentionSpec
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec
from tinygrad_nv.tile.norm.spec import gate_gradient
from tinygrad_nv.tile.optimizer.spec import AdamWSpec, SquaresSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.router.spec import Policy, RouterSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.selective_scan.spec import Rows, SelectiveScanSpec
from tinygrad_nv.tile.template import GPU, AnyTemplate
from tinygrad_nv.tile.templates import TABLE

GPU_NAME, HOPPER = "h100", GPU("sm_90a", 132)
ADA = "l40s", GPU("sm_89", 142)
OTHERS = {"scaled_mma": ADA}    # GPUs of templates that an H100 has not
CAUSAL, WINDOW = Band(None, 0), Band(-1023, 0)
HEADS: dict[str, Any] = {"batch": 2, "heads": 4, "group": 4}


def expert_rows(groups: int, tokens: int, rows: int, n: int, k: int, activation: str = "") -> GroupedGemmSpec:
    """Rows of tokens by the first matrices of experts; without tokens in order, weighted and scattered."""
    if tokens: return GroupedGemmSpec(groups, rows, n, k, BF16, tokens, rows // tokens, activation=activation)
    return GroupedGemmSpec(groups, rows, n, k, BF16, scatter=True, weighted=True)


def table_gradient(rows: int, width: int, tokens: int, dtype: DType = BF16) -> EmbeddingGradientSpec:
    """The gradient of a table, of tokens that lie side by side."""
    return EmbeddingGradientSpec(rows, width, dtype, Tokens(dtypes.int32, (tokens,), (1,)))


def transpose(spec: GroupedGemmSpec) -> TransposedGroupedSpec:
    """Returns the case for matrices (K, N)."""
    return TransposedGroupedSpec(**{each.name: getattr(spec, each.name) for each in fields(spec)})


def recurrent(tokens: int, sequences: int, delta: bool) -> LinearAttentionSpec:
    """Linear attention of Qwen3-Next's heads with the delta rule, of Nemotron 3's Mamba-2 without."""
    heads, shared, d_k, d_v = (32, 16, 128, 128) if delta else (64, 8, 128, 64)
    width = 2 * shared * d_k + heads * d_v
    own = [Heads(BF16, width, d, at) for d, at in ((d_k, 0), (d_k, shared * d_k), (d_v, 2 * shared * d_k))]
    return LinearAttentionSpec(tokens, sequences, heads, shared, d_k, d_v, 2 * sequences, own[0], own[1],
                               own[2], d_k ** -0.5, delta, single=tokens == sequences)


def selective(tokens: int, sequences: int) -> SelectiveScanSpec:
    """The scan of a Mamba-1 of 8192 channels and states of 16."""
    x, b, c = Rows(BF16, 8192), Rows(BF16, 288, 256), Rows(BF16, 288, 272)
    return SelectiveScanSpec(tokens, sequences, 8192, 16, 2 * sequences, x, b, c, tokens == sequences)


def experts_of(type: str, grouped: GroupedGemmSpec) -> QuantGroupedSpec:
    """The same with matrices of a type."""
    return QuantGroupedSpec(grouped, replace(QTYPES[type], layout="fragments"))


SPECS: dict[str, dict[str, Any]] = {
    "wgmma": {
        "bf16": matmul(4096, 4096, 4096), "16 rows": matmul(16, 4096, 4096),
        "e4m3": matmul(4096, 4096, 4096, E4M3), "x @ w *": matmul(4096, 4096, 4096, majors="KM"),
        "int8 *": matmul(2048, 4096, 4096, S8), "tf32 *": matmul(2048, 2048, 2048, F32),
        "gate and up *": gate_up(2048, 8192, 4096), "long K *": matmul(256, 256, 16384),
        "8192 *": matmul(8192, 8192, 8192)},
    "scaled_wgmma": {
        "4096": blocks(4096, 4096, 4096), "16 rows *": blocks(16, 7168, 2048),
        "7168 x 16384 *": blocks(4096, 7168, 16384)},
    "scaled_mma": {"1024": blocks(1024, 4096, 2048), "16 rows *": blocks(16, 7168, 2048),
                   "300 rows *": blocks(300, 7168, 2048)},
    "mma": {"bf16": matmul(1024, 2048, 1024), "f32 out, odd *": matmul(1001, 1331, 750, out=F32)},
    "gemv": {"1 row": matmul(1, 4096, 14336), "8 rows *": matmul(8, 14336, 4096),
             "vocabulary *": matmul(1, 128256, 4096)},
    "quant_gemv": {"int4": quant_matmul(QTYPES["int4"], 1, 8192, 8192),
                   "8 rows *": quant_matmul(QTYPES["int4"], 8, 8192, 8192),
                   "q4_K *": quant_matmul(QTYPES["q4_K"], 1, 8192, 8192),
                   "int8 *": quant_matmul(QTYPES["int8"], 1, 8192, 8192)},
    "quant_wgmma": {"int4": quant_matmul(QTYPES["int4"], 2048, 4096, 4096),
                    "16 rows *": quant_matmul(QTYPES["int4"], 16, 8192, 8192),
                    "int8 *": quant_matmul(QTYPES["int8"], 2048, 4096, 4096),
                    "q4_K *": quant_matmul(QTYPES["q4_K"], 2048, 4096, 4096)},
    "sparse_wgmma": {"bf16": sparse(4096, 4096, 4096), "16 rows *": sparse(16, 8192, 8192),
                     "e4m3 *": sparse(4096, 4096, 4096, E4M3)},
    "sparse_mma": {"bf16": sparse(256, 2048, 2048)},
    "quant_mma": {"int4": quant_matmul(QTYPES["int4"], 256, 2048, 2048)},
    "flash_wgmma": {
        "causal d 128": attention(4096, 4096, 128, band=CAUSAL, **HEADS),
        "e4m3 d 128": with_fp8_scales(attention(4096, 4096, 128, **HEADS), 128),
        "d 128 *": attention(8192, 8192, 128, **HEADS), "d 64 *": attention(4096, 4096, 64, **HEADS),
        "d 256 *": attention(4096, 4096, 256, band=CAUSAL, **HEADS),
        "window d 128 *": attention(8192, 8192, 128, band=WINDOW, **HEADS)},
    "flash_mma": {"causal d 128": attention(1024, 1024, 128, band=CAUSAL, **HEADS)},
    "flash_fma": {"f32 d 64": attention(512, 512, 64, F32, batch=1, heads=8)},
    "flash_backward_wgmma": {
        "d 128": backward(2048, 2048, 128, **HEADS),
        "causal d 64 *": backward(4096, 4096, 64, band=CAUSAL, **HEADS)},
    "flash_backward_mma": {"d 64": backward(512, 512, 64, **HEADS)},
    "decode": {
        "4096 tokens": decode(batch=16, heads=8, pages=256), "e4m3 *": decode(16, 8, pages=256, kv=E4M3),
        "4 rows *": decode(16, 8, s_q=4, pages=256)},
    "latent_wgmma": {"16 heads": latent(4, 16, pages=64), "128 heads *": latent(16, 128, pages=256)},
    "norm": {
        "rms": rms(4096, 4096), "layer *": layer(4096, 4096), "softmax *": softmax(4096, 4096),
        "argmax *": argmax(16, 128256), "silu(gate) up *": elements(4096, 14336),
        "codes of groups *": codes(4096, 4096, 128), "codes of rows *": codes(4096, 4096),
        "gradient of silu(gate) up": gate_gradient(4096, 14336, BF16, "silu")},
    "column_sum": {"weight of a norm": norm_weight(4096, 4096), "bias *": bias_sum(8192, 14336)},
    "kv_append": {"bf16": append()},
    "embedding": {"bf16": EmbeddingSpec(128256, 4096, BF16, Tokens(dtypes.int32, (4, 1024), (1024, 1)))},
    "embedding_gradient": {
        "50304x768": table_gradient(50304, 768, 16384),
        "128256x4096 *": table_gradient(128256, 4096, 8192), "f32 *": table_gradient(50257, 768, 16384, F32)},
    "threshold": {"top-p *": FilterSpec(16, 128256, Number.top_p),
                  "top-p of 32000": FilterSpec(16, 32000, Number.top_p)},
    "counted_threshold": {"top-k": FilterSpec(16, 32000, Number.top_k, counted=True)},
    "choice": {"draw": ChoiceSpec(16, 32000)}, "count": {"16 tokens": CountSpec(16, 16, 32000)},
    "router": {"8 of 128": RouterSpec(16, 128, Policy(8, renormalize=True), BF16),
               "4096 tokens *": RouterSpec(4096, 128, Policy(8, renormalize=True), BF16),
               "groups *": RouterSpec(16, 256, Policy(8, "sigmoid", True, 2.5, 8, 4), F32, biased=True)},
    "grouped_gemv": {"x Aᵀ of 8 adapters": LoraShrinkSpec(8, 8, 16, BF16, BF16, 4096, 3).grouped_gemm,
                     "gate and up": expert_rows(8, 1, 8, 4096, 1024, activation="silu"),
                     "8 rows a group *": expert_rows(8, 8, 64, 2048, 4096)},
    "grouped_wgmma": {"gate and up": expert_rows(4, 256, 512, 2048, 1024, activation="silu")},
    "grouped_scaled_wgmma": {"down": ScaledGroupedGemmSpec(4, 512, 1024, 1024, scatter=True, weighted=True)},
    "grouped_mma": {"down": expert_rows(4, 0, 512, 1024, 1024)},
    "grouped_transposed_wgmma": {"gradient of rows": transpose(expert_rows(4, 0, 512, 1024, 2048))},
    "grouped_transposed_mma": {"gradient of rows": transpose(expert_rows(4, 0, 512, 1024, 1024))},
    "grouped_outer_wgmma": {
        "gate and up": GroupedOuterSpec(4, 1024, 1024, 1024, BF16, x_rows=256, gather_x=4),
        "rows in order *": GroupedOuterSpec(8, 8192, 2048, 1024, BF16)},
    "grouped_outer_mma": {
        "gate and up": GroupedOuterSpec(4, 1024, 1024, 1024, BF16, x_rows=256, gather_x=4),
        "down *": GroupedOuterSpec(8, 8192, 2048, 1024, BF16, gather_y=1)},
    "lora_expand_mma": {"q|k|v of 8 adapters": LoraExpandSpec(8, 64, 16, BF16, BF16, (4096, 1024, 1024)),
                        "gate|up of 512 tokens *": LoraExpandSpec(8, 512, 16, BF16, BF16, (14336, 14336))},
    "quant_grouped_gemv": {
        "gate and up": experts_of("mxfp4", expert_rows(8, 1, 4, 5760, 2880, "swiglu_clamped")),
        "4 rows a group, int4 *": experts_of("int4", expert_rows(8, 8, 32, 4096, 2048))},
    "quant_grouped_wgmma": {
        "down": experts_of("mxfp4", expert_rows(4, 0, 512, 1024, 1024)),
        "gate and up, int4 *": experts_of("int4", expert_rows(8, 512, 1024, 4096, 2048, "silu"))},
    "quant_grouped_mma": {"gate and up": experts_of("mxfp4", expert_rows(4, 64, 128, 2048, 1024, "silu"))},
    "cross_entropy": {"rows of 8192": CrossEntropySpec(132, 8192, BF16, gradient=BF16, in_place=True)},
    "distillation": {"rows of 8192": DistillationSpec(132, 8192, BF16, gradient=BF16, teacher=BF16)},
    "rope": {"q|k|v": RopeSpec(4, 1024, 32, 8, 128, 64, BF16, Angles(BF16, 64))},
    "rope_gradient": {
        "q|k|v": RopeGradientSpec(4, 1024, 32, 8, 128, 64, BF16, Angles(BF16, 64)),
        "q of float32": RopeGradientSpec(4, 1024, 32, 8, 128, 64, BF16, Angles(BF16, 64), wide_q=True)},
    "linear_attention": {
        "delta rule, 32 decodes": recurrent(32, 32, True), "delta rule, 512 tokens": recurrent(512, 1, True),
        "Mamba-2, 32 decodes *": recurrent(32, 32, False), "Mamba-2, 512 tokens *": recurrent(512, 1, False)},
    "causal_conv": {"32 decodes": CausalConvSpec(32, 32, 8192, 4, 64, BF16, 8192, silu=True, single=True),
                    "512 tokens *": CausalConvSpec(512, 1, 8192, 4, 64, BF16, 8192, silu=True)},
    "selective_scan": {"64 decodes": selective(64, 64), "512 tokens *": selective(512, 1)},
    "group_norm": {"64x64x320": GroupNormSpec(2, 4096, 320, 32, 1e-5, True, BF16, BF16)},
    "conv_wgmma": {"32x32x320": ConvSpec(2, 32, 32, 320, 320, (3, 3), (1, 1), (1, 1, 1, 1), BF16)},
    "conv_mma": {"32x32x320": ConvSpec(2, 32, 32, 320, 320, (3, 3), (1, 1), (1, 1, 1, 1), BF16)},
    "adamw_update": {"float32": AdamWSpec((1 << 20,), (0,), 0.9, 0.95, 1e-8)},
    "squared_sums": {"float32": SquaresSpec((1 << 20,))}}


def contents(spec: Any) -> dict[str, Any]:
    """Returns inputs where zeros would spare the kernel its work: a step that is taken."""
    return {"control": np.ones(spec.control, np.float32)} if isinstance(spec, AdamWSpec) else {}


@dataclass(frozen=True)
class GateCase:
    """A spec by a template's default schedule, on a GPU with figures. Not `quick`: left out of the default
    run."""
    name: str
    quick: bool
    spec: Any
    schedule: Schedule
    gpu_name: str = GPU_NAME
    target: GPU = HOPPER

    def __str__(self) -> str: return self.name


def cases() -> Iterator[GateCase]:
    """All of them."""
    for template, specs in SPECS.items():
        gpu_name, target = OTHERS.get(template, (GPU_NAME, HOPPER))
        for label, spec in specs.items():
            words = label.removesuffix(" *")
            schedule = default(TABLE.find_template("gpu", template), spec, target)
            yield GateCase(f"{template}: {words}", words == label, spec, schedule, gpu_name, target)


def default(template: AnyTemplate, spec: Any, target: GPU = HOPPER) -> Schedule:
    """Returns the schedule that is chosen without a database of tuned ones, where it is the template's; else
    the first of the template's candidates that is legal, a matmul's by its cost."""
    chosen = analytic(spec, target.arch, target.sm_count) if isinstance(spec, GemmSpec) else \
        TABLE.choose(spec, target)
    if chosen is not None and TABLE.of(chosen) is template: return chosen
    legal = [s for s in template.candidates(spec, target) if not template.problems(spec, s, target)]
    cost = template.cost
    found: Schedule = legal[0] if cost is None else min(legal, key=lambda s: cost(spec, s, target).seconds)
    return found
