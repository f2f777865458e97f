"""`tinygrad-nv quantize`: writes a quantised copy of a model directory.

Protocol: all work is quantize/directory.py's. Prints what was made and its worst layers, or with --json one
object. vLLM, transformers and this package read the result.
"""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tinygrad_nv.progress import bar
from tinygrad_nv.quantize.directory import IGNORED, Result, quantize
from tinygrad_nv.quantize.schemes import FORMATS, OBSERVERS, SCHEMES, scheme_of
from tinygrad_nv.runtime.observe.memory_report import human
from tinygrad_nv.table import aligned

WORST = 5   # layers that are shown


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], model: str) -> None:
    """Adds `quantize`; `model` is the help of MODEL."""
    made = commands.add_parser("quantize", help="write a quantised copy of a model directory")
    made.add_argument("model", type=Path, metavar="MODEL", help=model)
    made.add_argument("--scheme", required=True, metavar="SCHEME", help=", ".join(SCHEMES))
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    made.add_argument("--format", default="compressed-tensors", metavar="FORMAT",
                      help=f"{', '.join(FORMATS)} (default compressed-tensors)")
    made.add_argument("--group-size", type=int, metavar="N", help="inputs with one scale (default 128)")
    made.add_argument("--asymmetric", action="store_true", help="with zero points")
    made.add_argument("--observer", default="minmax", metavar="NAME",
                      help=f"what chooses scales: {', '.join(OBSERVERS)} (default minmax)")
    made.add_argument("--ignore", action="append", metavar="LAYER",
                      help="a layer that stays as it is, by name or re:EXPRESSION; may be repeated "
                           f"(default {', '.join(IGNORED)})")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    symmetric = not arguments.asymmetric and arguments.format != "awq"  # AWQ has zero points
    scheme = scheme_of(arguments.scheme, arguments.group_size, symmetric, arguments.observer,
                       arguments.format)
    with bar(f"quantising {arguments.model.name}") as progress:
        found = quantize(arguments.model, scheme, arguments.out, arguments.ignore or IGNORED, progress)
    print(json.dumps(asdict(found), default=str) if arguments.json else _shown(found))
    return 0


def _shown(found: Result) -> str:
    rows = [(each.layer, f"{each.error:.2%}") for each in found.layers[:WORST]]
    return f"{found.out}: {human(found.before)} of weights became {human(found.after)}\n" + \
        "\n".join(aligned([("worst layers", "error"), *rows], (1,)))
