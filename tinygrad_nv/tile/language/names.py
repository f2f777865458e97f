"""The names of `tile`: tile.load, tile.dot, tile.softmax_online, …

Protocol: `NAMES` has, for each name, the module of this package and the function in it; `tile/__init__.py`
finds a name here when it is asked for.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

f32, f16, bf16, e4m3, e5m2 = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)
int8, uint8, int32, uint32 = dtypes.int8, dtypes.uint8, dtypes.int32, dtypes.uint32

_MODULES = {
    "context": ("context", "program_id", "block", "range_m", "range_n", "range_k"),
    "choices": ("select",),
    "memory": ("arange", "load", "store", "atomic_add", "atomic_max", "atomic_min"),
    "elements": ("zeros", "ones", "where", "maximum", "minimum", "clamp", "exp", "exp2",
                 "exp2_nonpositive", "log", "log2", "log_normal", "log_near_one", "rotate_left", "interleave",
                 "deinterleave", "where_needed",
                 "sqrt", "rsqrt", "reciprocal", "sin", "cos", "sigmoid", "tanh", "erf", "silu", "relu",
                 "gelu", "floor", "ceil", "bitcast", "mul_high", "fma", "cdiv", "INF"),
    "reductions": ("prod", "mean", "argmax", "argmin", "reduce", "scan", "cumsum", "cumprod", "cummax",
                   "gather", "sort", "ranks", "histogram", "softmax"),
    "linear": ("dot", "dot_dequant_i8", "load_qint8"),
    "attention": ("row_index", "col_index", "mask_causal", "softmax_online", "softmax_accumulate",
                  "dropout_in_kernel"),
    "roles": ("role", "pipe"),
    "rounding": ("philox", "random"),
    "values": ("cast", "Tile")}
# names that are Python's, too, or of other modules
_OTHERS = {"full": ("elements", "fill"), "abs": ("elements", "abs_"), "round": ("elements", "round_"),
           "sum": ("reductions", "sum_"), "max": ("reductions", "max_"), "min": ("reductions", "min_"),
           "any": ("reductions", "any_"), "all": ("reductions", "all_"), "range": ("control", "range_"),
           "transpose": ("elements", "transpose"), "reshape": ("elements", "reshape"),
           "broadcast_to": ("elements", "broadcast_to"), "expand_dims": ("elements", "expand_dims"),
           "atomic_exchange": ("memory", "atomic_exchange"), "Schedule": ("schedule", "TileSchedule")}
NAMES = {**{name: (module, name) for module, names in _MODULES.items() for name in names}, **_OTHERS}


def instead(name: str, of: str) -> str:
    """Returns what to write for an attribute of a tile or tensor that is a function of `tile`."""
    return f"write tile.{name}({of}, …)" if name in NAMES else ""
