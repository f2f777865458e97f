"""Decoding on the CPU beside transformers: same directory, same dtype, same prompt, in one interleaved run.

    python bench/cpu_decode.py [MODEL ...] [--tokens 128] [--repeat 7] [--dtype float32] [--plot]

Without MODEL: the model in the box and a random Llama of 60M parameters made on the spot. Each engine is a
process that loads, warms up, and then answers "greedy" or "sampled" (temperature 0.7, top_p 0.95; its texts
are not compared) with one repetition, so that only one of them computes at a time and each has its own peak
memory. Neither stops at an end token; both use as many threads as the machine has cores. Times: first token
from the prompt's submission; tokens/s over the tokens after the first. "start" is from process start to
ready for greedy text: imports, loading, and whatever each engine compiles.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from measure import save, spread, table

MODES = ("greedy", "sampled")
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
ENGINES = ("tinygrad_nv", "transformers")
BOX = Path(__file__).parent.parent / "models" / "tales"
PROMPT = [0, *range(20, 51)]  # 32 ids that every vocabulary has


def make_random(directory: Path) -> None:
    """A random Llama of 60M parameters: 14 layers of 512, vocabulary 32000 tied."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=14,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024,
                         tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(directory)


def work_ours(directory: str, tokens: int, dtype: str) -> None:
    """The tinygrad_nv process."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    llm = LLM(directory, dtype, device="CPU")
    common = SamplingParams(max_tokens=tokens, ignore_eos=True)
    params = {"greedy": replace(common, temperature=0), "sampled": replace(common, **SAMPLED)}

    def once(mode: str) -> dict[str, Any]:
        llm.decoder.held = []  # the prompt is computed, not remembered
        done = llm.complete(PROMPT, params[mode])
        return {"ttft_s": done.ttft_s, "tokens_per_s": done.tokens_per_s, "token_ids": list(done.token_ids)}
    _serve(once)


def work_theirs(directory: str, tokens: int, dtype: str) -> None:
    """The transformers process."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # nothing of the directory's own: no end token, which would be forbidden or stop the text, and no filters
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    modes: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False},
                                        "sampled": {"do_sample": True, "top_k": 0, **SAMPLED}}
    prompt = torch.tensor([PROMPT])

    def run(count: int, mode: str) -> tuple[list[int], float]:
        begun = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                             **modes[mode])
        return out[0, len(PROMPT):].tolist(), time.perf_counter() - begun

    def once(mode: str) -> dict[str, Any]:
        first = run(1, mode)[1]
        ids, whole = run(tokens, mode)
        return {"ttft_s": first, "tokens_per_s": (tokens - 1) / (whole - first), "token_ids": ids}
    _serve(once)


def _serve(once: Callable[[str], dict[str, Any]]) -> None:
    from tinygrad_nv.runtime.memory import resident_bytes
    for _ in range(3): once("greedy")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin: print(json.dumps({**once(line.strip()), "rss_peak": resident_bytes()}), flush=True)


class Worker:
    """One engine's process."""

    def __init__(self, engine: str, directory: Path, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--work", engine, str(directory),
                   "--tokens", str(arguments.tokens), "--dtype", arguments.dtype]
        begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()
        self.start_s = time.perf_counter() - begun

    def answer(self) -> dict[str, Any]:
        """The process's next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line: raise SystemExit(f"{self.process.args!r} ended early")
        return dict(json.loads(line))

    def once(self, mode: str) -> dict[str, Any]:
        """One repetition."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{mode}\n")
        self.process.stdin.flush()
        return self.answer()


Runs = dict[str, list[dict[str, Any]]]  # an engine's repetitions


def compare(name: str, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both engines on one directory, repetitions in turn."""
    workers = {engine: Worker(engine, directory, arguments) for engine in ENGINES}
    for _ in range(3):
        for worker in workers.values(): worker.once("sampled")
    runs: dict[str, Runs] = {mode: {engine: [] for engine in ENGINES} for mode in MODES}
    for _ in range(arguments.repeat):
        for mode in MODES:
            for engine, worker in workers.items(): runs[mode][engine].append(worker.once(mode))
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    start_s = {engine: worker.start_s for engine, worker in workers.items()}
    same = identical(runs["greedy"])
    for done in [done for mode in MODES for done in runs[mode].values()]:
        for run in done: del run["token_ids"]
    ratios = {mode: [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(*runs[mode].values(), strict=True)]
              for mode in MODES}
    print(f"\n{name}, {arguments.dtype}, prompt {len(PROMPT)}, {arguments.tokens} tokens")
    print(table(["", "tokens/s", "spread", "first ms", "peak MB", "start s"], rows(runs, start_s)))
    each = ", ".join(f"{mode} {median(ratios[mode]):.2f} ({spread(ratios[mode])})" for mode in MODES)
    print(f"tinygrad_nv / transformers: {each}; first {same} greedy tokens identical")
    return {"name": name, "ratio": {mode: median(ratios[mode]) for mode in MODES}, "identical_tokens": same,
            "runs": runs, "start_s": start_s}


def identical(runs: Runs) -> int:
    """How many tokens both engines' first texts share from the start."""
    texts = [done[0]["token_ids"] for done in runs.values()]
    return next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), len(texts[0]))


def rows(runs: dict[str, Runs], start_s: dict[str, float]) -> list[list[str]]:
    """A row of the table for each mode and engine."""
    made = []
    for mode, engine in ((mode, engine) for mode in MODES for engine in ENGINES):
        done = runs[mode][engine]
        rates = [run["tokens_per_s"] for run in done]
        first_ms = median(run["ttft_s"] for run in done) * 1e3
        made.append([f"{engine}, {mode}", f"{median(rates):.1f}", spread(rates), f"{first_ms:.1f}",
                     f"{max(run['rss_peak'] for run in done) / 1e6:.0f}", f"{start_s[engine]:.1f}"])
    return made


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s of both engines, greedy, a pair of bars a model."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(results), figsize=(3.2 * len(results), 3), layout="constrained")
    for ax, result in zip([axes] if len(results) == 1 else axes, results, strict=True):
        rates = [[run["tokens_per_s"] for run in result["runs"]["greedy"][engine]] for engine in ENGINES]
        middle = [median(r) for r in rates]
        error = [[m - min(r) for m, r in zip(middle, rates, strict=True)],
                 [max(r) - m for m, r in zip(middle, rates, strict=True)]]
        ax.bar(ENGINES, middle, yerr=error, capsize=4, color=["#2a6f97", "#bcb8b1"])
        ax.set_title(result["name"])
        ax.set_ylabel("tokens/s")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs the comparison, or one engine's side of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, metavar="DIRECTORY",
                        help="models (default: the one in the box, and a random one of 60M parameters)")
    parser.add_argument("--tokens", type=int, default=128, help="to generate (default 128)")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--dtype", default="float32", help="of both sides (default float32)")
    parser.add_argument("--plot", action="store_true", help="draw the result as well")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work = work_ours if arguments.work == "tinygrad_nv" else work_theirs
        work(str(arguments.models[0]), arguments.tokens, arguments.dtype)
        return
    with tempfile.TemporaryDirectory() as name:
        models = {str(path): path for path in arguments.models}
        if not models:
            make_random(Path(name))
            models = {"model in the box": BOX, "random 60M": Path(name)}
        results = [compare(title, path, arguments) for title, path in models.items()]
    path = save("cpu_decode", {"dtype": arguments.dtype, "tokens": arguments.tokens, "results": results})
    if arguments.plot: plot(results, path.with_suffix(".png"))


if __name__ == "__main__": main()
