"""`tinygrad-nv shapes`: the shape of every variable of functions with annotations, without running them.

Protocol: imports FILE, and prints a table for each of its functions whose annotations have dimensions, or one
JSON object with --json. Exits with 1 where something does not fit, and with 2 for a file that cannot be read.
"""
from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ShapeError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `shapes`."""
    shapes = commands.add_parser("shapes", help="shapes of all variables of a function, without running it",
                                 usage="%(prog)s [options] FILE.py [FUNCTION]")
    shapes.add_argument("file", type=Path, metavar="FILE.py", help="a Python file; it is imported")
    shapes.add_argument("function", nargs="?", metavar="FUNCTION", help="a function, or Class.method "
                        "(default: all that have dimensions in their annotations)")
    shapes.add_argument("--set", action="append", default=[], dest="given", metavar="NAME=VALUE",
                        help="the size of a dimension, or the value of an argument without (repeated)")
    shapes.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    shapes.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from tinygrad_nv.shapes import inference
    from tinygrad_nv.shapes.inference import infer
    from tinygrad_nv.shapes.signature import inner, signature
    from tinygrad_nv.shapes.sources import functions, load
    given = dict(map(parse_setting, arguments.given))
    module = load(arguments.file)
    found = functions(module, arguments.function)
    if not found: raise ShapeError(f"{arguments.file} has no function with dimensions in its annotations",
                                   'annotations such as Tensor["B", "S", "D"]')
    reports = []
    for fn in found:
        own = signature(inner(fn))
        names = {*own.symbols, *(name for name, each in own.annotations.items() if each is int)}
        sizes = {name: value for name, value in given.items() if name in names and isinstance(value, int)}
        values = {name: value for name, value in given.items() if name in own.parameters.parameters}
        reports.append(infer(fn, sizes, {name: each for name, each in values.items() if name not in sizes}))
    if arguments.json: print(json.dumps([inference.report_data(each) for each in reports]))
    else: print("\n\n".join(map(inference.report_text, reports)))
    return 1 if any(each.mismatches for each in reports) else 0


def parse_setting(text: str) -> tuple[str, Any]:
    """A name and a value, by Python's rules or as a text. Raises `ShapeError`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ShapeError(f"--set {text}", "NAME=VALUE, such as D=64")
    try: return name, ast.literal_eval(value)
    except (ValueError, SyntaxError): return name, value
