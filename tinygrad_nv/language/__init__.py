"""The language as users write it: kernels in tiles, dtypes with policies, shapes with names.

    from tinygrad_nv.language import *

Read in this order: decorator.py (@kernel), kernels.py (a kernel and its calls), arguments.py (what it is
called with), building.py (the kernel of a target), autotune.py (schedules that are searched
for), inspection.py (for a reader), effects.py (placement and movement), state.py (a cache whose operations
are in order), blocks.py (pieces of transformer blocks). The tile language itself is tile/language/.
"""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor

from tinygrad_nv import tile
from tinygrad_nv.language.blocks import cast_like, matmul, merge_heads, residual, split_qkv
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.language.effects import device, donate, gpu, offload, prefetch
from tinygrad_nv.language.state import CacheState
from tinygrad_nv.numerics import verify
from tinygrad_nv.numerics.policy import accum, deterministic, loss_scale, saturate, stochastic_round
from tinygrad_nv.numerics.safe import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe
from tinygrad_nv.shapes import KTile, OTile, QTile, Tile
from tinygrad_nv.tile.language.attention import dropout_in_kernel
from tinygrad_nv.tile.language.elements import INF, cdiv
from tinygrad_nv.tile.language.names import bf16, e4m3, e5m2, f16, f32, int8, int32, uint8, uint32
from tinygrad_nv.tile.language.schedule import TileSchedule as Schedule
from tinygrad_nv.transforms import (
    autodiff,
    checkpoint,
    custom_jvp,
    custom_vjp,
    custom_vmap,
    grad,
    hessian,
    jit,
    jvp,
    pmap,
    scan,
    value_and_grad,
    vjp,
    vmap,
)

# loaded when they are asked for, or by `import *`
LATER = {"mesh": "tinygrad_nv.dist.mesh.mesh", "KVCache": "tinygrad_nv.kvcache.cache",
         "OptimizerState": "tinygrad_nv.train.optimizers.state"}
__all__ = [
    "INF",
    "CacheState",
    "KTile",
    "KVCache",
    "OTile",
    "OptimizerState",
    "QTile",
    "Schedule",
    "Tensor",
    "Tile",
    "accum",
    "autodiff",
    "bf16",
    "cast_like",
    "cdiv",
    "checkpoint",
    "custom_jvp",
    "custom_vjp", "custom_vmap",
    "deterministic",
    "device",
    "donate",
    "dropout_in_kernel",
    "e4m3",
    "e5m2",
    "f16",
    "f32",
    "gpu",
    "grad", "hessian",
    "int8",
    "int32",
    "jit",
    "jvp",
    "kernel",
    "layernorm_safe",
    "logsumexp_safe",
    "loss_scale",
    "matmul",
    "merge_heads",
    "mesh",
    "offload",
    "pmap",
    "prefetch",
    "residual",
    "rmsnorm_safe",
    "saturate",
    "scan",
    "softmax_safe",
    "split_qkv",
    "stochastic_round",
    "tile",
    "uint8",
    "uint32",
    "value_and_grad", "verify",
    "vjp",
    "vmap",
]


def __getattr__(name: str) -> Any:
    if name not in LATER: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(LATER[name]), name)
