"""GGUF files on the CPU beside llama.cpp: the same file, the same prompts, in one interleaved run.

    python bench/cpu_gguf.py FILE.gguf … [--tokens 129] [--prompt 512] [--repeat 9] [--peer PYTHON] [--save]

gguf_models.py makes files of random models. Each engine is a process that loads, warms up, and then answers
one repetition of a mode, so that only one of them computes at a time. Both use as many threads as the machine
has cores:

    tg      tokens/s of `--tokens` greedy ones after the first, after a prompt of 32
    pp      tokens/s of a prompt of `--prompt`, with the first token chosen after it

A ratio is of neighbouring repetitions, so that what slows both for a while cancels. A pair during which other
processes took more than `QUIET` of the cores is not counted (Linux): threads that wait for each other suffer
more than others. llama.cpp is `llama-cpp-python`, built for this processor (gguf_peer.py). `--peer` is the
Python that has it, where this one has not.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measure import save, spread, table

MODES, ENGINES = ("tg", "pp"), ("tinygrad_nv", "llama.cpp")
OURS, THEIRS = ENGINES
QUIET = 0.05    # of the cores that others may take
PATIENCE = 4    # times as many pairs as are asked for, before those that are not quiet count, too
SHORT = [0, *range(20, 51)]     # 32 ids that every vocabulary has


def prompt_of(mode: str, count: int) -> list[int]:
    """Of decoding the short one, else `count` ids."""
    return SHORT if mode == "tg" else [0, *(20 + i * 37 % 1900 for i in range(count - 1))]


def rate(mode: str, prompt: list[int], count: int, first: float, whole: float) -> float:
    """Tokens/s, of the prompt or of those after the first."""
    return len(prompt) / first if mode == "pp" else (count - 1) / (whole - first)


def work_ours(path: str, arguments: argparse.Namespace) -> Callable[[str], float]:
    """The tinygrad_nv process."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    llm = LLM(path, arguments.dtype, device="CPU", max_num_seqs=1, enable_prefix_caching=False)

    def once(mode: str) -> float:
        prompt, count = prompt_of(mode, arguments.prompt), arguments.tokens if mode == "tg" else 1
        done = llm.complete(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return rate(mode, prompt, count, done.ttft_s, done.ttft_s + done.decode_s)
    return once


def work_theirs(path: str, arguments: argparse.Namespace) -> Callable[[str], float]:
    """The llama.cpp process."""
    from gguf_peer import Session
    session = Session(path, arguments.prompt + arguments.tokens + 256)

    def once(mode: str) -> float:
        prompt, count = prompt_of(mode, arguments.prompt), arguments.tokens if mode == "tg" else 1
        _, first, whole = session.greedy(prompt, count)
        return rate(mode, prompt, count, first, whole)
    return once


WORK = {OURS: work_ours, THEIRS: work_theirs}


def serve(once: Callable[[str], float]) -> None:
    """Answers a line for each mode on stdin."""
    for _ in range(3):
        for mode in MODES: once(mode)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin: print(json.dumps(once(line.strip())), flush=True)


class Worker:
    """One engine's process."""

    def __init__(self, engine: str, path: Path, arguments: argparse.Namespace) -> None:
        python = arguments.peer if engine == THEIRS else sys.executable
        command = [python, __file__, str(path), "--work", engine, "--dtype", arguments.dtype,
                   "--tokens", str(arguments.tokens), "--prompt", str(arguments.prompt)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def answer(self) -> Any:
        """The process's next line."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()): raise SystemExit("a process ended early")
        return json.loads(line)

    def once(self, mode: str) -> float:
        """One repetition: tokens/s."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mode}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def ticks(self) -> int:
        """Of CPU time that it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def end(self) -> None:
        """The process has nothing more to answer."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def pair(workers: dict[str, Worker], mode: str) -> tuple[float, dict[str, float]]:
    """A repetition of each engine, and the share of the cores that other processes had."""
    if not Path("/proc/stat").exists():
        return 0.0, {each: worker.once(mode) for each, worker in workers.items()}
    worst, rates = 0.0, {}
    for engine, worker in workers.items():
        before = [*machine_ticks(), sum(each.ticks() for each in workers.values())]
        rates[engine] = worker.once(mode)
        after = [*machine_ticks(), sum(each.ticks() for each in workers.values())]
        all_, busy, own = (b - a for a, b in zip(before, after, strict=True))
        worst = max(worst, (busy - own) / max(all_, 1))
    return worst, rates


def machine_ticks() -> tuple[int, int]:
    """Of all cores since it started: in all, and not idle."""
    fields = list(map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]))
    return sum(fields), sum(fields) - fields[3] - fields[4]


def compare(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both engines on one file, repetitions in turn."""
    workers = {engine: Worker(engine, path, arguments) for engine in ENGINES}
    found = {mode: [pair(workers, mode) for _ in range(arguments.repeat)] for mode in MODES}
    for mode, pairs in found.items():
        for _ in range(PATIENCE * arguments.repeat):
            if sum(others <= QUIET for others, _ in pairs) >= arguments.repeat: break
            pairs.append(pair(workers, mode))
        pairs.sort(key=lambda each: each[0])
    runs = {mode: {each: [rates[each] for _, rates in pairs[:arguments.repeat]] for each in ENGINES}
            for mode, pairs in found.items()}
    for worker in workers.values(): worker.end()
    ratios = {mode: [a / b for a, b in zip(done[OURS], done[THEIRS], strict=True)]
              for mode, done in runs.items()}
    def cell(rates: list[float], digits: int) -> str: return f"{median(rates):.{digits}f} ({spread(rates)})"
    shares = {mode: pairs[arguments.repeat - 1][0] for mode, pairs in found.items()}
    rows = [[f"{path.name}, {mode}", *(cell(done[each], 1) for each in ENGINES), cell(ratios[mode], 2)]
            for mode, done in runs.items()]
    print(table(["tokens/s", *ENGINES, "ratio"], rows), flush=True)
    for mode, share in shares.items():
        if share > QUIET: print(f"{mode}: other processes took up to {share:.0%} of the cores", flush=True)
    return {"file": path.name, "bytes": path.stat().st_size, "types": types_of(path), "runs": runs,
            "others": shares, "ratio": {mode: median(each) for mode, each in ratios.items()}}


def types_of(path: Path) -> dict[str, int]:
    """How many matrices of a file have each type."""
    import gguf
    tensors = gguf.GGUFReader(path).tensors
    return dict(Counter(each.tensor_type.name for each in tensors if len(each.shape) > 1))


def main() -> None:
    """Runs the comparison, or one engine's side of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tokens", type=int, default=129, help="to generate (default 129)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a long prompt (default 512)")
    parser.add_argument("--repeat", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--dtype", default="auto", help="of tinygrad_nv's activations (default auto)")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument("--save", action="store_true", help="keep the result beside the others")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        serve(WORK[arguments.work](str(arguments.files[0]), arguments))
        return
    results = [compare(path, arguments) for path in arguments.files]
    if arguments.save:
        save("cpu_gguf", {"tokens": arguments.tokens, "prompt": arguments.prompt, "dtype": arguments.dtype,
                          "results": results})


if __name__ == "__main__": main()
