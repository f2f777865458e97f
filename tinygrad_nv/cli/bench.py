"""`tinygrad-nv bench [speed | latency | throughput | serve]`: the speed of a model, alone and beside others.

`speed`, which is what runs without a name, has llama-bench's tests: prefill and decode of one sequence, and
GB/s of weights. The others are vLLM's.

Protocol: options and results have vLLM's names. Figures go to stdout, progress to stderr; `--output-json`
writes them with the raw figures. `--against` runs the same workload on an installed peer (serve: on another
server), interleaved with ours, and reports the ratio with its spread; a peer that is not installed is an
error (exit code 2), but vLLM on a CPU, which gets an environment of its own. Prompts are random from a seed,
answers have their full length (serve: with --ignore-eos), and prefix caching is off unless requested.

`speed` has llama-bench's options (-p, -n, -r), and says what the weights are: their types, and the bytes
of them that each token reads. A peer of --against answers the same tokens after each of ours.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.benchmarks import figures
from tinygrad_nv.benchmarks.engines import BenchEngine, TinygradNV
from tinygrad_nv.benchmarks.figures import compare_speed
from tinygrad_nv.benchmarks.workload import DECODED, PROMPT, BenchRequest, random_requests, total
from tinygrad_nv.cli import bench_dataset, bench_serve, vllm_options
from tinygrad_nv.cli.bench_dataset import add_lengths
from tinygrad_nv.cli.bench_options import Defaults, add_peer, count, find_peer, open_peer, progress, write
from tinygrad_nv.cli.engine_options import add_engine_options, choose_model
from tinygrad_nv.errors import RequestError
from tinygrad_nv.runtime.observe.peak import memory_words, peak_memory

if TYPE_CHECKING:
    from tinygrad_nv.benchmarks.speed import Weights  # NumPy


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the options of `speed` alone."""
    command.add_argument("--input-len", "-p", type=count, metavar="N",
                         help=f"tokens of the prompt (default {PROMPT}, or what the context has)")
    command.add_argument("--output-len", "-n", type=count, metavar="N",
                         help=f"tokens that are decoded (default {DECODED}, or what the context has)")
    command.add_argument("--num-iters", "-r", type=count, default=5, metavar="N", help="repeats of each")
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")
    add_peer(command)


def speed(arguments: argparse.Namespace, directory: Path) -> int:
    """Times prompts, and tokens after one."""
    from tinygrad_nv.benchmarks.speed import describe_weights, lengths, measure, table
    from tinygrad_nv.cli import console
    find_peer(arguments)        # before anything is loaded
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


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                model: Callable[[str | None, bool], Path]) -> None:
    """Adds `bench`. `model` gives the directory of a model's name, and downloads it where that is asked for.
    """
    def in_process(task: Callable[[argparse.Namespace, Path], int]) -> Callable[[argparse.Namespace], int]:
        return lambda arguments: task(arguments, model(choose_model(arguments), arguments.download))

    bench = commands.add_parser("bench", help="measure a model's speed, alone and beside other engines")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    for name, words, run in (
            ("speed", "prefill and decode of one sequence, as llama-bench", in_process(speed)),
            ("latency", "one batch, from its prompts to its last token", in_process(latency)),
            ("throughput", "many prompts at once", in_process(throughput)),
            ("serve", "a server under load: any OpenAI-compatible one, or ours",
             lambda arguments: bench_serve.run(arguments, model))):
        each = kinds.add_parser(name, help=words, usage="%(prog)s [options] [MODEL]",
                                formatter_class=Defaults)
        each.add_argument("model", nargs="?", metavar="MODEL", help=directory)
        each.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
        ADD[name](each)
        add_engine_options(each, None if name == "speed" else 64, prefix_caching=False, file=False)
        vllm_options.add_options(each)
        each.set_defaults(run=run)


def add_bench_name(words: list[str]) -> list[str]:
    """Returns the command line, where it is `bench …` with the name of what it measures."""
    plain = words[:1] == ["bench"] and not {*words[1:2]} & {*ADD, "-h", "--help"}
    return ["bench", "speed", *words[1:]] if plain else words


def _add_latency(command: argparse.ArgumentParser) -> None:
    add_lengths(command, 32, 128)
    command.add_argument("--batch-size", type=count, default=8, metavar="N", help="sequences")
    command.add_argument("--num-iters-warmup", type=count, default=2, metavar="N", help="batches before")
    command.add_argument("--num-iters", type=count, default=10, metavar="N", help="batches that count")
    _add_peer(command)


