"""Decoding on the CPU beside transformers, and llama.cpp where it is installed: same weights, same dtype,
same prompt, in one interleaved run.

    python bench/cpu/decode.py [MODEL ...] [--models box 37M …] [--tokens 64] [--repeat 7] [--plot]

MODEL is a directory; without one, the model in the box and random Llamas made on the spot (`MODELS`). Each
engine is a process that loads, warms up, and then answers one repetition of a mode, so that only one of them
computes at a time and each has its own peak memory:

    greedy     a prompt of 32 tokens and `--tokens` chosen after it
    sampled    the same with temperature 0.7, top_p 0.95 (texts are not compared; not by llama.cpp)
    prefill    a prompt of 512 tokens and the first chosen after it (models with room for that)

Neither stops at an end token; all use as many threads as the machine has cores. Times: first token from the
prompt's submission; tokens/s over the tokens after the first; of prefill, tokens of the prompt a second.
"start" is from process start to ready for greedy text: imports, loading, and whatever each engine compiles.

llama.cpp is `llama-cpp-python` (gguf_peer.py), with the package `gguf` to write the weights in its format
(gguf_writer.py).
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, spread, table

MODES = ("greedy", "sampled", "prefill")
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}
ENGINES = ("tinygrad_nv", "transformers", "llama.cpp")
OURS, THEIRS, LLAMA_CPP = ENGINES
BOX = Path(__file__).parents[2] / "models" / "tales"
PROMPT = [0, *range(20, 51)]                                   # 32 ids that every vocabulary has
LONG = [0, *(20 + i * 37 % 1900 for i in range(511))]          # 512
# random models: dtype, and what makes the configuration; Llamas, the 1B in the shape of Llama 3.2 1B, and
# mixtures of experts in the proportions of Mixtral and Qwen3-MoE
SMALL = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = {"num_experts": 64, "num_experts_per_tok": 8, "head_dim": 64, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "box": ("float32", {}),
    "37M": ("float32", {**SMALL, "intermediate_size": 1408, "num_hidden_layers": 7}),
    # as the 37M, every dimension a multiple of 256, as K-quants have them
    "38M": ("float32", {**SMALL, "intermediate_size": 1536, "num_hidden_layers": 7}),
    "60M": ("float32", {**SMALL, "intermediate_size": 1536, "num_hidden_layers": 14}),
    "1B": ("bfloat16", {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}),
    "mixtral-100M": ("float32", {**SMALL, **MIXTRAL, "intermediate_size": 1024, "num_hidden_layers": 6}),
    "mixtral-1B": ("bfloat16", {**LARGE, **MIXTRAL, "intermediate_size": 3584, "num_hidden_layers": 11}),
    "qwen3-100M": ("float32", {**SMALL, **QWEN3, "intermediate_size": 1536, "moe_intermediate_size": 256,
                               "num_hidden_layers": 3}),
    "qwen3-1B": ("bfloat16", {**LARGE, **QWEN3, "intermediate_size": 3072, "moe_intermediate_size": 512,
                              "num_hidden_layers": 9}),
}
FAMILIES = {"mixtral": "Mixtral", "qwen3": "Qwen3Moe"}     # by the start of a name; others are Llamas


def make_random(directory: Path, name: str) -> None:
    """One of `MODELS`, with random weights."""
    import torch
    import transformers
    torch.manual_seed(0)
    dtype, words = MODELS[name]
    network = getattr(transformers, f"{FAMILIES.get(name.split('-')[0], 'Llama')}ForCausalLM")
    config = network.config_class(max_position_embeddings=1024, tie_word_embeddings=True, **words)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    network(config).save_pretrained(directory)
    torch.set_default_dtype(before)


def work_ours(directory: str, tokens: int, dtype: str) -> None:
    """The tinygrad_nv process."""
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.sampling import SamplingParams
    # the prompt is computed, not remembered
    llm = LLM(directory, dtype, device="CPU", enable_prefix_caching=False)
    common = SamplingParams(max_tokens=tokens, ignore_eos=True)
    greedy = replace(common, temperature=0)
    params = {"greedy": greedy, "sampled": replace(common, **SAMPLED),
              "prefill": replace(greedy, max_tokens=1)}

    def once(mode: str) -> dict[str, Any]:
        prompt = LONG if mode == "prefill" else PROMPT
        done = llm.complete(prompt, params[mode])
        rate = len(prompt) / done.ttft_s if mode == "prefill" else done.tokens_per_s
        return {"ttft_s": done.ttft_s, "tokens_per_s": rate, "token_ids": list(done.token_ids)}
    _serve(once)


def work_theirs(directory: str, tokens: int, dtype: str) -> None:
    """The transformers process."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # nothing of the directory's own: no end token, which would be forbidden or stop the text, and no filters
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    modes: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "prefill": {"do_sample": False},
                                        "sampled": {"do_sample": True, "top_k": 0, **SAMPLED}}

    def run(count: int, mode: str) -> tuple[list[int], float]:
        prompt = torch.tensor([LONG if mode == "prefill" else PROMPT])
        begun = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count,
                             **modes[mode])
        return out[0, prompt.shape[1]:].tolist(), time.perf_counter() - begun

    def once(mode: str) -> dict[str, Any]:
        ids, first = run(1, mode)
        if mode == "prefill": return {"ttft_s": first, "tokens_per_s": len(LONG) / first, "token_ids": ids}
        ids, whole = run(tokens, mode)
        return {"ttft_s": first, "tokens_per_s": (tokens - 1) / (whole - first), "token_ids": ids}
    _serve(once)


