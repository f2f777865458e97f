"""The part "step" of bench/gpu/run.py: whole steps of training, bfloat16 with float32 master weights and
AdamW, beside torch's, with its compiler and without.

Each side is a process (step_side.py); they take turns, some steps each, as in the part "decode". All begin
with the same random weights, and the losses of the first steps must agree. A run's work is its tokens; MFU
counts the operations of PaLM's appendix B over the dense bfloat16 peak.

With --emulate: a tiny model on DEV=EMU beside torch on the CPU, losses alone.
"""
from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.decode import StepProcess, await_sides, in_turns
from bench.gpu.parts import Column, Measure, NotMeasured, Options, Part, Row, Timings, register
from bench.lib.measure import table
from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.plan.training import operations
from tinygrad_nv.models.config import parse_config

SIDE = Path(__file__).with_name("step_side.py")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2 124M": {**LLAMA, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
                   "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 50304,
                   "max_position_embeddings": 1024},
    "Llama-3.2-1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                     "vocab_size": 128256, "max_position_embeddings": 2048}}
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
START_S = 300.0     # a side loads and compiles
NEAR = 0.02         # nats: how far losses of bfloat16 networks may be apart
PEAK = 989e12       # dense bfloat16 FLOP/s of an H100 SXM
NAMES = ("ours", "torch", "torch.compile")


@dataclass(frozen=True)
class StepWorkload:
    """A step of `rows` rows of `tokens` tokens."""
    model: str
    rows: int
    tokens: int

    @property
    def name(self) -> str: return f"{self.model}, {self.rows} x {self.tokens} tokens"

    @property
    def flops(self) -> float:
        """Operations of a step: forward and backward."""
        return operations(parse_config(MODELS[self.model]), Training(self.rows, self.tokens))


WORKLOADS = {each.name: each for each in (StepWorkload("GPT-2 124M", 16, 1024),
                                          StepWorkload("Llama-3.2-1B", 4, 2048))}


def unlike(losses: Mapping[str, list[float]]) -> str:
    """Returns the rows whose losses are not torch's; "" when all are, or there is nothing to compare with."""
    want = losses.get("torch") or losses.get("torch.compile")
    for name, found in losses.items():
        if want is None: break
        for i, (a, b) in enumerate(zip(found, want, strict=True)):
            if not abs(a - b) <= NEAR: return f"{name}: loss {a:.4f} of step {i + 1}, torch's {b:.4f}"
    return ""


def save_checkpoint(config: dict[str, Any], seed: int, place: str) -> None:
    """A checkpoint of random weights."""
    import torch
    import transformers
    torch.manual_seed(seed)
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).save_pretrained(place)


def compare(step: StepWorkload, options: Options, budget_s: float) -> Row:
    """All sides on one step, in turns; on the emulator, losses alone."""
    config = TINY if options.emulate else MODELS[step.model]
    rows, tokens = (2, 32) if options.emulate else (step.rows, step.tokens)
    ours, theirs = ("EMU", "cpu") if options.emulate else ("CUDA", "cuda")
    notes = dict[str, str]()
    with tempfile.TemporaryDirectory() as place:
        save_checkpoint(config, options.seed, place)
        def process(who: str, device: str, **environment: str) -> StepProcess:
            return StepProcess(who, place, rows, tokens, device, SIDE, **environment)
        sides = {"ours": process("ours", ours, DEV=ours, EMU_ARCH=options.arch),
                 **{who: process(who, theirs) for who in NAMES[1:2 if options.emulate else 3]}}
        try:
            losses = await_sides(sides, notes, START_S if options.emulate else min(START_S, budget_s))
            if "ours" not in sides: raise NotMeasured(f"ours: {notes['ours']}")
            wrong = unlike(losses)
            row: Row = {"status": "disagrees" if wrong else "emulated" if options.emulate else "measured",
                        "losses": losses, "notes": notes, **({"why": wrong} if wrong else {})}
            if options.emulate: return row
            return {**row, "work": rows * tokens, "nbytes": 0, "flops": step.flops,
                    **in_turns(sides, min(budget_s, options.seconds))}
        finally:
            for side in sides.values(): side.end()


def open_worker(options: Options) -> Measure:
    """A worker."""
    return lambda name, budget_s: compare(WORKLOADS[name], options, budget_s)


def render(rows: Mapping[str, Row]) -> str:
    """Tokens a second, and below milliseconds of a step and MFU."""
    lines = []
    for name, row in rows.items():
        took = {who: median(done) for who, done in row.get("seconds", {}).items() if done}
        if took: lines.append([name, *(f"{1e3 * took[who]:.1f} ms, {row['flops'] / took[who] / PEAK:.1%}"
                                       if who in took else "-" for who in NAMES)])
    more = "\n\n" + table(["step, MFU", *NAMES], lines) if lines else ""
    return Timings(Column("tokens/s", scale=1.0), names=NAMES).render("step", rows) + more


register(Part("step", "whole steps of training, bfloat16, float32 master weights, AdamW",
              lambda options: list(WORKLOADS), open_worker, render, expected_s=60.0, limit_s=420.0))
