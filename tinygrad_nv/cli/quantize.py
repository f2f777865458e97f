"""`tinygrad-nv quantize`: writes a quantised copy of a model directory.

Protocol: all work is quantize/directory.py's, and quantize/quality.py's of the report. Prints what was made,
how much worse it predicts held-out text, and its worst layers, or with --json one object. vLLM, transformers
and this package read the result.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tinygrad_nv.errors import ModelError, RequestError, TokenizerError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.progress import bar
from tinygrad_nv.quantize import report
from tinygrad_nv.quantize.directory import IGNORED, quantize, require_plain
from tinygrad_nv.quantize.network import require_computed
from tinygrad_nv.quantize.quality import LEAST, Quality, affordable, compare
from tinygrad_nv.quantize.schemes import FORMATS, METHODS, NAMES, OBSERVERS, ORDERS, Options, scheme_of
from tinygrad_nv.quantize.text import Sequences, stories, texts, tokens
from tinygrad_nv.runtime.observe.memory_report import human

SAMPLES, LENGTH = 256, 512  # sequences of calibration, and tokens of each at most
HELD_OUT = 1 << 12          # sequences of a report at most
# seconds of a report at most, by those of quantising, and those that it may have in any case; a text that is
# asked for by --held-out is read whole
REPORT_SHARE, REPORT_S = 2.5, 5.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], model: str) -> None:
    """Adds `quantize`; `model` is the help of MODEL."""
    made = commands.add_parser("quantize", help="write a quantised copy of a model directory",
                                 usage="%(prog)s [options] --scheme SCHEME --out DIR MODEL")
    made.add_argument("model", type=Path, metavar="MODEL", help=model)
    made.add_argument("--scheme", required=True, metavar="SCHEME", help=", ".join(NAMES))
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="the directory to write")
    made.add_argument("--method", metavar="METHOD",
                      help=f"{', '.join(METHODS)}: how numbers are found (default rtn, to the nearest; "
                           "that of schemes awq and gptq)")
    made.add_argument("--format", metavar="FORMAT",
                      help=f"{', '.join(FORMATS)} (default compressed-tensors; that of schemes awq and gptq)")
    made.add_argument("--group-size", type=int, metavar="N", help="inputs with one scale (default 128)")
    made.add_argument("--asymmetric", action="store_true", help="with zero points")
    made.add_argument("--observer", metavar="NAME",
                      help=f"what chooses scales: {', '.join(OBSERVERS)} (default minmax; mse of methods "
                           "awq and gptq)")
    made.add_argument("--act-order", metavar="ORDER",
                      help=f"GPTQ's order of columns: {', '.join(ORDERS)} (default weight)")
    made.add_argument("--smoothing", type=float, metavar="A", help="SmoothQuant's exponent (default 0.5)")
    made.add_argument("--static", action="store_true", help="one scale of a layer's inputs, from calibration")
    made.add_argument("--sparsity", metavar="N:M",
                      help="2:4: of each four inputs keep the two largest weights (schemes 2:4, w8a8, fp8, "
                           "fp8-block)")
    made.add_argument("--ignore", action="append", metavar="LAYER",
                      help="a layer that stays as it is, by name or re:EXPRESSION; may be repeated "
                           f"(default {', '.join(IGNORED)})")
    _add_texts(made)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.set_defaults(run=run)


def _add_texts(made: argparse.ArgumentParser) -> None:
    """Adds the options of texts to calibrate with, and to report on."""
    kinds = 'text, or JSONL with "text" or "messages" (default: short stories)'
    made.add_argument("--calibration", type=Path, metavar="FILE", help=f"to calibrate with: {kinds}")
    made.add_argument("--samples", type=int, default=SAMPLES, metavar="N",
                      help=f"sequences to calibrate with (default {SAMPLES})")
    made.add_argument("--length", type=int, default=LENGTH, metavar="N",
                      help=f"tokens of a sequence at most (default {LENGTH})")
    made.add_argument("--held-out", type=Path, metavar="FILE", help=f"for the report: {kinds}")
    made.add_argument("--report", type=Path, metavar="FILE",
                      help=f"write the report here, too: .json or .png. {report.NAME} in DIR has it in any "
                           "case, if the model is small enough or this is given")
    made.add_argument("--no-report", action="store_true", help="do not evaluate the result")


@dataclass(frozen=True)
class _HeldOut:
    """Text that the result is evaluated on, or why it is not."""
    text: Sequences | None
    name: str


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    a = arguments
    scheme = scheme_of(a.scheme, Options(a.group_size, not a.asymmetric, a.observer, a.format, a.method,
                                         a.act_order, a.smoothing, a.static, a.sparsity))
    require_plain(a.model, a.out)
    text, held_out = None, _read_held_out(a)
    if scheme.is_calibrated:
        given = stories("train") if a.calibration is None else texts(a.calibration)
        text = tokens(a.model, read_config(a.model), given, a.samples, a.length)
    begun = time.monotonic()
    with bar(f"quantising {a.model.name}") as progress:
        found = quantize(a.model, scheme, a.out, a.ignore or IGNORED, progress, text, _log)
    limit_s = math.inf if a.held_out is not None else max(REPORT_SHARE * (time.monotonic() - begun), REPORT_S)
    quality: Quality | None = None
    if held_out.text is not None:
        with bar(f"evaluating {a.out.name}") as progress:
            quality = compare(a.model, a.out, held_out.text, progress, limit_s)
        made = report.report(scheme, found, quality, held_out.name)
        for path in (a.out / report.NAME, *([a.report] if a.report else [])): report.write(path, made)
    elif held_out.name: print(f"no report: {held_out.name}", file=sys.stderr)
    if a.json: print(json.dumps({**asdict(found), "quality": quality and asdict(quality)}, default=str))
    else:
        print(f"{found.out}: {human(found.before)} of weights became {human(found.after)}\n")
        print("\n".join(report.lines(found, quality)))
    return 0


def _log(line: str) -> None:
    """Prints a line for logs: a terminal has a bar."""
    if not sys.stderr.isatty(): print(line, file=sys.stderr, flush=True)


def _read_held_out(a: argparse.Namespace) -> _HeldOut:
    """Reads the text before any work. A report that was not asked for is left out where there can be none."""
    asked = a.report is not None or a.held_out is not None
    if a.no_report and asked:
        raise RequestError("a report that is asked for, and --no-report", "one of them", "leave one out")
    if a.no_report: return _HeldOut(None, "")
    if a.report is not None and a.report.suffix == ".png": report.require_plots()
    if a.report is not None and a.report.suffix not in (".json", ".png"):
        raise RequestError(f"a report in {a.report}", "a name that ends in .json or .png", "change --report")
    given = stories("held-out") if a.held_out is None else texts(a.held_out)
    try:
        require_computed(config := read_config(a.model))
        most = affordable(config) or (LEAST if asked else 0)
        if not most: return _HeldOut(None, "the model is large; --report FILE makes one")
        text = tokens(a.model, config, given, HELD_OUT, a.length, most)
    except (ModelError, TokenizerError) as error:
        if asked: raise
        return _HeldOut(None, error.found)
    return _HeldOut(text, "stories" if a.held_out is None else a.held_out.name)
