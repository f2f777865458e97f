"""The six rows of README.md: what was measured beside vLLM, Triton, tinygrad and the best other contender."""
from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.lib import report_gpu, report_vllm
from bench.lib.report_cpu import NOT_MEASURED, Record, markdown, read

HEADER = ["", "tinygrad_nv", "÷ vLLM", "÷ Triton", "÷ tinygrad", "÷ best other"]
GEMM, ATTENTION = "8192³", "d 128 causal 16384 tokens, 16 heads x 1"
STEP = "Llama-3.2-1B batch 1, 1024 tokens"
LARGE = "random 1B"


def relation(ratios: Sequence[float], name: str = "") -> str:
    """Formats the median of ratios with their range."""
    if not ratios: return NOT_MEASURED
    digits = 0 if median(ratios) >= 10 else 2
    low, high = min(ratios), max(ratios)
    return f"{name + ' ' if name else ''}{median(ratios):.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"


def on_a_gpu(record: Record, part: str, row: str, title: str, unit: str, best: Sequence[str]) -> list[str]:
    """Returns the line of one row: its rate, and its speed over that of each contender. `best` are the others
    among which the fastest is named."""
    found = record["parts"].get(part, {}).get(row, {})
    seconds = found.get("seconds", {})
    ours = seconds.get("ours")
    if not ours: return [title, *[NOT_MEASURED] * 5]
    rate = found["work"] / median(ours)
    said = f"{rate / 1e12:.0f} TFLOP/s" if unit == "TFLOP/s" else f"{rate:.0f} {unit}"
    def over(who: str) -> list[float]:
        return [b / a for a, b in zip(ours, seconds.get(who, []), strict=False)]
    fastest = min((who for who in best if seconds.get(who)), key=lambda who: median(seconds[who]), default="")
    return [title, said, relation(over("vLLM")), relation(over("Triton")), relation(over("tinygrad")),
            relation(over(fastest), {"torch": "cuBLAS"}.get(fastest, fastest))]


def decode(record: Record | None) -> list[str]:
    """Returns the line of decoding a large model on a CPU."""
    title = "CPU: decode a random LLaMA of 1.2B, bf16"
    runs = next((each["runs"]["greedy"] for each in (record or {}).get("results", [])
                 if each["name"] == LARGE), None)
    if runs is None: return [title, *[NOT_MEASURED] * 5]
    rates = {name: [run["tokens_per_s"] for run in done] for name, done in runs.items()}
    other = max((name for name in rates if name != "tinygrad_nv"), key=lambda name: median(rates[name]))
    ratios = [a / b for a, b in zip(rates["tinygrad_nv"], rates[other], strict=False)]
    return [title, f"{median(rates['tinygrad_nv']):.0f} tokens/s", NOT_MEASURED, "—", NOT_MEASURED,
            relation(ratios, other)]


def small(record: Record | None) -> list[str]:
    """Returns the line of decoding a GGUF file on a CPU beside tinygrad's engine."""
    title = "CPU: decode SmolLM2-135M, GGUF Q4_1"
    if record is None: return [title, *[NOT_MEASURED] * 5]
    ours, theirs = record["tokens_per_s"]["tinygrad_nv"], record["tokens_per_s"]["tinygrad"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [title, f"{median(ours):.0f} tokens/s", NOT_MEASURED, "—", relation(ratios), NOT_MEASURED]


def beside_vllm(record: Record | None) -> list[str]:
    """Returns the line of the server beside vLLM's on a CPU."""
    title = "CPU: serve 16 clients, Qwen3 of 97M, bf16"
    row = report_vllm.find(record, "qwen3-97m", "random", 16) if record else None
    if row is None: return [title, *[NOT_MEASURED] * 5]
    return [title, f"{row[report_vllm.OURS]['output_throughput']:.0f} tokens/s",
            relation(row["ratios"]["output_throughput"]), "—", NOT_MEASURED, NOT_MEASURED]


def table(folder: Path) -> str:
    """Returns the six rows and what they are."""
    record: Record = next((each for each in report_gpu.gpus(folder) if "H100" in each["gpu"]), {"parts": {}})
    lines = [on_a_gpu(record, "gemm", GEMM, "H100: matmul 8192³, bf16", "TFLOP/s", ["torch"]),
             on_a_gpu(record, "attention", ATTENTION, "H100: attention, d 128, causal, 16k tokens", "TFLOP/s",
                      ["cuDNN", "FlashAttention-2", "FlashAttention-3"]),
             on_a_gpu(record, "decode", STEP, "H100: decode step, Llama-3.2-1B, bf16", "tokens/s",
                      ["torch", "torch.compile"]),
             decode(read(folder, "cpu_decode")), small(read(folder, "cpu_tinygrad")),
             beside_vllm(read(folder, "against_vllm"))]
    machines = [each["machine"] for name in ("cpu_decode", "cpu_tinygrad", "against_vllm")
                if (each := read(folder, name)) is not None]
    cpus = " and ".join(dict.fromkeys(machines)) or "none"
    said = ("Medians; ÷ is the speed of tinygrad_nv over that of the other in one interleaved run, with the "
            f"range of repeats. CPU: {cpus}. Triton has no CPU backend (—).")
    return textwrap.fill(said, 118) + "\n\n" + markdown(HEADER, lines)
