"""`tinygrad-nv bench speed`, which is `tinygrad-nv bench` too: prefill and decode of one sequence.

Protocol: llama-bench's tests and options (-p, -n, -r), and what the weights are: their types, and the bytes
of them that each token reads. A peer of --against answers the same tokens after each of ours.
"""
from __future__ import annotations

import argparse
from pathlib import Path

from tinygrad_nv.benchmarks.engines import require_installed
from tinygrad_nv.benchmarks.figures import compare_speed
from tinygrad_nv.benchmarks.workload import DECODED, PROMPT
from tinygrad_nv.cli.bench_options import add_peer, count, open_peer, progress, write
from tinygrad_nv.runtime.observe.peak import memory_words, peak_memory


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of `speed` alone."""
    command.add_argument("--input-len", "-p", type=count, metavar="N",
                         help=f"tokens of the prompt (default {PROMPT}, or what the context has)")
    command.add_argument("--output-len", "-n", type=count, metavar="N",
                         help=f"tokens that are decoded (default {DECODED}, or what the context has)")
    command.add_argument("--num-iters", "-r", type=count, default=5, metavar="N", help="repeats of each")
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")
    add_peer(command)


def run(arguments: argparse.Namespace, directory: Path) -> int:
    """Times prompts, and tokens after one."""
    from tinygrad_nv.benchmarks.speed import describe_weights, lengths, measure, table
    from tinygrad_nv.cli import console
    if arguments.against: require_installed(arguments.against)      # before anything is loaded
    llm = console.load(directory, arguments)
    try:
        prompt, decoded = lengths(arguments.input_len, arguments.output_len, llm.length)
        other = open_peer(arguments, llm, directory, 1) if arguments.against else None
        with progress("running", 2 * (arguments.num_iters + 1)) as step:
            rates, theirs = measure(llm, prompt, decoded, arguments.num_iters, arguments.seed, step, other)
        weights, device, parameters = describe_weights(llm), console.device_name(llm), llm.config.parameters
        memory = peak_memory(llm.device)
        print(f"Model: {directory}, {parameters / 1e6:,.1f} M parameters, {device}\n"
              f"Weights: {weights}\nPeak memory: {memory_words(memory)}\n\n{table(rates, weights.streamed)}")
        for name, found in theirs.items():
            print(f"{name}: "
                  + compare_speed([1 / rate for rate in rates[name]], [1 / rate for rate in found],
                                         arguments.against))
        if arguments.output_json:
            write(arguments.output_json, {"model": str(directory), "device": device, "parameters": parameters,
                                          "weights": weights.record(), "tokens_per_s": rates, **memory,
                                          **({arguments.against: theirs} if other else {})})
        return 0
    finally: llm.close()
