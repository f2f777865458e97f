"""Half an hour on a GPU: what is worth measuring, the most valuable first, in calls of ten minutes at most.

    python3 bench/gpu/campaign.py --minutes 9.5         # a call; the same line again goes on
    python3 bench/gpu/campaign.py --minutes 30          # half an hour in one call
    python3 bench/gpu/campaign.py --list                # the steps, their minutes, what each is for
    python3 bench/gpu/campaign.py --emulate --minutes 5 # on the emulated GPU: small, and no times

A step is a command of calibrate.py or run.py, which writes each row as soon as it is measured and leaves out
those that its result file has of the same sources. So a step that was cut off is taken up again, and one that
is done costs a second. A step gets its own minutes, or what the call has left, if that is less.

Exit code: 0, 1 where a row disagreed, failed, hung or died, 2 where a step could not measure at all.
"""
from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import table

HERE = Path(__file__).parent
LEAST_S = 20.0      # less is not worth a worker's start


@dataclass(frozen=True)
class Step:
    """A command of a script beside this one, what it answers, and how many minutes it may take. `only` is for
    --emulate: rows whose names contain it."""
    question: str
    script: str
    words: tuple[str, ...]
    minutes: float
    only: str = ""

    def command(self, minutes: float, options: argparse.Namespace) -> list[str]:
        """Returns the command line for so many minutes."""
        words = [sys.executable, str(HERE / self.script), *self.words, "--minutes", f"{minutes:.2f}"]
        if self.script == "run.py":
            words += ["--resume", "--seconds", "1"]
            if options.fa3: words += ["--fa3", str(options.fa3)]
            if options.cases: words += ["--cases", str(options.cases)]
        if options.folder: words += ["--out", str(options.folder / f"{Path(self.script).stem}.json")]
        if not options.emulate: return words
        return [*words, "--emulate", *(["--only", self.only] if self.only else [])]


def _run(question: str, part: str, minutes: float, only: str) -> Step:
    return Step(question, "run.py", ("--part", part), minutes, only)


CALIBRATE = ("--brief", "--base", "h100")
# what decides a default first, figures of the model, what the record lacks: half an hour; then the rest
STEPS = (
    _run("Do captured steps keep clusters and programmatic edges?", "smoke", 0.7, ""),
    _run("Are the emulator's results those of this GPU?", "correctness", 1.8, "test_mma"),
    _run("How many cycles have FlashAttention-3 and ours?", "attention", 3.5, "causal 2048 tokens, 16 heads"),
    _run("Which schedules are best, where defaults were contradicted?", "sweep", 4.0, "batch 1, 512 tokens"),
    Step("What does softmax cost beside wgmma?", "calibrate.py", (*CALIBRATE, "--only", "beside"), 1.2,
         "SMs"),
    Step("What do other suspected causes of the model's errors cost?", "calibrate.py", CALIBRATE, 4.0, "SMs"),
    _run("Are kernels right that begin before the one ahead has ended?", "chains", 0.8, "test_group_norm"),
    _run("How do norms, those of groups too, and softmax do?", "memory", 1.5, "group norm 2x64"),
    _run("How does decode attention over latents (MLA) do?", "latent", 0.7, "16 heads, batch 1,"),
    _run("Are kernels of convolutions right, and how fast?", "conv", 1.2, "1x1"),
    _run("Are fused parts of training right, and how fast?", "train", 1.5, "AdamW GPT-2 124M f32"),
    _run("Are programs of the tile language as fast as templates and Triton?", "language", 1.5, "softmax"),
    _run("How do experts of a router do, quantised ones first?", "moe", 0.9, "int4 1 tokens"),
    _run("Whole steps of training beside torch's", "step", 2.2, ""),
    _run("Whole steps of decoding beside torch's, of fp8 and int4 too", "decode", 3.0, "8B int4"),
    _run("How do GEMMs do beside cuBLAS?", "gemm", 1.5, "Llama 8B gate_up M=16"),
    _run("How does decode attention over pages do?", "paged", 1.5, "batch 1, 512 tokens"),
    _run("The backward pass, without torch's kernels: how many cycles?", "backward", 1.5, "d 128 causal"),
    _run("How do quantised matrices do?", "quant", 3.0, "int4 8B gate_up M=16"))


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="at most, for all of it (default 9.5)")
    parser.add_argument("--list", action="store_true", help="the steps, and what each is for")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N", help="begin with step N")
    parser.add_argument("--emulate", action="store_true", help="on the emulated GPU: a few rows, no times")
    parser.add_argument("--folder", type=Path, help="where results go (default bench/results)")
    parser.add_argument("--fa3", type=Path, metavar="PATH", help="what fa3.py built (default: its package)")
    parser.add_argument("--cases", type=Path, metavar="FILE", help="launches that record.py recorded")
    return parser.parse_args(words)


def describe(steps: tuple[Step, ...] = STEPS) -> str:
    """Returns a table of the steps."""
    ends = accumulate(step.minutes for step in steps)
    lines = [[str(number), f"{step.minutes:g}", f"{end:.1f}", " ".join((step.script, *step.words)),
              step.question]
             for number, (step, end) in enumerate(zip(steps, ends, strict=True), 1)]
    return table(["step", "minutes", "ends at", "command", "question"], lines)


def run(options: argparse.Namespace, steps: tuple[Step, ...] = STEPS) -> int:
    """Runs the steps that the minutes allow; returns the worst exit code."""
    end, worst = time.monotonic() + 60 * options.minutes, 0
    for number, step in list(enumerate(steps, 1))[options.first - 1:]:
        left = end - time.monotonic()
        if left < LEAST_S:
            print(f"\nout of time: the same command goes on with step {number} of {len(steps)}", flush=True)
            break
        print(f"\n**** step {number} of {len(steps)}: {step.question}", flush=True)
        command = step.command(min(step.minutes, left / 60), options)
        try: code = subprocess.run(command, check=False, timeout=left + LEAST_S).returncode
        except subprocess.TimeoutExpired: code = 1
        worst = max(worst, abs(code))
    return worst


def main() -> int:
    """Runs the campaign, or lists it."""
    options = parse_args()
    if options.list: print(describe())
    return 0 if options.list else run(options)


if __name__ == "__main__": sys.exit(main())
