"""`tinygrad-nv compile MODEL -o model.tnv`: a bundle that runs without a compiler.

Protocol: prints the file, its size, its hash, and what it was compiled for; progress goes to stderr.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tinygrad_nv.errors import ConfigError


def add_command(commands: Any, directory: str, model: Callable[[str | None], Path],
                size: Callable[[str], int]) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("compile", help="a model as one file that runs without a compiler")
    parser.add_argument("model", nargs="?", metavar="MODEL", help=directory)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the bundle: x.tnv")
    parser.add_argument("--arch", default="cpu", metavar="A,B",
                        help="what kernels are made for: sm_80, sm_89, sm_90a; cpu-portable, cpu-avx2, "
                        "cpu-avx512, cpu-amx; cpu: this processor (default)")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N",
                        help="sequences at a time (default 64)")
    parser.add_argument("--max-model-len", type=size, metavar="N", help="context in tokens (default: the "
                        "model's, as far as a default cache has room)")
    parser.add_argument("--max-num-batched-tokens", type=size, default=512, metavar="N",
                        help="tokens of a step (default 512)")
    parser.add_argument("--num-pages", type=int, metavar="N", help="pages of the KV cache (default: as many "
                        "as all sequences need, or fit)")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, float16, bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto",
                        help="auto, float32, float16, bfloat16, int8, fp8")
    parser.add_argument("--quantization", "-q", metavar="METHOD", help="fp8, int8: quantise the weights")
    parser.add_argument("--speculative", metavar="HOW",
                        help="prompt lookup, which does not change the output: ngram:K")
    parser.add_argument("--deterministic", action="store_true",
                        help="the same tokens and log probabilities for a request alone and among others, to "
                        "the last bit")
    parser.add_argument("--threads", type=int, metavar="N", help="threads that kernels of a CPU are made for "
                        "(default: those of this machine); a machine with fewer runs them, too")
    parser.add_argument("--weights", choices=("inside", "reference"), default="inside",
                        help="reference: weights stay in the checkpoint's files, where they lie in them as "
                        "they lie in memory")
    parser.add_argument("--sign-key", type=Path, metavar="PEM", help="sign with this Ed25519 private key")
    parser.set_defaults(run=lambda arguments: run(arguments, model(arguments.model)))


def run(arguments: argparse.Namespace, model: Path) -> int:
    """Compiles a model."""
    from tinygrad_nv.bundle.container import open_bundle
    from tinygrad_nv.engine.bundled import sets
    from tinygrad_nv.engine.bundled.compile import CompileOptions, compile_model
    if arguments.threads is not None and arguments.threads < 1:
        raise ConfigError(f"--threads {arguments.threads}", "1 or more", "change --threads")
    if (arguments.speculative or "").startswith("draft"):
        raise ConfigError(f"--speculative {arguments.speculative}", "ngram:K: a bundle has one model",
                          "leave it out")
    names = ("speculative", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "dtype",
             "kv_cache_dtype", "quantization", "num_pages")
    how = CompileOptions(sets.parse_sets(arguments.arch), {name: getattr(arguments, name) for name in names},
                         arguments.threads, arguments.weights == "reference", arguments.sign_key)
    console = Console(stderr=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(f"capturing steps for {name}", total=None) for name in how.sets}
        compile_model(model, arguments.output, how,
                      lambda name, done, total: bars.update(tasks[name], completed=done, total=total))
    made = open_bundle(arguments.output)
    print(f"{arguments.output}  {arguments.output.stat().st_size} bytes  "
          f"{', '.join(made.manifest.about['sets'])}  {made.hash[:16]}", file=sys.stdout)
    return 0
