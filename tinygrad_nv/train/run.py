"""What a run is made of: model, data, optimiser, objective, from its arguments.

Protocol: `assembled(arguments, model, data, state)` opens everything and returns a `Run`; nothing is trained.
`Run.tensors()` is what a checkpoint has; `identity` what a checkpoint and a run that goes on with it must have
in common.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, TokenizerError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train import network
from tinygrad_nv.train.adapter import ALL, AdapterModel, AdapterOptions
from tinygrad_nv.train.arguments import OPTIMIZERS, TrainingArguments
from tinygrad_nv.train.data import Data, DataOptions, Loader, LoaderOptions, load
from tinygrad_nv.train.objectives import Inputs, LossOptions, Objective, Preference, Supervised
from tinygrad_nv.train.optimizers import Optimizer, StateOptions, adafactor, adamw, lion, muon, sgd
from tinygrad_nv.train.regions.blocks import checkpoint_blocks


@dataclass(frozen=True)
class Run:
    """A run that can begin. `steps` are all there are; `adapter` None: all weights are trained."""
    arguments: TrainingArguments
    directory: Path
    model: Llama
    tokenizer: Tokenizer | None
    data: Data
    evaluation: Data | None
    objective: Objective
    optimizer: Optimizer
    adapter: AdapterModel | None
    steps: int
    identity: dict[str, Any]

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has: parameters and the optimiser's state."""
        own = {f"parameters.{name}": tensor for name, tensor in self.optimizer.parameters.items()}
        return own | {f"optimizer.{name}": each for name, each in self.optimizer.state_dict().items()}


def loader_options(arguments: TrainingArguments, pad: int) -> LoaderOptions:
    """How a run reads its data."""
    return LoaderOptions(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps,
                         seed=arguments.seed, shuffle=arguments.shuffle, pad=pad)


def assembled(arguments: TrainingArguments, directory: Path, data: Sequence[str], dtype: DType,
              device: str | None = None) -> Run:
    """Opens what a run needs. Raises what its parts raise."""
    config = read_config(directory)
    tokenizer = _tokenizer(directory)
    options = arguments.data
    rows = load(data, tokenizer, config.vocab_size, options)
    evaluation = load(arguments.eval_data, tokenizer, config.vocab_size, _in_order(options)) \
        if arguments.eval_data else None
    _require_kind(arguments, rows)
    model = network.drawn(directory, dtype, arguments.seed, device) if arguments.from_scratch \
        else network.opened(directory, dtype, device)
    widest = max(each.width for each in (rows, evaluation) if each is not None)
    network.extend(model, widest)
    inputs = Inputs(arguments.per_device_train_batch_size * rows.rows_per_index, rows.width, model.device)
    adapter = _adapter(arguments, model, inputs) if arguments.use_peft else None
    objective = _objective(arguments, directory, model, adapter, inputs, dtype)
    optimizer = _optimizer(arguments, model, adapter)
    checkpoint_blocks(model, arguments.regions, optimizer.params)
    return Run(arguments, directory, model, tokenizer, rows, evaluation, objective, optimizer, adapter,
               _steps(arguments, rows), _identity(arguments, rows, config.vocab_size))


def _tokenizer(directory: Path) -> Tokenizer | None:
    """That of the directory; shards need none."""
    with contextlib.suppress(TokenizerError): return Tokenizer.load(directory)
    return None


def _in_order(options: DataOptions) -> DataOptions:
    return DataOptions(**{**{each.name: getattr(options, each.name) for each in fields(options)},
                          "shuffle": False})


def _require_kind(arguments: TrainingArguments, data: Data) -> None:
    if (data.rows_per_index == 2) != (arguments.method == "dpo"):
        kinds = ("preferences: chosen and rejected", "no preferences")
        has, needs = kinds if data.rows_per_index == 2 else kinds[::-1]
        raise ConfigError(f"--method {arguments.method}, and the data have {has}", f"data with {needs}",
                          "choose the method that fits: sft, or dpo for preferences")


def _adapter(arguments: TrainingArguments, model: Llama, inputs: Inputs) -> AdapterModel:
    options = AdapterOptions(arguments.lora_r, arguments.lora_alpha, arguments.lora_dropout,
                             arguments.lora_target_modules or (ALL,), arguments.use_rslora, arguments.seed)
    return AdapterModel(model, options, inputs.number)


def _objective(arguments: TrainingArguments, directory: Path, model: Llama, adapter: AdapterModel | None,
               inputs: Inputs, dtype: DType) -> Objective:
    rows, width = (int(n) for n in inputs.tokens.shape)
    if arguments.method == "dpo":
        if adapter is not None:
            return Preference(model, model, rows, width, arguments.beta, adapter.without, inputs)
        if arguments.from_scratch:
            raise ConfigError("--method dpo --from-scratch", "a model that knows something", "leave one out")
        reference = network.opened(directory, dtype, model.device)
        network.extend(reference, model.rope_rows)
        return Preference(model, reference, rows, width, arguments.beta, contextlib.nullcontext, inputs)
    options = LossOptions(arguments.packing, arguments.label_smoothing_factor, arguments.z_loss)
    return Supervised(model, rows, width, options, inputs)


def _optimizer(arguments: TrainingArguments, model: Llama, adapter: AdapterModel | None) -> Optimizer:
    parameters = network.parameters(model) if adapter is None else adapter.parameters
    state = StateOptions(seed=arguments.seed, max_grad_norm=arguments.max_grad_norm or None,
                         rows=network.projections(model) if adapter is None else None)
    betas, lr = (arguments.adam_beta1, arguments.adam_beta2), arguments.learning_rate
    shared: dict[str, Any] = {"weight_decay": arguments.weight_decay, "options": state}
    match OPTIMIZERS[arguments.optim]:
        case "adamw": return adamw(parameters, lr, betas, arguments.adam_epsilon, **shared)
        case "lion": return lion(parameters, lr, betas, **shared)
        case "muon": return muon(parameters, lr, betas=betas, eps=arguments.adam_epsilon, **shared)
        case "adafactor": return adafactor(parameters, lr, **shared)
        case _: return sgd(parameters, lr, **shared)


def _steps(arguments: TrainingArguments, data: Data) -> int:
    """All steps of a run."""
    if arguments.max_steps > 0: return arguments.max_steps
    with Loader(data, loader_options(arguments, 0)) as loader: each = loader.steps_per_epoch
    return max(1, int(arguments.num_train_epochs * each + 0.999999))


def _identity(arguments: TrainingArguments, data: Data, vocab_size: int) -> dict[str, Any]:
    names = ("method", "dtype", "seed", "optim", "max_length", "packing", "packing_strategy", "shuffle",
             "per_device_train_batch_size", "gradient_accumulation_steps", "use_peft", "lora_r",
             "lora_alpha", "learning_rate", "weight_decay", "lr_scheduler_type")
    summary = data.summary
    return {**{name: getattr(arguments, name) for name in names}, "vocab_size": vocab_size,
            "rows": summary.rows, "tokens": summary.tokens}
