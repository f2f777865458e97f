"""Cost of the engine's bookkeeping: the host's part of a step, with a device that does nothing.

    python bench/serving/engine_overhead.py [--running 1,16,64,256] [--steps 600] [--dry]

A step is `EngineCore.step`: the next batch is scheduled and launched, and the tokens of the one before are
handed to their requests. Times are of the thread's processor (`time.thread_time`), so that others who use the
machine do not count. So many requests run at a time, in pages of 16 tokens, with a budget of 2048 rows:

 decode   each has a prompt of 64 … 1024 tokens behind it, and chooses a token a step: none comes or goes
 serve    prompts of 64 … 1024 tokens, half of which begin with the same 256, and answers of 32 … 256 tokens:
          a finished request makes room for the next, so most steps have a chunk of a prompt
 logprobs as "decode", with the logarithm of each token's probability and those of 5 others
"""
from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, table
from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs, SamplerOutput, SchedulerOutput
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.models.peft import Adapter

TARGET_US, TARGET_RUNNING = 200.0, 64
VOCAB, BUDGET, PAGE, MAX_LEN = 32000, 2048, 16, 4096
PREFIX = 256


class Stub:
    """A device that chooses the same tokens always, at once."""
    vocab_size = VOCAB

    def __init__(self, max_seqs: int) -> None:
        self.max_seqs = max_seqs
        self.tokens = np.random.default_rng(0).integers(3, VOCAB, 4096).astype(np.int32)
        self.told = Logprobs(-1.0, 1, tuple((token, -1.0) for token in range(5)))
        self.rows: list[int] = []
        self.us = 0.0

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        """Tokens. Its own time does not count."""
        begun = time.thread_time()
        done: Future[SamplerOutput] = Future()
        count = batch.num_samples
        sample = batch.seqs[0].samples[0] if batch.seqs and batch.seqs[0].samples else None
        told = {} if sample is None or sample.logprobs is None else dict.fromkeys(range(count), self.told)
        self.rows.append(batch.num_tokens)
        done.set_result(SamplerOutput(self.tokens[:count], told))
        self.us += (time.thread_time() - begun) * 1e6
        return done

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        """Nothing."""

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Nothing."""

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """Nothing."""


@dataclass
class EngineLoad:
    """So many requests at a time; with `answer` they end after so many tokens, least and most."""
    running: int
    answer: tuple[int, int] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.stub = Stub(self.running)
        pool = PagePool(self.running * 128 + 256, PAGE)
        config = EngineConfig(self.running, BUDGET, MAX_LEN, 1 << 20)
        self.core, self.number = EngineCore(self.stub, pool, config), 0
        self.shared = [self.random.randrange(3, VOCAB) for _ in range(PREFIX)]

    def fill(self) -> None:
        """Requests that wait for a place to run in."""
        waiting = 2 if self.answer else 0
        while self.core.scheduler.num_waiting < waiting or len(self.core._requests) < self.running:
            self.add()

    def add(self) -> None:
        """One more request."""
        self.number += 1
        prompt = [self.random.randrange(3, VOCAB) for _ in range(self.random.randrange(64, 1024))]
        if self.number % 2: prompt[:PREFIX] = self.shared
        most = self.random.randrange(*self.answer) if self.answer else MAX_LEN
        self.core.add(Request(str(self.number), prompt,
                              SamplingParams(max_tokens=most, seed=0, logprobs=self.logprobs)))

    def warm(self) -> None:
        """Steps until as many run as may."""
        self.fill()
        running = self.core.scheduler.running
        while len(running) < self.running or any(len(seq.tokens) - seq.num_scheduled > 1 for seq in running):
            self.step()

    def step(self) -> float:
        """Microseconds of a step; what goes on around it does not count."""
        self.fill()
        self.stub.us = 0.0
        begun = time.thread_time()
        self.core.step()
        return (time.thread_time() - begun) * 1e6 - self.stub.us


def time_steps(load: EngineLoad, steps: int) -> tuple[list[float], float]:
    """Microseconds of each step, and the rows of one."""
    load.warm()
    load.stub.rows.clear()
    gc.collect()
    us = [load.step() for _ in range(steps)]
    return us, sum(load.stub.rows) / len(load.stub.rows)


def main() -> None:
    """Makes all rows, times them, and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--running", default="1,16,64,256", help="requests at a time (default 1,16,64,256)")
    parser.add_argument("--steps", type=int, default=600, help="of each row (default 600)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    kinds: dict[str, Callable[[int], EngineLoad]] = {
        "decode": EngineLoad,
        "serve": lambda running: EngineLoad(running, (32, 256)),
        "logprobs": lambda running: EngineLoad(running, None, 5)}
    names = [f"{kind}, {running}" for kind in kinds for running in args.running.split(",")]
    spent: dict[str, tuple[list[float], float]] = {}
    for name in each(names):
        kind, running = name.split(", ")
        spent[name] = time_steps(kinds[kind](int(running)), args.steps)
    print(table(("requests, µs a step", "median", "90 %", "99 %", "max", "a request", "rows"),
                [(name, f"{median(us):.1f}", *(f"{np.percentile(us, p):.1f}" for p in (90, 99, 100)),
                  f"{median(us) / int(name.split(', ')[1]):.2f}", f"{rows:.0f}")
                 for name, (us, rows) in spent.items()]))
    print(f"wanted: at most {TARGET_US:.0f} µs with {TARGET_RUNNING} requests")
    record = {"steps": args.steps, "target_us": TARGET_US, "target_running": TARGET_RUNNING,
              "load": os.getloadavg(),
              "us": {name: {"median": median(us), "min": min(us), "max": max(us), "rows": rows,
                            **{f"p{p}": float(np.percentile(us, p)) for p in (10, 90, 99)}}
                     for name, (us, rows) in spent.items()}}
    if not args.dry: save("engine_overhead", record)


if __name__ == "__main__": main()