def work_llama_cpp(directory: str, tokens: int, dtype: str) -> None:
    """The llama.cpp process."""
    from bench.cpu.gguf_peer import Session
    from bench.cpu.gguf_writer import write
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(Path(directory), path, dtype)
        session = Session(str(path), room=len(LONG) + 257)

    def once(mode: str) -> dict[str, Any]:
        prompt, count = (LONG, 1) if mode == "prefill" else (PROMPT, tokens)
        ids, first, whole = session.greedy(prompt, count)
        rate = len(prompt) / first if mode == "prefill" else (count - 1) / (whole - first)
        return {"ttft_s": first, "tokens_per_s": rate, "token_ids": ids}
    _serve(once)


WORK = {OURS: work_ours, THEIRS: work_theirs, LLAMA_CPP: work_llama_cpp}


def _serve(once: Callable[[str], dict[str, Any]]) -> None:
    from tinygrad_nv.runtime.memory import resident_bytes
    for _ in range(3): once("greedy")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin: print(json.dumps({**once(line.strip()), "rss_peak": resident_bytes()}), flush=True)


class Worker:
    """One engine's process."""

    def __init__(self, engine: str, directory: Path, dtype: str, tokens: int) -> None:
        command = [sys.executable, __file__, "--work", engine, str(directory), "--tokens", str(tokens),
                   "--dtype", dtype]
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

    def end(self) -> None:
        """The process has nothing more to answer."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


Runs = dict[str, list[dict[str, Any]]]  # an engine's repetitions


def engines() -> list[str]:
    """Returns the engines that are installed."""
    there = all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))
    return list(ENGINES) if there else [OURS, THEIRS]


def modes_of(engine: str, directory: Path) -> list[str]:
    """Returns the modes of an engine: prefill where the model has room, no draws of llama.cpp."""
    room = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    return [mode for mode in MODES if not (mode == "prefill" and room <= len(LONG))
            and not (mode == "sampled" and engine == LLAMA_CPP)]


def compare(name: str, directory: Path, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All engines on one directory, repetitions in turn."""
    workers = {engine: Worker(engine, directory, dtype, arguments.tokens) for engine in engines()}
    asked = {engine: modes_of(engine, directory) for engine in workers}
    for engine, worker in workers.items():
        for mode in asked[engine]: worker.once(mode)
    runs: dict[str, Runs] = {mode: {engine: [] for engine in workers if mode in asked[engine]}
                             for mode in asked[OURS]}
    for _ in range(arguments.repeat):
        for mode, done in runs.items():
            for engine in done: done[engine].append(workers[engine].once(mode))
    for worker in workers.values(): worker.end()
    start_s = {engine: worker.start_s for engine, worker in workers.items()}
    same = identical(runs["greedy"])
    for run in [run for done in runs.values() for each in done.values() for run in each]: del run["token_ids"]
    ratios = {mode: {engine: ratio_of(done, engine) for engine in done if engine != OURS}
              for mode, done in runs.items()}
    print(f"\n{name}, {dtype}, prompt {len(PROMPT)}, {arguments.tokens} tokens")
    print(table(["", "tokens/s", "spread", "first ms", "peak MB", "start s"], rows(runs, start_s)))
    for engine in list(workers)[1:]:
        each = ", ".join(f"{mode} {median(by[engine]):.2f} ({spread(by[engine])})"
                         for mode, by in ratios.items() if engine in by)
        print(f"{OURS} / {engine}: {each}")
    print(f"first {same} greedy tokens of {OURS} and {THEIRS} identical")
    return {"name": name, "dtype": dtype, "identical_tokens": same, "runs": runs, "start_s": start_s,
            "ratio": {mode: median(by[THEIRS]) for mode, by in ratios.items()}}


