"""Specs of every family for emitted_cases.py, of operands that lie densely in memory."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.quant.types import E4M3 as E4M3_CODES
from tinygrad_nv.quant.types import INT8, MXFP4, Q4_K, Q6_K, UINT4, QType, per_channel_scale, per_group_scale
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, Rows, RowScales
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.decode.spec import DecodeSpec, Pages, Scales
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec, Tokens
from tinygrad_nv.tile.expression import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    silu,
    tanh,
    where,
)
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, CountSpec, FilterSpec, Number
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec

F32, F16, BF16, S8, U8, S32 = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint8,
                               dtypes.int32)
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2
BIAS, RESIDUAL = Load(0, BF16, 0, 1), Load(1, BF16, 768, 1)


def matmul(m: int, n: int, k: int, dtype: DType = BF16, majors: str = "KK", out: DType | None = None,
           gap: int = 0, batch: tuple[int, ...] = (), out_major: str = "N", **more: Any) -> GemmSpec:
    """A matmul of operands that lie densely, but for `gap` elements after each row; majors "KK" is x @ w.T,
    "KM" x @ w."""
    def dense(size: int) -> tuple[int, ...]:
        return tuple(size * math.prod(batch[i + 1:]) for i in range(len(batch)))

    def operand(mn: int, major: str) -> Operand:
        inner, outer = (k, mn) if major == "K" else (mn, k)
        strides = (inner + gap, 1) if major == "K" else (1, inner + gap)
        return Operand(dtype, *strides, dense((inner + gap) * outer))
    kind = out or (S32 if dtype in (S8, U8) else F32 if dtype in (E4M3, E5M2) else dtype)
    pitch, rows = (n + gap, m) if out_major == "N" else (m + gap, n)
    result = Result(kind, *((pitch, 1) if out_major == "N" else (1, pitch)), dense(pitch * rows))
    return GemmSpec(m, n, k, operand(m, majors[0]), operand(n, majors[1]), result, batch,
                    tf32=dtype == F32, **more)


def blocks(m: int, n: int, k: int, **more: Any) -> ScaledGemmSpec:
    """e4m3 with scales of 1 x 128 of a and 128 x 128 of b, into bf16."""
    groups, operand = -(-k // GROUP), Operand(E4M3, k, 1)
    return ScaledGemmSpec(m, n, k, operand, operand, Result(BF16, n, 1), a_scale=BlockScales(1, groups),
                          b_scale=BlockScales(GROUP, groups), **more)


QTYPES = {"int4": QType(UINT4, per_group_scale(128, F16), shift=8),
          "int4, zeros": QType(UINT4, per_group_scale(128, F16), zeros=True),
          "int8": INT8 @ per_channel_scale(0, F16), "e4m3": E4M3_CODES @ per_channel_scale(0, F16),
          "mxfp4": MXFP4, "q4_K": Q4_K, "q6_K": Q6_K}


def quant_matmul(type: QType, m: int, n: int, k: int, dtype: DType = BF16, **more: Any) -> QuantGemmSpec:
    """Dense rows times a matrix in fragments."""
    gemm = GemmSpec(m, n, k, Operand(dtype, k, 1), Operand(dtype, k, 1), Result(dtype, n, 1), **more)
    return QuantGemmSpec(gemm, replace(type, layout="fragments"))


def sparse(m: int, n: int, k: int, dtype: DType = BF16) -> SparseGemmSpec:
    """Dense rows times a 2:4 sparse matrix."""
    total = Sum(dtypes.int32 if dtype == S8 else F32).cast(BF16)
    one = Operand(dtype, k, 1)
    return SparseGemmSpec(GemmSpec(m, n, k, one, one, Result(BF16, n, 1), (), total))


def gate_up(m: int, n: int, k: int, dtype: DType = BF16) -> GemmSpec:
    """silu(x @ gate.T) · (x @ up.T) of one weight."""
    ends = (silu(Sum()) * Sum(part=1)).cast(dtype)
    return replace(matmul(m, n, k, dtype), parts=2, part=n * k, epilogue=ends)


def rows(dtype: DType, extents: tuple[int, int, int, int], d: int, bshd: bool = False) -> Rows:
    """Returns the strides of (batch, key heads, group, rows): [batch, heads, rows, d], or [batch, rows,
    heads, d]. A group of 0 has stride 0."""
    _, heads, group, many = extents
    query = max(group, 1)
    row, head, g = (d * heads * query, d * query, d) if bshd else (d, d * many * query, d * many)
    return Rows(dtype, row, (d * many * heads * query, head, g if group else 0))


def attention(s_q: int, s_kv: int, d: int = 64, dtype: DType = BF16, batch: int = 2, heads: int = 2,
              group: int = 1, band: Band = FULL, d_v: int = 0, out: DType | None = None, bshd: bool = False,
              score: Expression | None = None, **more: Any) -> AttentionSpec:
    """An attention of dense operands, scaled by 1/√d where no score is given."""
    d_v, score = d_v or d, score or Sum() * (1 / math.sqrt(d))
    q, o = (rows(kind, (batch, heads, group, s_q), width, bshd)
            for kind, width in ((dtype, d), (out or dtype, d_v)))
    k, v = (rows(dtype, (batch, heads, 0, s_kv), width, bshd) for width in (d, d_v))
    return AttentionSpec(s_q, s_kv, d, d_v, q, k, v, o, (batch, heads, group), score, band, **more)


def pack_sequences(spec: AttentionSpec, total: tuple[int, int]) -> AttentionSpec:
    """Sequences one after the other, of an attention whose operands are [batch, rows, heads, d]."""
    q, k, v, out = (replace(each, batch=(0, *each.batch[1:])) for each in (spec.q, spec.k, spec.v, spec.out))
    return replace(spec, q=q, k=k, v=v, out=out, total=total, lse=True)


def with_fp8_scales(spec: AttentionSpec, block: int) -> AttentionSpec:
    """Returns the spec with operands of e4m3, with a scale for each `block` rows; of 0, for each head."""
    def of(count: int, queries: bool) -> RowScales:
        blocks, (_, heads, group) = -(-count // block) if block else 1, spec.batch
        inner = blocks * (group if queries else 1)
        return RowScales(block or count, 1 if block else 0, (inner * heads, inner, blocks if queries else 0))
    q, k, v = (replace(each, dtype=E4M3) for each in (spec.q, spec.k, spec.v))
    return replace(spec, q=q, k=k, v=v,
                   scales=(of(spec.s_q, True), of(spec.s_kv, False), of(spec.s_kv, False)))


def backward(s_q: int, s_kv: int, d: int = 64, dtype: DType = BF16, deterministic: bool = False,
             out: DType | None = None, bshd: bool = False, d_v: int = 0, **more: Any) -> BackwardSpec:
    """The backward pass of `attention`."""
    one = attention(s_q, s_kv, d, dtype, d_v=d_v, bshd=bshd, lse=True, **more)
    batch, heads, group = one.batch
    dk, dv = (rows(out or dtype, (batch, heads, 0, s_kv), width, bshd) for width in (d, one.d_v))
    return BackwardSpec(one, rows(dtype, (batch, heads, group, s_q), one.d_v, bshd), dk, dv, deterministic)


def decode(batch: int = 4, heads: int = 2, group: int = 4, s_q: int = 1, d: int = 128, page_size: int = 16,
           pages: int = 256, dtype: DType = BF16, kv: DType | None = None, score: Expression | None = None,
           **more: Any) -> DecodeSpec:
    """A decode attention over pages [pages, page_size, heads, d]."""
    kv, score = kv or dtype, score or Sum() * (1 / math.sqrt(d))
    q = rows(dtype, (batch, heads, group, s_q), d, bshd=True)
    keys = Pages(kv, page_size * heads * d, heads * d, d)
    scale = Scales(heads, 1) if kv.itemsize == 1 else None
    return DecodeSpec(batch, heads, group, s_q, d, d, page_size, pages, q, keys, keys, q, scale, scale,
                      score=score, **more)


def latent(batch: int = 4, heads: int = 16, s_q: int = 1, rank: int = 512, rope: int = 64,
           page_size: int = 16, pages: int = 256, dtype: DType = BF16, **more: Any) -> DecodeSpec:
    """An absorbed attention over latents: one key head, whose values are the last elements of its keys."""
    d = rope + rank
    q, out = (rows(dtype, (batch, 1, heads, s_q), width, bshd=True) for width in (d, rank))
    keys = Pages(dtype, page_size * d, d, d)
    return DecodeSpec(batch, 1, heads, s_q, d, rank, page_size, pages, q, keys, replace(keys, offset=rope),
                      out, score=Sum() * (1 / math.sqrt(d)), latent=True, **more)


def append(dtype: DType = BF16, kv: DType | None = None, half: int = 32, q_heads: int = 8, table: bool = True,
           d: int = 64, new: int = 1, angles: DType = F32, **rope: Any) -> AppendSpec:
    """An append of `new` tokens to each of 4 requests."""
    heads, size, kv = 2, 16 if table else 512, kv or dtype
    def lay_out(count: int) -> Heads: return Heads(dtype, new * count * d, count * d, d)
    token, head = (heads * d, d) if table else (d, size * d)
    stored = Pages(kv, size * heads * d, token, head)
    scale = Scales(heads, 1) if kv.itemsize == 1 else None
    return AppendSpec(4, new, heads, d, d, size, 32 if table else 1, 200 if table else 4, lay_out(heads),
                      lay_out(heads), stored, stored, Rope(angles, half, **rope) if half else None,
                      lay_out(q_heads) if q_heads else None, q_heads, scale, scale, table)


def row_norm(m: int, n: int, statistics: tuple[Statistic, ...], value: Expression, one: bool = False,
             **more: Any) -> NormSpec:
    """Dense rows, or one number of each."""
    out = Result(value.dtype, 1, 0) if one else Result(value.dtype, n, 1)
    return NormSpec(m, n, statistics, (Computed(out, value),), **more)


def rms(m: int, n: int, dtype: DType = BF16, **more: Any) -> NormSpec:
    """x / √(mean x² + ε) · w."""
    x = Load(0, dtype, n, 1)
    wide = x.cast(F32)
    scale = Apply("sqrt", (Sum() * (1 / n) + 1e-5,), F32).reciprocal()
    return row_norm(m, n, (Statistic("add", wide * wide),), (wide * scale).cast(dtype) * Load(1, dtype, 0, 1),
                    **more)


def codes(m: int, n: int, group: int = 0) -> NormSpec:
    """RMSNorm as e4m3 with scales of rows, or of groups of them."""
    spec = rms(m, n)
    (one,) = spec.results
    x, scale = one.value.cast(F32), Apply("div", (Sum(part=1), Constant(448.0)), F32)
    made = Apply("div", (x, scale), F32).cast(E4M3)
    scales = Result(F32, n // (group or n), int(group > 0))
    return replace(spec, statistics=(*spec.statistics, Statistic("max", x.maximum(x * -1.0), group)),
                   results=(Computed(replace(one.result, dtype=E4M3), made), Computed(scales, scale, group)))


def layer(m: int, n: int, dtype: DType = BF16) -> NormSpec:
    """LayerNorm with weight and bias."""
    x, w, b = Load(0, dtype, n, 1), Load(1, dtype, 0, 1), Load(2, dtype, 0, 1)
    centred = x.cast(F32) - Sum() * (1 / n)
    scale = Apply("sqrt", (Sum(part=1) * (1 / n) + 1e-5,), F32).reciprocal()
    return row_norm(m, n, (Statistic("add", x.cast(F32)), Statistic("add", centred * centred)),
                    (centred * scale).cast(dtype) * w + b)


def norm_weight(m: int, n: int, dtype: DType = BF16) -> ColumnSumSpec:
    """The gradient of an RMSNorm's weight: Σ g · x / √(mean x² + ε), of sums of squares that are there."""
    x, g = Load(0, dtype, n, 1), Load(1, dtype, n, 1)
    scale = Apply("sqrt", (Load(2, F32, 1, 0) * (1 / n) * Load(2, F32, 1, 0) + 1e-5,), F32).reciprocal()
    return ColumnSumSpec(m, n, x.cast(F32) * scale * g.cast(F32), dtype)


