"""`tinygrad-nv bench speed`, which is `tinygrad-nv bench` too: prefill and decode of one sequence.

Protocol: llama-bench's tests and options (-p, -n, -r), and what the weights are: their types, and the bytes
of them that each token reads.
"""
from __future__ import annotations

import argparse
from pathlib import Path

from tinygrad_nv.benchmarks.workload import DECODED, PROMPT
from tinygrad_nv.cli.bench_options import count, progress, write


def add_options(command: argparse.ArgumentParser) -> None:
    """Those of `speed` alone."""
    command.add_argument("--input-len", "-p", type=count, metavar="N",
                         help=f"tokens of the prompt (None: {PROMPT}, or what the context has)")
    command.add_argument("--output-len", "-n", type=count, metavar="N",
                         help=f"tokens that are decoded (None: {DECODED}, or what the context has)")
    command.add_argument("--num-iters", "-r", type=count, default=5, metavar="N", help="repeats of each")
    command.add_argument("--max-num-batched-tokens", type=count, default=512, metavar="N",
                         help="tokens of the prompt that a step computes")
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")


def run(arguments: argparse.Namespace, directory: Path) -> int:
    """Times prompts, and tokens after one."""
    from tinygrad_nv.benchmarks.speed import described, lengths, measured, table
    from tinygrad_nv.cli import console
    llm = console.load(directory, arguments, max_num_batched_tokens=arguments.max_num_batched_tokens,
                       enable_prefix_caching=False)
    try:
        prompt, decoded = lengths(arguments.input_len, arguments.output_len, llm.length)
        with progress("running", 2 * (arguments.num_iters + 1)) as step:
            rates = measured(llm, prompt, decoded, arguments.num_iters, arguments.seed, step)
        weights, device, parameters = described(llm), console.device_name(llm), llm.config.parameters
        print(f"Model: {directory}, {parameters / 1e6:,.1f} M parameters, {device}\n"
              f"Weights: {weights}\n\n{table(rates, weights.streamed)}")
        if arguments.output_json:
            write(arguments.output_json, {"model": str(directory), "device": device, "parameters": parameters,
                                          "weights": weights.record(), "tokens_per_s": rates})
        return 0
    finally: llm.close()
