"""The part "decode" of bench/gpu/run.py: whole decode steps of Llama-3.2-1B and Llama-3.1-8B, bfloat16,
weights by a formula, beside torch (a CUDA graph), torch.compile (another) and tinygrad without us; and of the
larger with int4 and fp8 matrices, which torch has in bfloat16.

Each side is a process (decode_side.py); they take turns, some steps each. Seconds are the host's, of some
steps and one wait. The first step's logits must agree. A run's work is the tokens it makes; `nbytes` are the
weights and the cache that a step reads.

With --emulate: a tiny model on DEV=EMU beside torch on the CPU, logits alone.
"""
from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench.gpu.parts import Column, Measure, NotMeasured, Options, Part, Row, Timings, register
from bench.gpu.turns import LEAST_BURSTS
from bench.lib.measure import table
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.runtime.observe.telemetry import Telemetry

LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rms_norm_eps": 1e-5, "head_dim": 128,
         "max_position_embeddings": 131072, "rope_theta": 500000.0, "num_key_value_heads": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "Llama-3.1-8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "tie_word_embeddings": False}}
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
SIDE = Path(__file__).with_name("decode_side.py")
START_S = 300.0     # a side makes weights and compiles
TURN_S = 0.3        # of a side's turn
UNLIKE = 0.03       # of the largest logit: how far bfloat16 networks may be apart
LAST_WORDS = 4      # lines
SAVED_BITS = {"int4": 12, "fp8": 8}     # of each element of a matrix, without scales
NAMES = ("ours", "torch", "torch.compile", "tinygrad")


@dataclass(frozen=True)
class DecodeWorkload:
    """A step of a model with `batch` sequences of `context` tokens; `weights`: the layers' matrices are int4
    or fp8 of ours."""
    model: str
    batch: int
    context: int
    weights: str = ""

    @property
    def name(self) -> str:
        return f"{f'{self.model} {self.weights}'.strip()} batch {self.batch}, {self.context} tokens"

    @property
    def config(self) -> ModelConfig: return parse_config(MODELS[self.model])

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads at least: weights (of an untied embedding some rows) and the cache."""
        c = self.config
        unread = 0 if c.tied else c.vocab_size * c.hidden_size
        cache = 2 * self.batch * c.num_kv_heads * (self.context + 1) * c.head_dim * c.num_layers
        of_layers = c.parameters - (1 if c.tied else 2) * c.vocab_size * c.hidden_size
        return 2 * (c.parameters - unread + cache) - of_layers * SAVED_BITS.get(self.weights, 0) // 8


def decodes() -> Iterator[DecodeWorkload]:
    """All rows, those first that decide most."""
    for weights in ("", *SAVED_BITS): yield DecodeWorkload("Llama-3.1-8B", 1, 1024, weights)
    yield DecodeWorkload("Llama-3.2-1B", 1, 1024)
    for batch, context in ((8, 1024), (1, 8192)):
        for model in MODELS: yield DecodeWorkload(model, batch, context)


class StepProcess:
    """A process that makes steps."""

    def __init__(self, who: str, model: str, batch: int, context: int, device: str, script: Path = SIDE,
                 **environment: str) -> None:
        line = [sys.executable, str(script), who, model, str(batch), str(context), device]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.PIPE, env={**os.environ, **environment})
        self.lines: queue.Queue[str] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout: self.lines.put(line)
        self.lines.put("")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said += self.process.stderr

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line. Raises `NotMeasured` when there is none."""
        while True:
            try: line = self.lines.get(timeout=limit_s)
            except queue.Empty: raise NotMeasured(f"no answer in {limit_s:.0f} s") from None
            if not line:
                self.process.wait()
                words = [each.strip() for each in self.said if each.strip()]
                raise NotMeasured("; ".join(words[-LAST_WORDS:])[-400:] or "its process ended without a word")
            if line.startswith("{"): return dict(json.loads(line))

    def steps(self, count: int, limit_s: float = 60.0) -> tuple[dict[str, float], dict[str, float | None]]:
        """Seconds and joules of a step, by name."""
        assert self.process.stdin is not None
        print(count, file=self.process.stdin, flush=True)
        said = self.answer(limit_s)
        return dict(said["seconds"]), dict(said["joules"])

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def unlike(logits: dict[str, list[float]]) -> str:
    """Returns the rows whose logits are not those of torch; "" when all agree or there is nothing to compare
    with."""
    if (want := logits.get("torch")) is None: return ""
    largest = max(map(abs, want))
    for name, found in logits.items():
        off = [abs(a - b) for a, b in zip(found, want, strict=True)]
        at = max(range(len(off)), key=off.__getitem__)
        if not max(off) <= UNLIKE * largest:
            return f"{name}: logit {at} is {found[at]:.5g}, torch's {want[at]:.5g}"
    return ""


