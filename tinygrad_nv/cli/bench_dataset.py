"""The prompts of `bench throughput` and `bench serve`: options and requests of vLLM's data sets."""
from __future__ import annotations

import argparse
from pathlib import Path

from tinygrad_nv.benchmarks.workload import (
    BenchRequest,
    random_requests,
    requests_from_file,
    requests_of_sharegpt,
)
from tinygrad_nv.cli.bench_options import count
from tinygrad_nv.errors import RequestError

DATASETS = ("random", "sharegpt", "custom")


def add_lengths(command: argparse.ArgumentParser, inputs: int, outputs: int | None) -> None:
    """Adds the lengths of prompts and answers."""
    command.add_argument("--input-len", "--random-input-len", type=count, default=inputs, metavar="N",
                         help="tokens of a random prompt")
    command.add_argument("--output-len", "--random-output-len", "--custom-output-len",
                         "--sharegpt-output-len", type=count, default=outputs, metavar="N",
                         help="tokens of an answer at most"
                         + ("" if outputs else " (default 128; of sharegpt as long as its answers)"))


def add_options(command: argparse.ArgumentParser, inputs: int, outputs: int, prompts: int) -> None:
    """Adds the options of data sets."""
    add_lengths(command, inputs, None)
    command.set_defaults(usual_output_len=outputs)
    command.add_argument("--num-prompts", type=count, default=prompts, metavar="N", help="requests")
    command.add_argument("--dataset-name", choices=DATASETS, default="random", help="of prompts")
    command.add_argument("--dataset-path", type=Path, metavar="FILE",
                         help='JSON lines with "prompt" (custom), or ShareGPT\'s JSON')
    command.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X",
                         help="lengths are within 1 ± X of those given")
    command.add_argument("--random-prefix-len", type=int, default=0, metavar="N",
                         help="length of a prefix common to all prompts")


def requests(arguments: argparse.Namespace, directory: Path) -> list[BenchRequest]:
    """Returns the requests of a data set. Raises `RequestError`."""
    a, output = arguments, arguments.output_len or arguments.usual_output_len
    if a.dataset_name == "random":
        if not 0 <= a.random_range_ratio < 1:
            raise RequestError(f"--random-range-ratio {a.random_range_ratio}", "0 ≤ x < 1",
                               "change --random-range-ratio")
        from tinygrad_nv.models.config import read_config
        return random_requests(a.num_prompts, a.input_len, output, read_config(directory).vocab_size, a.seed,
                               a.random_range_ratio, a.random_prefix_len)
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    if a.dataset_path is None:
        raise RequestError(f"--dataset-name {a.dataset_name}, and no file",
                           "--dataset-path with JSON lines" if a.dataset_name == "custom" else
                           "--dataset-path with ShareGPT's JSON", "name the file")
    tokens = Tokenizer.load(directory).encode
    if a.dataset_name == "custom": return requests_from_file(a.dataset_path, a.num_prompts, output, tokens)
    return requests_of_sharegpt(a.dataset_path, a.num_prompts, a.output_len, tokens, a.seed)
