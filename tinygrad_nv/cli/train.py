"""`tinygrad-nv train`: trains a model, or an adapter, on files.

Protocol: options are the fields of train/arguments.py. `tinygrad-nv train MODEL DATA…`; both may also be
given as --model-name-or-path and --dataset-name (repeated), or in the --config file as `model` and `data`.
Underscores in names of options are taken for dashes, and --bf16, --fp16 and --torch-dtype for --dtype; a
boolean may have a value, as in --packing True. Figures go to stderr and the log file, and what was
written to stdout.

Several ranks: a command that no launcher started starts all ranks itself, and supervises them: the arguments
go to them in a file. With --max-restarts they are started again after one failed, unless it ended with an
error of its own (exit status 2), which would come again.

--plan prints the memory and the time of a step, of MODEL's config.json and the options alone, and ends.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from tinygrad_nv import option_file
from tinygrad_nv.cli.model_path import find_model
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.errors import ConfigError, NVError
from tinygrad_nv.train import arguments as arguments_
from tinygrad_nv.train.arguments import FLAGS_OF_DTYPES, TRUTHS, TrainingArguments
from tinygrad_nv.train.layout import count_ranks
from tinygrad_nv.train.run import assemble
from tinygrad_nv.train.trainer import train

SHORT = {"data_parallel_size": "-dp", "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp",
         "enable_expert_parallel": "-ep"}
GRACE_S = 120.0     # after Ctrl-C, for the checkpoint


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], model: str) -> None:
    """Adds `train`; `model` is the help of MODEL."""
    made = commands.add_parser("train", help="train a model or an adapter",
                               usage="%(prog)s [options] MODEL DATA [DATA ...]")
    made.add_argument("words", nargs="*", metavar="MODEL DATA",
                      help=f"{model}, and files, directories or globs: .txt, .jsonl, .parquet, .npy, .bin")
    made.add_argument("--model-name-or-path", "--model", dest="model", metavar="MODEL",
                      help="instead of MODEL")
    made.add_argument("--dataset-name", "--dataset", "--data", dest="data", action="append", metavar="DATA",
                      help="instead of DATA; may be repeated")
    made.add_argument("--config", type=Path, metavar="FILE",
                      help="options in YAML or JSON; those of the command line win")
    made.add_argument("--plan", action="store_true",
                      help="print the memory and the time of a step, and run nothing; needs no DATA")
    made.add_argument("--plan-gpu", metavar="GPU", help="the GPU that --plan is for (H100, H200, A100, …; "
                      "default: memory of this device, and the time of an H100)")
    groups = dict[str, Any]()
    for each in dataclasses.fields(TrainingArguments):
        group = groups.setdefault(each.metadata["group"], made.add_argument_group(each.metadata["group"]))
        _add(group, each)
        if each.name == "dtype":
            for name, dtype in FLAGS_OF_DTYPES.items():
                group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction,
                                   default=argparse.SUPPRESS, help=f"--dtype {dtype}")
            group.add_argument("--torch-dtype", default=argparse.SUPPRESS, metavar="DTYPE", help="--dtype")
    made.set_defaults(run=run)


def with_switches(words: list[str]) -> list[str]:
    """The command line with booleans that have a value as switches: --packing False is --no-packing."""
    switches = {f"--{each.name.replace('_', '-')}" for each in dataclasses.fields(TrainingArguments)
                if str(each.type).startswith("bool")} | {f"--{name}" for name in FLAGS_OF_DTYPES}
    made, left = list[str](), list(words)
    while left:
        word = left.pop(0)
        if word == "--": return [*made, word, *left]
        option, equals, value = word.partition("=")
        if option in switches:
            if not equals and left and left[0].lower() in TRUTHS: value = left.pop(0)
            if value.lower() in TRUTHS: word = option if TRUTHS[value.lower()] else f"--no-{option[2:]}"
        made.append(word)
    return made


def _add(group: Any, each: dataclasses.Field[Any]) -> None:
    """Adds the option of a field; what is not given is not set."""
    names = [f"--{each.name.replace('_', '-')}"]
    if each.name in SHORT: names.append(SHORT[each.name])
    kind, default = str(each.type), each.default
    words = each.metadata["help"]
    if default not in (None, (), False, True, ""): words += f" (default {default})"
    shared = {"dest": each.name, "default": argparse.SUPPRESS, "help": words.replace("%", "%%")}
    if kind.startswith("bool"): group.add_argument(*names, action=argparse.BooleanOptionalAction, **shared)
    elif kind.startswith("tuple"):
        group.add_argument(*names, nargs="+", metavar=each.metadata["metavar"] or "VALUE", **shared)
    elif each.name == "resume_from_checkpoint":
        group.add_argument(*names, nargs="?", const="latest", metavar="DIR", **shared)
    else:
        read = {"int": int, "float": float}.get(kind, str)
        metavar = each.metadata["metavar"] or each.name.split("_")[-1].upper()
        group.add_argument(*names, type=read, metavar=metavar, **shared)


def run(given: argparse.Namespace) -> int:
    """Trains. Raises `NVError`."""
    options = {} if given.config is None else option_file.read(given.config)
    model, data = _take_names(given, options, needs_data=not given.plan)
    known = {*(each.name for each in dataclasses.fields(TrainingArguments)), *FLAGS_OF_DTYPES, "torch_dtype"}
    options |= {name: value for name, value in vars(given).items() if name in known}
    arguments = arguments_.make_arguments(options)
    if given.plan:
        print(_plan(model, arguments, given.plan_gpu))
        return 0
    alone = Ranks.from_environment().world_size == 1
    if alone and (count_ranks(arguments) > 1 or arguments.max_restarts):
        return _over_ranks(arguments, model, data)
    opened = assemble(arguments, find_model(model), data)
    made = train(opened)
    if not alone:
        from tinygrad_nv.dist import group
        group.close()
    if not opened.ranks.first: return 0
    if math.isnan(made.loss):       # of no step: train() raises for a loss that is NaN
        print(f"{made.directory}: all {made.steps} steps were done before")
        return 0
    ended = f"{made.steps} steps in {made.seconds:.0f} s, loss {made.loss:.4f}"
    if made.eval_loss is not None: ended += f", evaluation loss {made.eval_loss:.4f}"
    print(f"{made.directory}: {ended}")
    return 0


def _plan(model: str, arguments: TrainingArguments, gpu: str | None) -> str:
    from tinygrad_nv.dist.plan import presets
    from tinygrad_nv.train.plan import make_plan
    return make_plan(model, presets.find(model, find_model(model)), arguments, gpu)


def _over_ranks(arguments: TrainingArguments, model: str, data: list[str]) -> int:
    """Starts the ranks and waits for them; the exit status."""
    from tinygrad_nv.dist.launcher import Launch, launch
    options = dataclasses.asdict(arguments) | {"model": str(find_model(model)), "data": data,
                                               "max_restarts": 0}
    with tempfile.TemporaryDirectory(prefix="tinygrad-nv-train-") as folder:
        config = Path(folder) / "run.json"
        config.write_text(json.dumps(options))
        command = (sys.executable, "-m", "tinygrad_nv.cli", "train", "--config", str(config))
        return launch(Launch(command, count_ranks(arguments), grace_s=GRACE_S, quiet=True, direct=True,
                             name="tinygrad-nv train", max_restarts=arguments.max_restarts,
                             final=(NVError.exit_code,)))


def _take_names(given: argparse.Namespace, options: dict[str, Any], needs_data: bool
           ) -> tuple[str, list[str]]:
    """Takes the model and the data, by options or words or from the file, in this order; what they were is
    taken out of the file's options. Raises `ConfigError`."""
    words, own = list(given.words), options.pop("data", options.pop("dataset_name", None))
    other = options.pop("model", options.pop("model_name_or_path", None))
    model = given.model or other    # where these name one, words are data, but for another model's directory
    is_model = bool(words) and (other is None or (Path(words[0]) / "config.json").is_file())
    if given.model is None and is_model: model = words.pop(0)
    data = [*(given.data or []), *words] or ([own] if isinstance(own, str) else list(own or []))
    if model is None or (needs_data and not data):
        raise ConfigError("no MODEL" if model is None else "no DATA", "tinygrad-nv train MODEL DATA",
                          "name a model directory and files to train on")
    return str(model), [str(each) for each in data]