def _add_throughput(command: argparse.ArgumentParser) -> None:
    bench_dataset.add_options(command, 128, 128, 64)
    command.add_argument("--num-iters", type=count, default=1, metavar="N", help="times the load is run")
    _add_peer(command)


ADD = {"speed": add_options, "latency": _add_latency, "throughput": _add_throughput,
       "serve": bench_serve.add_options}


def _add_peer(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output-json", type=Path, metavar="FILE", help="figures and raw figures")
    add_peer(command)


# **** in this process ****

def latency(arguments: argparse.Namespace, directory: Path) -> int:
    """Times whole batches."""
    runs = _run_interleaved(arguments, directory, lambda vocab: random_requests(
        arguments.batch_size, arguments.input_len, arguments.output_len, vocab, arguments.seed),
                               arguments.num_iters_warmup)
    made = {name: figures.latency(seconds) for name, seconds in zip(runs.names, runs.seconds, strict=True)}
    for name, one in made.items(): print((f"{name}:\n" if len(made) > 1 else "") + figures.latency_text(one))
    return _report(arguments, runs, made)


def throughput(arguments: argparse.Namespace, directory: Path) -> int:
    """Measures tokens a second over many prompts."""
    workload: list[BenchRequest] = []

    def load(_: int) -> list[BenchRequest]:
        workload[:] = bench_dataset.requests(arguments, directory)
        return workload

    runs = _run_interleaved(arguments, directory, load, 1)
    inputs, outputs = total(workload)
    made = {}
    for name, seconds in zip(runs.names, runs.seconds, strict=True):
        middle = figures.percentile(seconds, 50)
        made[name] = {**figures.throughput(middle, len(workload), inputs, outputs), "elapsed_times": seconds}
        print((f"{name}:\n" if len(runs.names) > 1 else "")
              + figures.throughput_text(made[name], inputs, outputs))
    return _report(arguments, runs, made)


@dataclass(frozen=True)
class _Runs:
    """Seconds of each engine's runs, what our weights are, and the most memory there was."""
    names: list[str]
    seconds: list[list[float]]
    weights: Weights
    memory: dict[str, int]


def _run_interleaved(arguments: argparse.Namespace, directory: Path,
                     load: Callable[[int], list[BenchRequest]],
                 warm: int) -> _Runs:
    """Runs the engines in turn."""
    from tinygrad_nv.benchmarks.speed import describe_weights
    from tinygrad_nv.cli import console
    find_peer(arguments)        # before anything is loaded
    llm = console.load(directory, arguments)
    try:
        workload = load(llm.config.vocab_size)
        for one in workload: _require_fitting(one, llm.length)
        engines: dict[str, BenchEngine] = {"tinygrad_nv": TinygradNV(llm)}
        if arguments.against:
            engines[arguments.against] = open_peer(arguments, llm, directory, arguments.max_num_seqs)
        runs: list[list[float]] = [[] for _ in engines]
        with progress("running", (warm + arguments.num_iters) * len(engines)) as step:
            for number in range(warm + arguments.num_iters):
                for seconds, engine in zip(runs, engines.values(), strict=True):
                    took = engine.run(workload)
                    if number >= warm: seconds.append(took)
                    step()
        return _Runs(list(engines), runs, describe_weights(llm, min(len(workload), arguments.max_num_seqs)),
                     peak_memory(llm.device))
    finally: llm.close()


def _require_fitting(one: BenchRequest, length: int) -> None:
    if (asked := len(one.prompt) + one.output) > length:
        raise RequestError(f"{len(one.prompt)} tokens and {one.output} after them are {asked}",
                           f"at most {length}, the context", "lower --input-len or --output-len")


def _report(arguments: argparse.Namespace, runs: _Runs, made: dict[str, dict[str, Any]]) -> int:
    print(f"Weights: {runs.weights}\nPeak memory: {memory_words(runs.memory)}")
    ours, *others = runs.names
    for name, seconds in zip(others, runs.seconds[1:], strict=True):
        print(figures.compare_speed(runs.seconds[0], seconds, name))
    if arguments.output_json:
        mine = {**made[ours], "weights": runs.weights.record(), **runs.memory}
        write(arguments.output_json, mine | {name: made[name] for name in others})
    return 0
