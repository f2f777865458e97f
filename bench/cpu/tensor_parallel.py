"""Decode of one sequence by two ranks of one thread each, beside one process with two threads.

    python bench/cpu/tensor_parallel.py [MODEL] [--ranks 2] [--device CPU]

Both are loaded at the start, each in a process of its own, and take turns: `--tokens` tokens, `--rounds`
times. MODEL is a directory; without it, one of 1.2 billion random weights (startup_model.py) is made. Times
are of a token after the first. What collectives take is measured beside it: a graph of those of one step, of
the same sizes, between ranks of the same number, none of which has to wait for another's compute. Writes
bench/results/tensor_parallel.json.
"""
from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import ask, save, spread, table
from bench.serving import startup_model

REPEATS = 32    # of a step's collectives, in one graph
PROMPT = [5] * 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--collectives", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.collectives: return collectives(arguments)
    if arguments.side: return side(arguments)
    with tempfile.TemporaryDirectory() as place:
        if arguments.model is None:
            arguments.model = f"{place}/billion"
            startup_model.write(Path(arguments.model))
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Both sides in turn, and what rank 0 of the collectives printed."""
    launch = [sys.executable, "-m", "tinygrad_nv", "launch", "-n", str(arguments.ranks), "--quiet"]
    ran = subprocess.run([*launch, *_again(arguments, "--collectives")], check=True, capture_output=True,
                         text=True)
    stated = float(ran.stdout.split()[-1])
    sides = [subprocess.Popen([sys.executable, *_again(arguments, "--side", str(ranks))], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)
             for ranks in (1, arguments.ranks)]
    times: list[list[float]] = [[], []]
    for each in sides: ask(each)     # loaded, and warm
    for number in range(arguments.rounds):
        for which in (0, 1) if number % 2 else (1, 0): times[which].append(float(ask(sides[which])))
    for each in sides: each.communicate("")
    report(arguments, times, stated)


def _again(arguments: argparse.Namespace, *more: str) -> list[str]:
    return [__file__, arguments.model, "--ranks", str(arguments.ranks), "--device", arguments.device,
            "--tokens", str(arguments.tokens), *more]


def side(arguments: argparse.Namespace) -> None:
    """One contender: a turn for each line it reads."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    llm = LLM(arguments.model, device=arguments.device, tensor_parallel_size=arguments.side,
              max_model_len=256, max_num_seqs=1)
    for _ in sys.stdin:
        took = []
        for tokens in (1, 1 + arguments.tokens):
            begun = time.perf_counter()
            llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=tokens, temperature=0,
                                                                        ignore_eos=True), use_tqdm=False)
            took.append(time.perf_counter() - begun)
        print((took[1] - took[0]) / arguments.tokens * 1e3, flush=True)
    llm.close()


def collectives(arguments: argparse.Namespace) -> None:
    """Milliseconds for the collectives of a step: two sums a layer, and the choices of all ranks."""
    from tinygrad import Tensor, TinyJit, dtypes

    from tinygrad_nv.dist.collectives.functions import all_gather, all_reduce
    from tinygrad_nv.dist.group import close, init
    world = init()
    group = world.group()
    config = json.loads((Path(arguments.model) / "config.json").read_text())
    hidden = Tensor.zeros(config["hidden_size"], dtype=dtypes.bfloat16).contiguous().realize()
    choice = Tensor.zeros(1, dtype=dtypes.uint64).contiguous().realize()

    @TinyJit
    def step(x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(2 * config["num_hidden_layers"]): x = all_reduce(x, group, name=f"sum {i}")
        return x.realize(), all_gather(choice, group, name="choices").realize()
    took = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        step(hidden, choice)
        took.append(time.perf_counter() - begun)
    if world.rank == 0: print(statistics.median(took[3:]) * 1e3)
    close()


def report(arguments: argparse.Namespace, times: list[list[float]], stated: float) -> None:
    """A table, and the file."""
    one, many = (statistics.median(each) for each in times)
    rows: list[tuple[str, ...]] = [("1 process", f"{one:.2f}", spread(times[0])),
                                   (f"{arguments.ranks} ranks", f"{many:.2f}", spread(times[1]))]
    print(table(("", "ms a token", "of rounds"), rows))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    print(f"ranks / one process: {statistics.median(ratios):.3f} of the speed, {spread(ratios)}; "
          f"collectives of a step alone {stated:.3f} ms")
    found: dict[str, Any] = {"model": Path(arguments.model).name, "ranks": arguments.ranks,
                             "ms_a_token": {"one": times[0], "ranks": times[1]}, "collectives_ms": stated}
    save("tensor_parallel", found)


if __name__ == "__main__": main()
