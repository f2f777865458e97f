"""The part "moe" of bench/gpu/run.py: layers of mixtures of experts, TFLOP/s and GB/s.

Both grouped matmuls of a layer, and whole layers after the router, at the shapes of DeepSeek-V3, Qwen3-235B,
Mixtral and gpt-oss-20b, all with silu, in bfloat16: decode of 1, 16 and 64 sequences, and prefill of 1024 and
4096 tokens. gate_up also with int4 and MXFP4 matrices, which the others have in bfloat16, of decode steps.
GB/s counts the matrices of the experts that even routing is expected to have, and rows once.
Contenders are in moe_contenders.py. Some rows of every result are compared with float64.

With --emulate: each workload scaled down on the emulator, two sets in turns, whose results must be right.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu.compare import check_on_emulator
from bench.gpu.moe_contenders import Launcher, sum_experts
from bench.gpu.moe_workloads import MODELS, MoEWorkload, QuantMoEWorkload
from bench.gpu.parts import Column, Options, Row, emulation, timing_part, workloads
from bench.gpu.quant_workloads import TYPES
from tinygrad_nv.quant import types
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.template import GPU

TOKENS = (1, 16, 64, 1024, 4096)
PARTS = ("layer", "gate_up", "down")
QUANTISED = {"Qwen3-235B": ("int4", TYPES["int4"]), "gpt-oss-20b": ("MXFP4", types.MXFP4)}


@workloads("moe")
def shapes() -> Iterator[MoEWorkload]:
    """All workloads."""
    for model, (kind, type) in QUANTISED.items():
        for tokens in TOKENS[:3]:
            name = f"gate_up {model} {kind} {tokens} tokens"
            yield QuantMoEWorkload(name, MODELS[model], tokens, "gate_up", type)
    for part in PARTS:
        for model, shape in MODELS.items():
            for tokens in TOKENS: yield MoEWorkload(f"{part} {model} {tokens} tokens", shape, tokens, part)


@emulation("moe")
def run_emulated(workload: MoEWorkload, options: Options) -> Row:
    """The workload scaled down on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, whole = workload.scale_down(), [choose(spec, GPU(options.arch)) for spec, _ in workload.stages]
    driver = EmulatedDriver(options.arch, seed=options.seed)
    launcher = Launcher(driver, small, GPU(options.arch, driver.properties.sm_count, driver.clusters))
    written = [names["out"] for _, names in small.stages]
    def after(one: dict[str, Any]) -> None:
        if small.part == "layer": sum_experts(small, one)
    wrong = check_on_emulator(small, driver, launcher.bind_launch, written, after)
    return {"status": "disagrees" if wrong else "emulated",
            "why": f"ours: {wrong}" if wrong else f"of the whole: {'; '.join(map(str, whole))}"}


timing_part("moe", "layers of mixtures of experts", Column("TFLOP/s"), expected_s=8.0)