def bias_sum(m: int, n: int, dtype: DType = BF16) -> ColumnSumSpec:
    """The gradient of a bias."""
    return ColumnSumSpec(m, n, Load(0, dtype, n, 1).cast(F32), dtype)


def softmax(m: int, n: int, dtype: DType = BF16) -> NormSpec:
    """Returns the spec of the softmax of each row."""
    x = Load(0, dtype, n, 1)
    e = ((x.cast(F32) - Sum(dtype).cast(F32)) * 1.4426950408889634).exp2()
    return row_norm(m, n, (Statistic("max", x), Statistic("add", e)),
                    (e * Sum(part=1).reciprocal()).cast(dtype))


def argmax(m: int, n: int, dtype: DType = F32) -> NormSpec:
    """The first of the largest of each row."""
    x = Load(0, dtype, n, 1)
    at = where(Apply("not_equal", (x, Sum(dtype)), dtypes.bool), Constant(0, S32), Position("n") * -1 + n)
    return row_norm(m, n, (Statistic("max", x), Statistic("max", at)), Sum(S32, 1) * -1 + n, one=True)


def int_rows(m: int, n: int) -> NormSpec:
    """Returns, for each row of a batch of 3, whole numbers without their mean, no more than the largest."""
    x = Load(0, S32, n, 1, (m * n,))
    mean = (Sum(S32).cast(F32) * (1 / n)).cast(S32)
    value = where(x < Sum(S32, 1), x - mean, Position(0) + Position("m"))
    return NormSpec(m, n, (Statistic("add", x), Statistic("max", x)),
                    (Computed(Result(S32, n, 1, (m * n,)), value),), (3,))


