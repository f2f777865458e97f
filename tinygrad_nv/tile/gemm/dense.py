"""Matmuls of dense matrices, by a few words: what `tinygrad-nv tune`, benchmarks and tests ask for.

Protocol: `dense(4096, 4096, 4096, "bf16", majors="NT", epilogue="bias+gelu")`. Types are those of `TYPES`;
tf32 is float32 that tensor cores may cut. Majors are BLAS's: N for a of [M, K] and b of [K, N] in memory, T
for the transposed; NT is `x @ w.T`. The epilogue is float32 (of sums in whatever they are summed in), from
left to right, and ends with a cast:

    bias      adds a vector along columns          residual   adds a matrix like the result
    scale     multiplies by a vector along rows    gate       silu(sum) * up: b holds two matrices
    relu, gelu, gelu_tanh, silu, quick_gelu        activations
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import (
    Expression,
    Load,
    Sum,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    silu,
)
from tinygrad_nv.tile.gemm.spec import FP8, INT8S, GemmSpec, Operand, Result

TYPES = {"bf16": dtypes.bfloat16, "f16": dtypes.float16, "f32": dtypes.float32, "tf32": dtypes.float32,
         "e4m3": dtypes.fp8e4m3, "e5m2": dtypes.fp8e5m2, "s8": dtypes.int8, "u8": dtypes.uint8}
RESULTS = {**TYPES, "s32": dtypes.int32}
ACTIVATIONS: dict[str, Callable[[Expression], Expression]] = {
    "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "quick_gelu": quick_gelu}
WORDS = (*ACTIVATIONS, "bias", "scale", "residual", "gate")
MAJORS = ("NN", "NT", "TN", "TT")


def dense(m: int, n: int, k: int, dtype: str = "bf16", out: str = "", majors: str = "NT",
          batch: tuple[int, ...] = (), epilogue: str = "", symbolic: bool = False) -> GemmSpec:
    """A matmul of matrices without gaps, one after the other. Without `out`: the operands' type, float32 for
    tf32, bf16 for fp8, int32 for bytes. Raises `SpecError` for words it does not know."""
    for what, word, known in (("operands of dtype", dtype, TYPES), ("a result of dtype", out, ("", *RESULTS)),
                              ("majors", majors, MAJORS)):
        if word not in known: raise SpecError(f"{what} {word!r}", f"one of {', '.join(filter(None, known))}")
    kind, words = TYPES[dtype], [word for word in epilogue.split("+") if word]
    parts = 2 if "gate" in words else 1
    a = Operand(kind, *((k, 1) if majors[0] == "N" else (1, m)), _strides(batch, m * k))
    b = Operand(kind, *((k, 1) if majors[1] == "T" else (1, n)), _strides(batch, parts * n * k))
    result = Result(RESULTS[out] if out else _result(kind), n, 1, _strides(batch, m * n))
    return GemmSpec(m, n, k, a, b, result, batch, _epilogue(words, result, kind), parts,
                    n * k if parts > 1 else 0, symbolic, dtype == "tf32")


def _strides(batch: tuple[int, ...], size: int) -> tuple[int, ...]:
    made: list[int] = []
    for extent in reversed(batch):
        made.insert(0, size)
        size *= extent
    return tuple(made)


def _result(kind: DType) -> DType:
    return dtypes.bfloat16 if kind in FP8 else dtypes.int32 if kind in INT8S else kind


def _epilogue(words: list[str], out: Result, kind: DType) -> Expression:
    total = dtypes.int32 if kind in INT8S else dtypes.float32
    if not words: return Sum(total).cast(out.dtype)
    value, parameter = Sum(total).cast(dtypes.float32), 0
    for word in words:
        if word in ACTIVATIONS: value = ACTIVATIONS[word](value)
        elif word == "gate": value = silu(value) * Sum(total, 1).cast(dtypes.float32)
        elif word in WORDS:
            m, n = {"bias": (0, 1), "scale": (1, 0), "residual": (out.m, out.n)}[word]
            batch = out.batch if word == "residual" else (0,) * len(out.batch)
            load = Load(parameter, out.dtype, m, n, batch).cast(dtypes.float32)
            value = value * load if word == "scale" else value + load
            parameter += 1
        else: raise SpecError(f"epilogue {word!r}", f"words of {', '.join(WORDS)}, joined by +")
    return value.cast(out.dtype)
