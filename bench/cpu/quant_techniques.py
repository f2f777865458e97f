"""Gains and costs of quantisation, a technique a row: tokens/s, GB/s, perplexity.

    python bench/cpu/quant_techniques.py MODEL --work DIR [--repeat 5] [--only NAME …] [--save]

Speed is that of MODEL, decoding one sequence on the CPU, quantised to the nearest into DIR (kept for another
run; random weights will do): processes of all techniques answer in turn, as cpu/gguf_decode.py's do, so that
ratios are of neighbouring repetitions. "GB/s" are bytes of the directory's weights times tokens/s: of a model
whose head is its embedding. Perplexity is of the model in the box, over its held-out stories, quantised by
the technique itself.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.gguf_decode import OURS, QUIET, Worker, pair
from bench.lib.measure import each, save, spread, table
from tinygrad_nv.cli import DEFAULT_MODEL, main

PLAIN = "unquantised"


@dataclass(frozen=True)
class Technique:
    """Options of `tinygrad-nv quantize`; `stored` are those of how weights are stored, to the nearest."""
    name: str
    options: tuple[str, ...]
    stored: tuple[str, ...]


def technique(name: str, *options: str, stored: tuple[str, ...] = ()) -> Technique:
    """Options that speed depends on, unless `stored` has them."""
    return Technique(name, options, stored or options)


INT4, AWQ, GPTQ = (("--scheme", "w4a16", "--format", format)
                   for format in ("compressed-tensors", "awq", "gptq"))
TECHNIQUES = (technique("int8, groups of 128", "--scheme", "w8a16"),
              technique("fp8 blocks", "--scheme", "fp8-block"), technique("mxfp4", "--scheme", "mxfp4"),
              technique("int4, groups of 128", *INT4),
              technique("AWQ", "--scheme", "awq", stored=AWQ),
              technique("GPTQ", "--scheme", "gptq", stored=GPTQ))


def quantise(model: Path, out: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Returns what `tinygrad-nv quantize … --json` says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(["quantize", str(model), "--out", str(out), "--json", *options])
    if code: raise SystemExit(f"quantize {' '.join(options)} failed")
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def perplexities(chosen: list[Technique]) -> dict[str, float]:
    """Returns the perplexities of the model in the box, by technique; and its own."""
    made: dict[str, float] = {}
    for one in each(chosen):
        with tempfile.TemporaryDirectory() as folder:
            quality = quantise(Path(DEFAULT_MODEL), Path(folder) / "made", one.options)["quality"]
        made[PLAIN], made[one.name] = quality["before"], quality["after"]
    return made


def rates(folders: dict[str, Path], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of each, in turn; those while others used the processor count only where few did not."""
    workers = {name: Worker(OURS, path, arguments) for name, path in folders.items()}
    turns = [pair(workers, "tg") for _ in range(2 * arguments.repeat)]
    for worker in workers.values(): worker.end()
    turns.sort(key=lambda turn: turn[0])
    if turns[arguments.repeat - 1][0] > QUIET: print(f"others took {turns[arguments.repeat - 1][0]:.0%}")
    return {name: [rate[name] for _, rate in turns[:arguments.repeat]] for name in folders}


def nbytes(folder: Path) -> int: return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def run() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[one.name for one in TECHNIQUES])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--save", action="store_true", help="keep the result beside the others")
    parser.set_defaults(dtype="bfloat16", prompt=256)
    arguments = parser.parse_args()
    chosen = [one for one in TECHNIQUES if one.name in arguments.only]
    lost, folders = perplexities(chosen), {PLAIN: arguments.model}
    for one in chosen:
        folders[one.name] = arguments.work / "-".join(option.strip("-") for option in one.stored)
        if not folders[one.name].exists():
            quantise(arguments.model, folders[one.name], (*one.stored, "--no-report"))
    found = rates(folders, arguments)
    plain, lines = found[PLAIN], []
    for name, done in found.items():
        ratio = median(a / b for a, b in zip(done, plain, strict=True))
        lines.append((name, f"{median(done):.1f} ({spread(done)})", f"{ratio:.2f}",
                      f"{nbytes(folders[name]) * median(done) / 1e9:.1f}", f"{lost[name]:.4f}",
                      f"{lost[name] / lost[PLAIN] - 1:+.2%}"))
    print(table(("", "tokens/s", "ratio", "GB/s", "perplexity", "change"), lines))
    if arguments.save:
        save("quant_techniques", {"tokens/s": found, "bytes": {name: nbytes(path) for name, path in
                                                               folders.items()}, "perplexity": lost})


if __name__ == "__main__": run()
