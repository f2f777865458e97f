"""`tinygrad-nv bundle inspect | verify | diff | extract`: what a bundle has.

Protocol: `inspect` prints it; `verify` reads every byte and prints one line; `diff` prints a line for each
difference and exits with 1 if there are any; `extract` writes the model's small files into a new folder.
"""
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from tinygrad_nv.errors import BundleError, ConfigError


def add_command(commands: Any) -> None:
    """Adds the commands to the parser."""
    parser = commands.add_parser("bundle", help="look at bundles: inspect, verify, diff, extract")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="what a bundle has")
    inspect.add_argument("file", type=Path, metavar="FILE")
    inspect.add_argument("--steps", action="store_true", help="each step, with its hash")
    verify = actions.add_parser("verify", help="check every byte, and who signed it")
    verify.add_argument("file", type=Path, metavar="FILE")
    verify.add_argument("--require-signed", type=Path, metavar="PEM", help="the public key that signed it")
    for each in (inspect, verify):
        each.add_argument("--weights", type=Path, metavar="DIR", help="where weights are that it refers to")
    diff = actions.add_parser("diff", help="what differs between two bundles")
    diff.add_argument("file", type=Path, metavar="FILE")
    diff.add_argument("other", type=Path, metavar="OTHER")
    extract = actions.add_parser("extract", help="write its files: config, tokenizer, plans, code")
    extract.add_argument("file", type=Path, metavar="FILE")
    extract.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="a new folder")
    extract.add_argument("--all", action="store_true", help="weights, too")
    for action, run in ((inspect, _inspect), (verify, _verify), (diff, _diff), (extract, _extract)):
        action.set_defaults(run=run)


def _inspect(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.bundle.container import open_bundle
    from tinygrad_nv.bundle.report import inspect
    print(inspect(open_bundle(arguments.file, None, arguments.weights), arguments.steps))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.bundle.container import open_bundle
    bundle = open_bundle(arguments.file, arguments.require_signed, arguments.weights)
    console = Console(stderr=True)
    total = sum(each.nbytes for each in bundle.manifest.parts)
    with Progress(TextColumn("verifying"), BarColumn(), DownloadColumn(), console=console, transient=True,
                  disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        bundle.verify(lambda nbytes: bar.advance(task, nbytes))
    signed = f", signed by {bundle.signed_by}" if arguments.require_signed else ""
    print(f"{arguments.file}: {len(bundle.manifest.parts)} parts, {total} bytes are as they were written"
          f"{signed}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.bundle.container import open_bundle
    from tinygrad_nv.bundle.report import differences
    found = differences(open_bundle(arguments.file), open_bundle(arguments.other))
    for line in found: print(line)
    return 1 if found else 0


def _extract(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.bundle.container import open_bundle
    bundle, folder = open_bundle(arguments.file), arguments.output
    if folder.exists(): raise ConfigError(f"{folder} is there", "a folder that is not", "change --output")
    for part in bundle.manifest.parts:
        if part.name.startswith("weights/") and not arguments.all: continue
        target = folder / part.name
        # names are checked: no part of one begins with a dot
        if not target.resolve().is_relative_to(folder.resolve()):
            raise BundleError(f"{part.name} would be written outside of {folder}", "a name below it")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bundle.read(part.name))
    print(f"{folder}: {sum(1 for each in folder.rglob('*') if each.is_file())} files")
    return 0
