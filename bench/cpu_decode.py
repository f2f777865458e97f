"""Decoding on the CPU beside transformers: same directory, same dtype, same prompt, in one interleaved run.

    python bench/cpu_decode.py [MODEL ...] [--tokens 128] [--repeat 7] [--dtype float32] [--plot]

Without MODEL: the model in the box and a random Llama of 60M parameters made on the spot. Each engine is a
process that loads, warms up, and then answers "go" with one repetition, so that only one of them computes
at a time and each has its own peak memory. Greedy, end tokens ignored; both use as many threads as the
machine has cores. Times: first token from the prompt's submission; tokens/s over the tokens after the
first. "start" is from process start to ready: imports, loading, and whatever each engine compiles.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import save, spread, table

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
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def once() -> dict[str, Any]:
        llm.decoder.held = []  # the prompt is computed, not remembered
        done = llm.complete(PROMPT, params)
        return {"ttft_s": done.ttft_s, "tokens_per_s": done.tokens_per_s, "token_ids": list(done.token_ids)}
    _serve(once)


def work_theirs(directory: str, tokens: int, dtype: str) -> None:
    """The transformers process."""
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    prompt = torch.tensor([PROMPT])

    def run(count: int) -> tuple[list[int], float]:
        begun = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                             min_new_tokens=count, do_sample=False, temperature=None, top_p=None, top_k=None,
                             pad_token_id=0)
        return out[0, len(PROMPT):].tolist(), time.perf_counter() - begun

    def once() -> dict[str, Any]:
        first = run(1)[1]
        ids, whole = run(tokens)
        return {"ttft_s": first, "tokens_per_s": (tokens - 1) / (whole - first), "token_ids": ids}
    _serve(once)


def _serve(once: Any) -> None:
    from tinygrad_nv.runtime.memory import resident_bytes
    for _ in range(3): once()
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin: print(json.dumps({**once(), "rss_peak": resident_bytes()}), flush=True)


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

    def once(self) -> dict[str, Any]:
        """One repetition."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()


def compare(name: str, directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both engines on one directory, repetitions in turn."""
    workers = {engine: Worker(engine, directory, arguments) for engine in ENGINES}
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(arguments.repeat):
        for engine, worker in workers.items(): runs[engine].append(worker.once())
    for worker in workers.values():
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.wait()
    ids = {engine: done[0].pop("token_ids") for engine, done in runs.items()}
    same = next((i for i, (a, b) in enumerate(zip(*ids.values(), strict=True)) if a != b), arguments.tokens)
    rows = []
    for engine, done in runs.items():
        for run in done: run.pop("token_ids", None)
        rates = [run["tokens_per_s"] for run in done]
        first_ms = median(run["ttft_s"] for run in done) * 1e3
        rows.append([engine, f"{median(rates):.1f}", spread(rates), f"{first_ms:.1f}",
                     f"{max(r['rss_peak'] for r in done) / 1e6:.0f}", f"{workers[engine].start_s:.1f}"])
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(*runs.values(), strict=True)]
    print(f"\n{name}, {arguments.dtype}, prompt {len(PROMPT)}, {arguments.tokens} tokens")
    print(table(["", "tokens/s", "spread", "first ms", "peak MB", "start s"], rows))
    print(f"tinygrad_nv / transformers = {median(ratios):.2f} ({spread(ratios)}); "
          f"first {same} tokens identical")
    return {"name": name, "ratio": median(ratios), "identical_tokens": same, "runs": runs,
            "start_s": {engine: worker.start_s for engine, worker in workers.items()}}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s of both engines, a pair of bars a model."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(results), figsize=(3.2 * len(results), 3), layout="constrained")
    for ax, result in zip([axes] if len(results) == 1 else axes, results, strict=True):
        rates = [[run["tokens_per_s"] for run in result["runs"][engine]] for engine in ENGINES]
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
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plot", action="store_true")
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
