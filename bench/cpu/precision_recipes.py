"""Does FP8 learn what bfloat16 learns?
`python bench/cpu/precision_recipes.py [--steps N] [--seed N | --continued] [RECIPE …]`.

Protocol: the model in the box from scratch (models/tales, its configuration and its hyperparameters), with
the same stories and the same seed for each recipe: what `tinygrad-nv train --from-scratch --precision RECIPE`
does. Compared is the mean loss of the last 50 steps, beside bfloat16's: `ratio` 1.01 is 1 % more. Counters
are of values that FP8 clamped or flushed to zero, summed over all steps. Of another seed, which draws other
first weights, the loss alone is kept (`of_seeds`): what recipes differ by is to be seen beside what seeds
do. `--continued` goes on from the model's trained weights, with the same hyperparameters (`continued`): runs
of the same first weights stay near each other, so that this tells smaller differences. Results of recipes
that are not asked for stay in the file, where the number of steps is the same.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, save, table
from tinygrad_nv.models import tales
from tinygrad_nv.models.tales.train import Recipe, rows
from tinygrad_nv.numerics import RECIPES
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.run import assemble
from tinygrad_nv.train.trainer import train

NAME, BASE, LAST, SEED = "precision_recipes", "bfloat16", 50, 42
ASKED = (BASE, "fp8_delayed", "fp8_current", "fp8_block")
TALES = Path(tales.__file__).parent


def shard(path: Path, recipe: Recipe, steps: int) -> None:
    """Token ids of so many steps: rows that each begin with a story."""
    source = rows(Tokenizer.from_file(str(TALES / "tokenizer.json")), "train", recipe.length)
    made = [next(source)[:recipe.length] for _ in range(steps * recipe.batch)]
    np.save(path, np.array(made, np.uint16).reshape(-1))


def arguments(name: str, recipe: Recipe, given: argparse.Namespace, output: Path) -> TrainingArguments:
    """A run of a recipe of precision."""
    return TrainingArguments(
        output_dir=str(output), from_scratch=not given.continued, precision=name, max_steps=given.steps,
        shuffle=False, seed=given.seed, per_device_train_batch_size=recipe.batch, max_length=recipe.length,
        learning_rate=recipe.lr, lr_scheduler_type="cosine", warmup_steps=recipe.warm_up,
        weight_decay=recipe.weight_decay, adam_beta2=0.95, max_grad_norm=recipe.clip, save_strategy="no",
        report_to="none")


def measure(name: str, data: Path, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Figures of a run."""
    output = folder / name
    made = train(assemble(arguments(name, Recipe(), given, output), TALES, [str(data)]))
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    counters = {key: sum(row[key] for row in log) for key in log[0] if key.startswith("fp8_")}
    return {"loss": float(np.mean(losses[-LAST:])), "seconds": round(made.seconds, 1),
            "skipped": sum(bool(row.get("skipped")) for row in log), "counters": counters,
            "losses": [round(float(np.mean(losses[i:i + LAST])), 5) for i in range(0, len(losses), LAST)]}


def add(found: dict[str, Any], name: str, made: dict[str, Any], given: argparse.Namespace) -> None:
    """A run, and its recipe beside bfloat16."""
    old = found.get(name, {})
    kept = {key: old[key] for key in ("of_seeds", "continued") if key in old}
    if given.continued: found[name] = old | {"continued": made}
    elif given.seed == SEED: found[name] = made | kept
    else: found[name] = old | {"of_seeds": kept.get("of_seeds", {}) | {str(given.seed): made["loss"]}}
    base = found.get(BASE, found[name])
    for one in found.values():
        one["ratio"] = round(one["loss"] / base["loss"], 5)
        if "continued" in one and "continued" in base:
            one["continued"]["ratio"] = round(one["continued"]["loss"] / base["continued"]["loss"], 5)


def before(steps: int) -> dict[str, Any]:
    """Results that the file has of as many steps."""
    path = RESULTS / f"{NAME}.json"
    if not path.is_file() or (found := json.loads(path.read_text()))["steps"] != steps: return {}
    recipes: dict[str, Any] = found["recipes"]
    return recipes


def main() -> None:
    """Trains, prints and saves."""
    parser = argparse.ArgumentParser(description="Losses of recipes of precision.")
    parser.add_argument("recipes", nargs="*", choices=[*RECIPES, []], metavar="RECIPE")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--continued", action="store_true")
    given = parser.parse_args()
    found = before(given.steps)
    if (given.seed != SEED or given.continued) and (missing := set(given.recipes or ASKED) - found.keys()):
        parser.error(f"first run {', '.join(sorted(missing))} from scratch with seed {SEED}")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "stories.npy"
        shard(data, Recipe(), given.steps)
        for name in given.recipes or ASKED:
            add(found, name, measure(name, data, given, Path(folder)), given)
            save(NAME, {"steps": given.steps, "device": Device.DEFAULT, "mean_of_last": LAST,
                        "recipes": found})
    runs = {name: one["continued"] if given.continued else one for name, one in found.items()
            if "continued" in one or not given.continued}
    print(table(["recipe", "loss", "of bfloat16", "seconds"],
                [[name, f"{one['loss']:.4f}", f"{one['ratio']:.4f}", f"{one['seconds']:.0f}"]
                 for name, one in runs.items()]))


if __name__ == "__main__": main()
