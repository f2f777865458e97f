"""The report of a quantisation: as text, as JSON, and as a picture.

Protocol: `report(directory, result, …)` is what quantization_report.json in the directory holds; `lines` is
the same for people. `plot` draws errors by layer, with matplotlib.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import NVError
from tinygrad_nv.quantize.directory import Result
from tinygrad_nv.quantize.files import unwritable
from tinygrad_nv.quantize.quality import Quality
from tinygrad_nv.quantize.schemes import Scheme
from tinygrad_nv.table import align_columns

NAME = "quantization_report.json"
WORST = 5   # layers that are shown


def report(scheme: Scheme, result: Result, quality: Quality, text: str) -> dict[str, Any]:
    """Returns the report as one object; `text` names what was read."""
    return {"scheme": asdict(scheme), "bytes": {"before": result.before, "after": result.after}, "text": text,
            "tokens": quality.tokens,
            "perplexity": {"before": quality.before, "after": quality.after, "change": quality.change},
            "kl_divergence": quality.divergence, "same_likeliest_token": quality.same,
            "state_errors": list(quality.states),
            "layer_errors": {each.layer: each.error for each in result.layers}}


def lines(result: Result, quality: Quality | None) -> list[str]:
    """A table of the quality, and one of the worst layers."""
    made: list[str] = []
    if quality is not None:
        made += align_columns([(f"{quality.tokens} held-out tokens", "before", "after", "change"),
                         ("perplexity", f"{quality.before:.4f}", f"{quality.after:.4f}",
                          f"{quality.change:+.2%}"),
                         ("KL divergence, nats", "", f"{quality.divergence:.5f}", ""),
                         ("same likeliest token", "", f"{quality.same:.2%}", "")], (1, 2, 3))
        made.append("")
    rows = [(each.layer, f"{each.error:.2%}") for each in result.layers[:WORST]]
    return made + align_columns([("worst layers", "error"), *rows], (1,))


def write(path: Path, made: Mapping[str, Any]) -> None:
    """A file of JSON, or a picture if its name ends so. Raises `WeightError` for a disk that is full."""
    if path.suffix == ".png": return plot(path, made)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(made, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def require_plots() -> None:
    """Raises `NVError` where matplotlib is missing."""
    try:
        import matplotlib
        matplotlib.use("Agg")
    except ModuleNotFoundError as error:
        raise NVError("matplotlib is not installed", "it, for a report as a picture",
                      "pip install matplotlib, or name a .json file") from error


def plot(path: Path, made: Mapping[str, Any]) -> None:
    """Errors of layers by what they are, and of the states after each layer."""
    require_plots()
    from matplotlib import pyplot
    chart, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    kinds: dict[str, list[tuple[int, float]]] = {}
    for name, error in made["layer_errors"].items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(?:\w+\.)*(\w+)", name):
            kinds.setdefault(found[2], []).append((int(found[1]), 100 * error))
    for kind, points in sorted(kinds.items()):
        left.plot(*zip(*sorted(points), strict=True), marker=".", label=kind)
    left.set(xlabel="layer", ylabel="error, %", title="linear layers", ylim=(0, None))
    left.legend(fontsize=7, ncols=2)
    for place in (left, right): place.xaxis.get_major_locator().set_params(integer=True)
    right.plot([100 * each for each in made["state_errors"]], marker=".", color="black")
    right.set(xlabel="layer", ylabel="error, %", title="states after each layer", ylim=(0, None))
    ppl, scheme = made["perplexity"], made["scheme"]
    chart.suptitle(f"{scheme['name']}, {scheme['method']}: perplexity {ppl['before']:.4f} to "
                   f"{ppl['after']:.4f} ({ppl['change']:+.2%}), KL {made['kl_divergence']:.5f}", fontsize=10)
    try: chart.savefig(path, dpi=120)
    except OSError as error: raise unwritable(path, error) from error
    finally: pyplot.close(chart)