def await_sides(sides: dict[str, StepProcess], notes: dict[str, str],
                limit_s: float) -> dict[str, list[float]]:
    """Waits until each is ready: logits by name. Those that do not start are noted and dropped."""
    logits: dict[str, list[float]] = {}
    for who in list(sides):
        try: said = sides[who].answer(limit_s)
        except NotMeasured as why:
            notes[who] = str(why)
            sides.pop(who).end()
        else:
            notes |= said["notes"]
            logits |= {who if name == "tinygrad" else name: found for name, found in said["logits"].items()}
    return logits


def compare(decode: DecodeWorkload, options: Options, budget_s: float) -> Row:
    """All sides on one step, in turns."""
    config = json.dumps({**MODELS[decode.model], "weights": decode.weights})
    notes = dict[str, str]()
    sides = {"ours": StepProcess("tinygrad", config, decode.batch, decode.context, "CUDA", DEV="CUDA")}
    if not options.without_tinygrad and not decode.weights:
        sides["tinygrad"] = StepProcess("tinygrad", config, decode.batch, decode.context, "CUDA", DEV="CUDA",
                                        NV="0")
    sides["torch"] = StepProcess("torch", config, decode.batch, decode.context, "cuda")
    try:
        logits = await_sides(sides, notes, min(START_S, budget_s))
        if "ours" not in sides: raise NotMeasured(f"ours: {notes['ours']}")
        return {"work": decode.batch, "nbytes": decode.nbytes, "notes": notes,
                **_status(unlike(logits), "measured"), **in_turns(sides, min(budget_s, options.seconds))}
    finally:
        for side in sides.values(): side.end()


def _status(wrong: str, right: str) -> Row:
    return {"status": "disagrees", "why": wrong} if wrong else {"status": right}


def in_turns(sides: dict[str, StepProcess], budget_s: float) -> Row:
    """Some steps of each side, until time is up."""
    counts = {who: max(1, round(TURN_S / max(side.steps(3)[0].values()))) for who, side in sides.items()}
    seconds, joules = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    begun = time.perf_counter()
    with Telemetry(0).sample() as samples:
        turns = 0
        while turns < LEAST_BURSTS or time.perf_counter() - begun < budget_s:
            for who, side in sides.items():
                took, energy = side.steps(counts[who])
                for name, found in took.items():
                    mine = who if name == "tinygrad" else name
                    seconds[mine].append(float(f"{found:.5g}"))
                    if (each := energy[name]) is not None: joules[mine].append(float(f"{each:.5g}"))
            turns += 1
    return {"seconds": seconds, "joules": joules, "count": counts, "telemetry": samples.record()}


def per_joule(rows: Mapping[str, Row]) -> str:
    """The table of tokens for each joule of the board; "" where no joules were read."""
    known = {name: row for name, row in rows.items() if row.get("joules")}
    lines = [[name, *(f"{row['work'] / mean(done):.3g}" if (done := row["joules"].get(who)) else "-"
                      for who in NAMES)] for name, row in known.items()]
    return "\n\n" + table(["tokens/J", *NAMES], lines) if lines else ""


def run_emulated(decode: DecodeWorkload, options: Options) -> Row:
    """The tiny model on the emulated device: its logits beside torch's."""
    batch, context, notes = min(decode.batch, 2), 5, dict[str, str]()
    tiny = json.dumps({**TINY, "weights": decode.weights})
    sides = {"ours": StepProcess("tinygrad", tiny, batch, context, "EMU", DEV="EMU", EMU_ARCH=options.arch),
             "torch": StepProcess("torch", tiny, batch, context, "cpu")}
    try:
        logits = await_sides(sides, notes, START_S)
        if notes: raise NotMeasured("; ".join(f"{who}: {why}" for who, why in notes.items()))
        return {**_status(unlike(logits), "emulated"), "logits": logits}
    finally:
        for side in sides.values(): side.end()


def open_worker(options: Options) -> Measure:
    """A worker."""
    known = {each.name: each for each in decodes()}

    def measure(name: str, budget_s: float) -> Row:
        if options.emulate: return run_emulated(known[name], options)
        return compare(known[name], options, budget_s)

    return measure


register(Part("decode", "whole decode steps, bfloat16, weights by a formula",
              lambda options: [each.name for each in decodes()], open_worker,
              lambda rows: Timings(Column("tokens/s", scale=1.0), names=NAMES).render("decode", rows)
              + per_joule(rows),
              expected_s=60.0, limit_s=420.0))
