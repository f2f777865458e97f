"""Ratios that an H100 measured of rows of timing/table.py: others' time over ours, same problem, in turns.

Protocol: `read_measured_ratio(name)` reads bench/results/gpu_h100-80gb-hbm3.json, where `WORKLOADS` has a
workload for the row; the fastest of the others counts. Types of operands may differ (bfloat16 was measured,
the tables of FlashAttention-3 are of float16). docs/hardware.md names the versions of all contenders.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from bench.lib.measure import RESULTS

RECORD = "gpu_h100-80gb-hbm3.json"
# contenders that compute the same, by their names there and here
OTHERS = {"torch": "torch", "FlashAttention-3": "FlashAttention-3 of 2026", "cuDNN": "cuDNN",
          "grouped_mm": "torch grouped_mm", "torch.compile": "torch.compile"}
D128 = "d 128 {} {} tokens, 16 heads x {}"
WORKLOADS: Mapping[str, tuple[str, str]] = {
    "matmul bf16: 8192 x 8192 x 8192": ("gemm", "8192³"),
    "matmul bf16: 4096 x 4096 x 4096": ("gemm", "4096³"),
    **{f"GEMV bf16: {m} x 4096 x 14336": ("gemm", f"Llama 8B down M={m}") for m in (1, 2, 8)},
    **{f"attention: d 128, {'causal, ' * causal}{tokens} tokens":
       ("attention", D128.format("causal" if causal else "full", tokens, 16384 // tokens))
       for causal in (False, True) for tokens in (2048, 8192, 16384)},
    **{f"attention gradient: d 128, {'causal, ' * causal}{tokens} tokens":
       ("backward", D128.format("causal" if causal else "full", tokens, 16384 // tokens))
       for causal, tokens in ((False, 2048), (True, 2048), (True, 16384))},
    **{f"paged decode: batch {batch}, {tokens} tokens": ("paged", f"batch {batch}, {tokens} tokens")
       for batch, tokens in ((1, 8192), (1, 32768), (64, 8192))},
    **{f"decode step: {model}, batch 1, 1024 tokens": ("decode", f"{model} batch 1, 1024 tokens")
       for model in ("Llama-3.2-1B", "Llama-3.1-8B")},
    "mixture of experts bf16: DeepSeek-V3, 4096 tokens, gate | up":
        ("moe", "gate_up DeepSeek-V3 4096 tokens"),
    "mixture of experts bf16: DeepSeek-V3, 64 tokens, down": ("moe", "down DeepSeek-V3 64 tokens"),
    "mixture of experts bf16: Qwen3-235B, 4096 tokens, gate | up": ("moe", "gate_up Qwen3-235B 4096 tokens"),
    "mixture of experts bf16: Mixtral 8x7B, 4096 tokens, gate | up": ("moe", "gate_up Mixtral 4096 tokens")}


@cache
def _parts() -> Mapping[str, Mapping[str, Any]]:
    return dict(json.loads((RESULTS / RECORD).read_text())["parts"])


def read_measured_ratio(name: str) -> str:
    """Returns such as "0.91 (FlashAttention-3 of 2026)", above 1 where ours took less time; "" of a row that
    was not measured beside others."""
    part, workload = WORKLOADS.get(name, ("", ""))
    seconds = _parts().get(part, {}).get(workload, {}).get("seconds", {})
    others = {of: median(seconds[of]) for of in OTHERS if of in seconds}
    if not others or "ours" not in seconds: return ""
    best = min(others, key=lambda of: others[of])
    return f"{others[best] / median(seconds['ours']):.2f} ({OTHERS[best]})"
