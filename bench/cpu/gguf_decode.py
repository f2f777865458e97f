"""GGUF files on the CPU beside llama.cpp, and transformers: the same prompts, in one interleaved run.

    python bench/cpu/gguf_decode.py FILE.gguf … [--tokens 129] [--prompt 512] [--repeat 9] [--peer PYTHON]
    [--save]

gguf_models.py makes files of random models. Each engine is a process that loads, warms up, and then answers
one repetition of a mode, so that only one of them computes at a time. Both use as many threads as the machine
has cores:

    tg      tokens/s of `--tokens` greedy ones after the first, after a prompt of 32
    pp      tokens/s of a prompt of `--prompt`, with the first token chosen after it

With `--cpu-time` seconds are those of CPU time that a process took, on one thread, of which other processes
take none: where a machine cannot be had alone. Decoding is then a run of `--tokens` less one of a token.

A ratio is of neighbouring repetitions, so that what slows both for a while cancels. A pair during which other
processes took more than `QUIET` of the cores is not counted (Linux): threads that wait for each other suffer
more than others. transformers runs the floats that a file was made of in float32, where their directory is
beside it (gguf_models.py). llama.cpp is `llama-cpp-python`, built for this processor (gguf_peer.py). `--peer`
is the Python that has it, where this one has not.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, spread, table

MODES, ENGINES = ("tg", "pp"), ("tinygrad_nv", "llama.cpp", "transformers")
OURS, THEIRS, FLOATS = ENGINES
QUIET = 0.05    # of the cores that others may take
PATIENCE = 4    # times as many pairs as are asked for, before those that are not quiet count, too
LAST_LINES = 12     # of what a process that ended has written
SHORT = [0, *range(20, 51)]     # 32 ids that every vocabulary has


def prompt_of(mode: str, count: int) -> list[int]:
    """Returns the prompt: of decoding the short one, else `count` ids."""
    return SHORT if mode == "tg" else [0, *(20 + i * 37 % 1900 for i in range(count - 1))]


def rate(mode: str, prompt: list[int], count: int, first: float, whole: float) -> float:
    """Tokens/s, of the prompt or of those after the first. Raises `ValueError` for an answer of one token."""
    if mode == "pp": return len(prompt) / first
    if count < 2 or whole <= first:
        raise ValueError(f"an answer of {count} tokens, expected at least 2: what is measured is the time "
                         "after the first; to fix: raise --tokens")
    return (count - 1) / (whole - first)


def make_timer(run: Callable[[list[int], int], tuple[float, float]],
               arguments: argparse.Namespace) -> Callable[[str], float]:
    """Tokens/s of a mode: `run` gives seconds to the first token of so many, and in all."""
    def cpu_seconds(prompt: list[int], count: int) -> float:
        begun = time.process_time()
        run(prompt, count)
        return time.process_time() - begun

    def once(mode: str) -> float:
        prompt, count = prompt_of(mode, arguments.prompt), arguments.tokens if mode == "tg" else 1
        if not arguments.cpu_time: return rate(mode, prompt, count, *run(prompt, count))
        first = cpu_seconds(prompt, 1)
        return rate(mode, prompt, count, first, first if count == 1 else cpu_seconds(prompt, count))
    return once


def work_ours(path: str, arguments: argparse.Namespace) -> Callable[[str], float]:
    """The tinygrad_nv process."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    llm = LLM(path, arguments.dtype, device="CPU", max_num_seqs=1, enable_prefix_caching=False)

    def run(prompt: list[int], count: int) -> tuple[float, float]:
        done = llm.complete(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        return done.ttft_s, done.ttft_s + done.decode_s
    return make_timer(run, arguments)


def work_theirs(path: str, arguments: argparse.Namespace) -> Callable[[str], float]:
    """The llama.cpp process."""
    from bench.cpu.gguf_peer import Session
    session = Session(path, arguments.prompt + arguments.tokens + 256, 1 if arguments.cpu_time else None)
    return make_timer(lambda prompt, count: session.greedy(prompt, count)[1:], arguments)


def work_floats(path: str, arguments: argparse.Namespace) -> Callable[[str], float]:
    """The transformers process."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(directory_of(Path(path)), dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    if arguments.cpu_time: torch.set_num_threads(1)

    def generate(ids: list[int], count: int) -> float:
        prompt, begun = torch.tensor([ids]), time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
        return time.perf_counter() - begun

    def run(ids: list[int], count: int) -> tuple[float, float]:
        first = 0.0 if arguments.cpu_time else generate(ids, 1)
        return first, generate(ids, count) if count > 1 or arguments.cpu_time else first
    return make_timer(run, arguments)


def directory_of(path: Path) -> Path:
    """The floats that a file was made of."""
    return path.parent / (path.stem.rpartition("-")[0] or path.name)


WORK = {OURS: work_ours, THEIRS: work_theirs, FLOATS: work_floats}


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
        alone = {"NUM_CPU_THREADS": "1", "OMP_NUM_THREADS": "1"} if arguments.cpu_time else {}
        self.engine, self.path, self.errors = engine, path, tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen([*command, *["--cpu-time"] * arguments.cpu_time], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
                                        env=os.environ | alone)
        self.answer()

    def answer(self) -> Any:
        """The process's next line."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()): raise SystemExit(self.why_ended())
        return json.loads(line)

    def why_ended(self) -> str:
        """Returns which process ended, how, and its last lines."""
        code = self.process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        return "\n  ".join([f"{self.path.name}: the process of {self.engine} ended {how}"
                            + (", and wrote:" if last else ", and wrote nothing"), *last])

    def once(self, mode: str) -> float:
        """One repetition: tokens/s."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{mode}\n")
            self.process.stdin.flush()
        except BrokenPipeError: raise SystemExit(self.why_ended()) from None
        return float(self.answer())

    def ticks(self) -> int:
        """Returns the ticks of CPU time that it has taken."""
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
    """Returns the ticks of all cores since the machine started: in all, and not idle."""
    fields = list(map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]))
    return sum(fields), sum(fields) - fields[3] - fields[4]


def compare(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both engines on one file, repetitions in turn."""
    there = [engine for engine in ENGINES if engine != FLOATS or directory_of(path).is_dir()]
    workers = {engine: Worker(engine, path, arguments) for engine in there}
    found = {mode: [pair(workers, mode) for _ in range(arguments.repeat)] for mode in MODES}
    for mode, pairs in found.items():
        for _ in range(0 if arguments.cpu_time else PATIENCE * arguments.repeat):
            if sum(others <= QUIET for others, _ in pairs) >= arguments.repeat: break
            pairs.append(pair(workers, mode))
        pairs.sort(key=lambda each: each[0])
    runs = {mode: {each: [rates[each] for _, rates in pairs[:arguments.repeat]] for each in there}
            for mode, pairs in found.items()}
    for worker in workers.values(): worker.end()
    ratios = {mode: {peer: [a / b for a, b in zip(done[OURS], done[peer], strict=True)] for peer in there[1:]}
              for mode, done in runs.items()}
    def cell(rates: list[float], digits: int) -> str: return f"{median(rates):.{digits}f} ({spread(rates)})"
    shares = {mode: pairs[arguments.repeat - 1][0] for mode, pairs in found.items()}
    rows = [[f"{path.name}, {mode}", *(cell(done[each], 1) for each in there),
             *(cell(each, 2) for each in ratios[mode].values())] for mode, done in runs.items()]
    print(table(["tokens/s", *there, *(f"/ {peer}" for peer in there[1:])], rows), flush=True)
    for mode, share in shares.items():
        if share > QUIET: print(f"{mode}: other processes took up to {share:.0%} of the cores", flush=True)
    return {"file": path.name, "bytes": path.stat().st_size, "types": types_of(path), "runs": runs,
            "others": shares,
            "ratio": {mode: {peer: median(each) for peer, each in by.items()} for mode, by in ratios.items()}}


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
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, not of a clock")
    parser.add_argument("--dtype", default="auto", help="of tinygrad_nv's activations (default auto)")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument("--save", nargs="?", const="cpu_gguf", metavar="NAME",
                        help="keep the result beside the others")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        serve(WORK[arguments.work](str(arguments.files[0]), arguments))
        return
    results = []
    for path in arguments.files:
        results.append(compare(path, arguments))
        if not arguments.save: continue
        save(arguments.save, {"tokens": arguments.tokens, "prompt": arguments.prompt,
                              "cpu_time": arguments.cpu_time, "dtype": arguments.dtype, "results": results})


if __name__ == "__main__": main()