def elements(m: int, n: int, dtype: DType = BF16) -> NormSpec:
    """silu(gate) · up of one matrix [m, 2 n]."""
    gate, up = Load(0, dtype, 2 * n, 1), Load(0, dtype, 2 * n, 1, (), n)
    return row_norm(m, n, (), silu(gate) * up)


def soft_cap(d: int = 64, cap: float = 30.0) -> Expression:
    """A score with a soft-cap."""
    return tanh(Sum() * (1 / math.sqrt(d) / cap)) * cap


def alibi(d: int = 64) -> Expression:
    """A score with a slope for each head (ALiBi), and a place of the sequence and of the batch in it."""
    away = (Position("n") - Position("m") - Position("start")).cast(F32)
    slope = ((Position(1) * 4 + Position(2)).cast(F32) * -0.5).exp2()
    return Sum() * (1 / math.sqrt(d)) + away * slope + Position(0).cast(F32) * 0.25


def mask_and_bias(s_q: int, s_kv: int, d: int = 64) -> Expression:
    """A score with a mask and a bias in memory, the same for all heads."""
    kept = where(Load(0, dtypes.bool, s_kv, 1, (s_q * s_kv, 0, 0)), Sum() * (1 / math.sqrt(d)), -math.inf)
    return kept + Load(1, F32, s_kv, 1, (s_q * s_kv, 0, 0))


