"""Options that the kinds of `tinygrad-nv bench` share: numbers, a progress bar, a file of figures."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinygrad_nv.benchmarks.engines import PEERS, BenchEngine, peer, require_installed
from tinygrad_nv.errors import RequestError

NAMES = {"float": "float32", "half": "float16", "__bf16": "bfloat16"}


def count(text: str) -> int:
    """A whole number from 1 on."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31: return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help with each default once: not where the words have it, nor of options that have none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.default in ((), {}) or any(action.default is each for each in (None, False))
        said = said or "default" in (action.help or "")
        return action.help if said else super()._get_help_string(action)


def add_peer(command: argparse.ArgumentParser) -> None:
    """Adds --against and what a peer needs."""
    command.add_argument("--against", choices=PEERS, help="run the same workload on a peer, interleaved")
    command.add_argument("--gguf", type=Path, metavar="FILE", help="the same model, for llama.cpp")


def find_peer(arguments: argparse.Namespace) -> None:
    """Raises `NVError` where --against names a peer that is not installed and does not install itself."""
    from tinygrad import Device  # --help does without
    if arguments.against: require_installed(arguments.against, arguments.device or Device.DEFAULT)


def open_peer(arguments: argparse.Namespace, llm: Any, directory: Path, batch: int) -> BenchEngine:
    """Returns the peer of --against, loaded."""
    dtype = str(llm.dtype).rpartition(".")[2]
    gguf = directory if arguments.gguf is None and directory.suffix == ".gguf" else arguments.gguf
    return peer(arguments.against, directory, NAMES.get(dtype, dtype), batch, llm.length, gguf)


def write(path: Path, record: dict[str, Any], append: bool = False) -> None:
    """Writes figures as JSON; with `append` as a further line of a file."""
    try:
        if append:
            with path.open("a") as file: file.write(json.dumps(record) + "\n")
        else: path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error}", "a file in a directory there is",
                           "change the path") from error


@contextmanager
def progress(words: str, count: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=count)
        yield lambda: bar.advance(task)
