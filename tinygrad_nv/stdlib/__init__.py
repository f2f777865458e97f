"""The standard library: what transformers are made of, written in the tile language.

Protocol: each function takes and gives Tensors, on a CPU and on GPUs, and has a gradient. Its kernels are in
the same module with schedules that are pinned, and that a user replaces: `stdlib.attention.forward.schedule(
block=(64, 64))`, or `forward.with_schedule(…)` for a kernel beside it. tests/unit/stdlib hold them to
tinygrad and to float64.
"""
from tinygrad_nv.stdlib.attention import flash_attention_2
from tinygrad_nv.stdlib.elementwise import fused_adam, rotary_embedding
from tinygrad_nv.stdlib.norm import efficient_layernorm, stable_softmax
from tinygrad_nv.stdlib.quantised import matmul_qint8, quantise_int8

__all__ = ["efficient_layernorm", "flash_attention_2", "fused_adam", "matmul_qint8", "quantise_int8",
           "rotary_embedding", "stable_softmax"]