# **** of families that GPUs and CPUs share ****
def epilogues() -> dict[str, GemmSpec]:
    """Matmuls and what follows them."""
    def ending(ends: Expression, dtype: DType = BF16) -> GemmSpec:
        return matmul(512, 768, 1024, dtype, out=BF16, epilogue=ends)
    limited = Apply("min", (Sum(S32).maximum(-128) + Load(0, U8, 128, 1).cast(S32), Constant(127, S32)), S32)
    placed = Sum() + (Position(0) * 3 + Position(1)).cast(F32) * Load(0, F16, 0, 0, (3, 1)).cast(F32)
    return {
        "bias": ending(Sum().cast(BF16) + BIAS),
        "bias, gelu, residual": ending(gelu_tanh(Sum() + BIAS.cast(F32)).cast(BF16) + RESIDUAL),
        "relu by erf": ending(gelu(Sum()).cast(BF16)), "silu of f16": ending(silu(Sum()).cast(BF16), F16),
        "lower triangle": ending(where(Position("m") < Position("n"), Constant(0.0, F32), Sum()).cast(BF16)),
        "gate and up": gate_up(512, 768, 1024),
        "relu, quick_gelu": ending(quick_gelu(relu(Sum())).maximum(-1.0).cast(BF16)),
        "int8, a scale for each column": ending((Sum(S32).cast(F32) * Load(0, F32, 0, 1)).cast(BF16), S8),
        "int8 to int8": matmul(64, 128, 256, S8, out=S8, epilogue=limited.cast(S8)),
        "places of a batch": matmul(64, 128, 96, F16, batch=(2, 3), epilogue=placed.cast(F16))}