def ratio_of(done: Runs, engine: str) -> list[float]:
    """Tokens/s of ours over another's, turn by turn."""
    return [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(done[OURS], done[engine], strict=True)]


def identical(runs: Runs) -> int:
    """How many tokens the first texts of ours and of transformers share from the start."""
    texts = [runs[engine][0]["token_ids"] for engine in (OURS, THEIRS)]
    return next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), len(texts[0]))


def rows(runs: dict[str, Runs], start_s: dict[str, float]) -> list[list[str]]:
    """A row of the table for each mode and engine."""
    made = []
    for mode, engine in ((mode, engine) for mode, done in runs.items() for engine in done):
        done = runs[mode][engine]
        rates = [run["tokens_per_s"] for run in done]
        first_ms = median(run["ttft_s"] for run in done) * 1e3
        made.append([f"{engine}, {mode}", f"{median(rates):.1f}", spread(rates), f"{first_ms:.1f}",
                     f"{max(run['rss_peak'] for run in done) / 1e6:.0f}", f"{start_s[engine]:.1f}"])
    return made


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens/s of all engines, greedy, a bar each, a panel a model."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(results), figsize=(3.2 * len(results), 3), layout="constrained",
                                   squeeze=False)
    for ax, result in zip(axes[0], results, strict=True):
        done = result["runs"]["greedy"]
        rates = [[run["tokens_per_s"] for run in each] for each in done.values()]
        middle = [median(r) for r in rates]
        error = [[m - min(r) for m, r in zip(middle, rates, strict=True)],
                 [max(r) - m for m, r in zip(middle, rates, strict=True)]]
        ax.bar(list(done), middle, yerr=error, capsize=4, color=["#2a6f97", "#bcb8b1", "#8d99ae"][:len(done)])
        ax.set_title(f"{result['name']}, {result['dtype']}")
        ax.set_ylabel("tokens/s")
    figure.savefig(path, dpi=150)


@contextmanager
def model_directory(name: str) -> Iterator[Path]:
    """The directory of one of `MODELS`, for as long as it is needed."""
    if name == "box":
        yield BOX
        return
    with tempfile.TemporaryDirectory() as directory:
        make_random(Path(directory), name)
        yield Path(directory)


def main() -> None:
    """Runs the comparison, or one engine's side of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directories", nargs="*", type=Path, metavar="MODEL", help="directories of models")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["box", "37M", "1B"],
                        help="without MODEL: the one in the box, random ones (default box, 37M and 1B)")
    parser.add_argument("--tokens", type=int, default=64, help="to generate (default 64)")
    parser.add_argument("--repeat", type=int, default=7, help="turns of each side (default 7)")
    parser.add_argument("--dtype", help="of all sides (default: float32, of the 1B bfloat16)")
    parser.add_argument("--plot", action="store_true", help="draw the result as well")
    parser.add_argument("--work", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        WORK[arguments.work](str(arguments.directories[0]), arguments.tokens, arguments.dtype)
        return
    if arguments.directories:
        for path in arguments.directories: compare(path.name, path, arguments.dtype or "float32", arguments)
        return
    results = []
    for name in arguments.models:
        title = "model in the box" if name == "box" else f"random {name}"
        with model_directory(name) as directory:
            results.append(compare(title, directory, arguments.dtype or MODELS[name][0], arguments))
    path = save("cpu_decode", {"tokens": arguments.tokens, "results": results})
    if arguments.plot: plot(results, path.with_suffix(".png"))


if __name__ == "__main__": main()