def eights() -> dict[str, GemmSpec]:
    """Matmuls of 8-bit floats, and of what becomes one."""
    narrow = (silu(Sum()) + Load(0, E5M2, 768, 1).cast(F32)).cast(E4M3)
    return {"e4m3": matmul(512, 768, 1024, E4M3), "e5m2": matmul(64, 768, 1024, E5M2),
            "bf16 to e4m3": matmul(512, 768, 1024, out=E4M3, epilogue=narrow)}


def caches() -> dict[str, DecodeSpec]:
    """Decode attentions over pages and contiguous caches."""
    return {
        "pages": decode(), "f16 d 64": decode(d=64, dtype=F16, group=1, page_size=32),
        "e4m3": decode(kv=E4M3),
        "int8": decode(kv=S8, page_size=64), "window": decode(window=1024),
        "8 rows": decode(s_q=8, group=8, heads=1),
        "4 rows, soft-cap": decode(s_q=4, score=soft_cap(128)), "d 256": decode(d=256, heads=1, group=2),
        "contiguous": decode(page_size=4096, pages=1, table=False, length="argument"),
        "contiguous, of one length": decode(page_size=2000, pages=1, table=False, length="most", group=2),
        "few keys": decode(pages=2, batch=64), "slopes": decode(s_q=2, score=alibi(128)),
        "contiguous, bias": decode(
            page_size=1000, pages=1, table=False, length="most",
            score=Sum() * 0.1 + Load(0, F32, 0, 1, (1000, 0, 0)) + Load(1, BF16, 0, 0, (8, 4, 1)).cast(F32))}


def appends() -> dict[str, AppendSpec]:
    """Appends to caches of each kind."""
    return {"bf16": append(), "f16 interleaved": append(F16, interleaved=True), "to e4m3": append(kv=E4M3),
            "to int8": append(kv=S8, new=5), "without rotation": append(half=0, q_heads=0),
            "contiguous": append(table=False), "f32, half of a head": append(F32, half=16),
            "rounded": append(BF16, angles=BF16, rounded=True)}


def norms() -> dict[str, NormSpec]:
    """Rows."""
    return {"rms": rms(64, 4096), "rms of one row": rms(1, 2048, F16),
            "rms symbolic": rms(512, 1024, symbolic=True),
            "layer": layer(128, 768), "softmax": softmax(32, 1000, F32), "softmax bf16": softmax(512, 128),
            "argmax": argmax(4, 32000), "silu(gate) up": elements(64, 11008),
            "long rows": layer(2, 20000, F32), "int32, batch 3": int_rows(20, 100),
            "odd rows": rms(7, 77, F16)}


def samplers() -> dict[str, Any]:
    """Filters, choices and counts."""
    return {"top-k": FilterSpec(4, 32000, Number.top_k, counted=True),
            "top-p": FilterSpec(4, 128256, Number.top_p),
            "top-p of few": FilterSpec(2, 1000, Number.top_p), "draw": ChoiceSpec(8, 32000),
            "draw of one row": ChoiceSpec(1, 128256), "largest": ChoiceSpec(4, 5000, draw=False),
            "count": CountSpec(8, 16, 32000)}


def tables() -> dict[str, EmbeddingSpec]:
    """Rows of tables, and their gradients."""
    some, long = Tokens(S32, (4, 128), (128, 1)), Tokens(dtypes.int64, (512,), (1,), 3)
    return {"bf16": EmbeddingSpec(32000, 4096, BF16, some), "f32 odd": EmbeddingSpec(1000, 301, F32, long),
            "symbolic": EmbeddingSpec(32000, 2048, F16, long, symbolic=True),
            "gradient": EmbeddingGradientSpec(1000, 768, BF16, some),
            "gradient f32": EmbeddingGradientSpec(500, 100, F32, long)}
