"""Assembly of a run: model, data, optimiser, objective, from its arguments.

Protocol: `assembled(arguments, directory, data)` opens everything and returns a `Run`; nothing is trained.
Every rank has one. `Run.tensors()` is what a run goes on from, `own_tensors()` what of it this rank writes to
a checkpoint; `identity` what a checkpoint and a run that goes on with it must have in common.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad import Device, Tensor

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, TokenizerError
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.numerics import HighPrecision
from tinygrad_nv.train import network
from tinygrad_nv.train.adapter import ALL, AdapterModel, AdapterOptions
from tinygrad_nv.train.arguments import OPTIMIZERS, TrainingArguments
from tinygrad_nv.train.data import Data, DataOptions, Loader, LoaderOptions, load
from tinygrad_nv.train.layout import Layout
from tinygrad_nv.train.network import Fp8Model, in_fp8
from tinygrad_nv.train.objectives import (
    Inputs,
    LossOptions,
    Objective,
    Preference,
    RowsPart,
    Supervised,
)
from tinygrad_nv.train.optimizers import (
    Optimizer,
    StateOptions,
    adafactor,
    adamw,
    decay_groups,
    lion,
    muon,
    sgd,
)
from tinygrad_nv.train.optimizers.state import BLOCK
from tinygrad_nv.train.parts import Parts, Whole
from tinygrad_nv.train.ranks import OneRank, TrainingRanks, own_ranks
from tinygrad_nv.train.regions.region import checkpoint_blocks
from tinygrad_nv.train.step import Step

if TYPE_CHECKING:    # a run of one rank does not load it
    from tinygrad_nv.dist.group import Group
    from tinygrad_nv.models.parallel import Parallel
    from tinygrad_nv.train.stages import Stages


@dataclass(frozen=True)
class Run:
    """A run that can begin. `steps` are all there are; `adapter` None: all weights are trained; `fp8` None:
    no layer is in FP8; `stages`: those of this rank, of which `model` is the first."""
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
    ranks: OneRank
    parts: Parts
    fp8: Fp8Model | None = None
    stages: Stages | None = None

    def step(self) -> Step:
        """Returns the step that the run repeats."""
        a, rule = self.arguments, self.optimizer
        if self.stages is not None:
            from tinygrad_nv.train.pipelined import PipelineStep  # which loads dist/
            return PipelineStep(self.stages, self.objective.inputs, _loss_options(a), rule, self.parts,
                                self.ranks)
        return Step(self.objective, rule, a.gradient_accumulation_steps, self.parts, self.ranks,
                    None if self.fp8 is None else self.fp8.state)

    @property
    def parameters(self) -> int:
        """How many numbers are trained, of all stages."""
        counted = self.parts.whole if self.stages is None else self.stages.whole_shapes()
        return sum(map(_count, counted.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that a run goes on from: parameters, or this rank's parts of them, the
        optimiser's state, and that of FP8's scales."""
        own = {f"parameters.{name}": tensor for name, tensor in self.optimizer.parameters.items()}
        if self.fp8 is not None:
            own |= {f"fp8.{name}": each for name, each in self.fp8.state.tensors().items()}
        return own | {f"optimizer.{name}": each for name, each in self.optimizer.state_dict().items()}

    def cut(self) -> dict[str, int]:
        """Elements in all of what this rank has parts of, by name."""
        if not self.parts.sharded: return {}
        made = dict[str, int]()
        for name, whole in self.parts.whole.items():
            made[f"parameters.{name}"] = _count(whole)
            for end, tensor in self.optimizer.state.parameters[name].tensors():
                of_blocks = int(tensor.shape[0]) != int(self.optimizer.parameters[name].shape[0])
                each = BLOCK if of_blocks else 1
                made[f"optimizer.state.{name}.{end}"] = -(-_count(whole) // each)
        return made

    def own_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that this rank writes: rank 0 all, others what they alone have."""
        every = self.tensors()
        if self.ranks.first: return every
        if not self.parts.sharded and self.ranks.layout.keeper(self.ranks.rank) != self.ranks.rank: return {}
        apart = ("parameters.", "optimizer.state.")
        return {name: each for name, each in every.items() if name.startswith(apart)}

    def loader_options(self) -> LoaderOptions:
        """How this rank reads the data."""
        a = self.arguments
        return LoaderOptions(a.per_device_train_batch_size, a.gradient_accumulation_steps,
                             self.ranks.place.data, self.ranks.layout.data, seed=a.seed, shuffle=a.shuffle)

    @property
    def keeper(self) -> int:
        """The rank whose tensors in a checkpoint this one goes on from."""
        return self.ranks.rank if self.parts.sharded else self.ranks.layout.keeper(self.ranks.rank)


def assemble(arguments: TrainingArguments, directory: Path, data: Sequence[str],
              device: str | None = None) -> Run:
    """Opens what a run needs. Raises what its parts raise."""
    dtype, ranks = arguments.weights, own_ranks(arguments)
    device = ranks.device(device or Device.DEFAULT)
    config = read_config(directory)
    parallel = _parallel(arguments, ranks, config)
    tokenizer = _tokenizer(directory)
    options = arguments.data
    with ranks.first_before_others("data"):
        rows = load(data, tokenizer, config.vocab_size, options)
        evaluation = load(arguments.eval_data, tokenizer, config.vocab_size, _in_order(options)) \
            if arguments.eval_data else None
    for each in (rows, evaluation):
        if each is not None: _require_kind(arguments, each)
    if arguments.sample_prompts and tokenizer is None:
        raise ConfigError("--sample-prompts without a tokenizer", "tokenizer.json in MODEL",
                          "copy the tokenizer's files there")
    widest, stages = max(each.width for each in (rows, evaluation) if each is not None), None
    if arguments.sequence_parallel: widest += -widest % ranks.layout.tensor     # the rest is padding
    if isinstance(ranks, TrainingRanks) and ranks.layout.pipeline > 1:
        from tinygrad_nv.train.stages import open_stages  # which loads dist/
        stages = open_stages(arguments, directory, device, ranks.mesh)
    if stages is not None: model = stages.first
    elif arguments.from_scratch: model = network.draw_weights(directory, dtype, arguments.seed, device,
                                                              parallel)
    else: model = network.open_network(directory, dtype, device, arguments.online, parallel)
    for own in [model] if stages is None else stages.models.values():
        network.require_trainable(own, arguments.use_peft, arguments.recipe.fp8 is not None)
        network.whole_head(own)
        network.extend(own, widest)
    inputs = Inputs(arguments.per_device_train_batch_size * rows.rows_per_index, widest, model.device,
                    _part(arguments, config, ranks, widest, model.device))
    learner = learning(arguments, model, inputs, _alike(ranks),
                       lambda: network.open_network(directory, dtype, model.device,
                                                    parallel=parallel), stages,
                       _sharing(ranks, parallel))
    return Run(arguments, directory, model, tokenizer, rows, evaluation, learner.objective, learner.optimizer,
               learner.adapter, _steps(arguments, rows, ranks.layout.data),
               _identity(arguments, rows, config.vocab_size, ranks.layout), ranks, learner.parts, learner.fp8,
               stages)


@dataclass(frozen=True)
class Learner:
    """Parts of a step: see `Run`."""
    objective: Objective
    adapter: AdapterModel | None
    parts: Parts
    optimizer: Optimizer
    fp8: Fp8Model | None


def learning(arguments: TrainingArguments, model: Llama, inputs: Inputs, group: Group | None,
             another: Callable[[], Llama], stages: Stages | None = None, sharing: Group | None = None
             ) -> Learner:
    """Returns the parts of a step of a model, on one of a group of ranks that have the same parameters.
    `another`: the model once more, before it is trained. `stages`: those of this rank, of a pipeline.
    `sharing`: the ranks with the same key and value heads of a model that is cut."""
    models = [model] if stages is None else [*stages.models.values()]
    adapter = _adapter(arguments, model, inputs) if arguments.use_peft else None
    objective = _objective(arguments, another, model, adapter, inputs)
    parameters = {name: tensor for each in models for name, tensor in network.parameters(each).items()} \
        if adapter is None else adapter.parameters
    parts = _parts(arguments, parameters, group, model)
    if stages is not None: parts = stages.parts(parts)
    elif model.parallel is not None:
        from tinygrad_nv.train.cuts import TensorParts  # which loads dist/
        parts = TensorParts(parts, model, sharing)
    fp8 = _fp8(arguments, model, group)
    rows = {name: extents for each in models for name, extents in network.projections(each).items()}
    optimizer = _optimizer(arguments, parts, rows if adapter is None else None)
    meters = [] if fp8 is None else fp8.state.meters
    for each in [] if parts.regions else models:
        checkpoint_blocks(each, arguments.regions, [*parameters.values(), *meters])
    return Learner(objective, adapter, parts, optimizer, fp8)


def _alike(ranks: OneRank) -> Group | None:
    """The ranks that have the same parameters, where there are several."""
    if not isinstance(ranks, TrainingRanks) or ranks.group.size == 1: return None
    return ranks.group


def _part(arguments: TrainingArguments, config: ModelConfig, ranks: OneRank, width: int,
          device: str | None) -> RowsPart | None:
    """The tokens of each row that this rank has, where that is not all."""
    if ranks.layout.context == 1 or not isinstance(ranks, TrainingRanks): return None
    from tinygrad_nv.train import context_parallel  # which loads dist/
    context_parallel.require(config, arguments)
    return context_parallel.ContextPart(ranks.mesh.group("context"), width, device)


def _parallel(arguments: TrainingArguments, ranks: OneRank, config: ModelConfig) -> Parallel | None:
    """The ranks that have each layer together. Raises `ConfigError`."""
    if not isinstance(ranks, TrainingRanks) or (size := ranks.layout.tensor) == 1: return None
    if arguments.enable_expert_parallel and config.moe is not None and config.moe.experts % size:
        raise ConfigError(f"{config.moe.experts} experts over {size} ranks", "as many experts on each",
                          "change --tensor-parallel-size, or leave --enable-expert-parallel out")
    if arguments.zero_stage and config.latent is None and size > config.num_kv_heads:
        raise ConfigError(f"--zero-stage {arguments.zero_stage} with {config.num_kv_heads} key and value "
                          f"heads over {size} tensor parallel ranks", "as many heads as ranks at least",
                          "choose --zero-stage 0, or a smaller --tensor-parallel-size")
    from tinygrad_nv.models.parallel import Parallel
    return Parallel(ranks.mesh.group("tensor"), config, experts=arguments.enable_expert_parallel,
                    sequence=arguments.sequence_parallel)


def _sharing(ranks: OneRank, parallel: Parallel | None) -> Group | None:
    """The tensor parallel ranks that have the same key and value heads, where several have."""
    if parallel is None or parallel.whole.latent is not None or not isinstance(ranks, TrainingRanks):
        return None
    copies = max(1, parallel.ranks // parallel.whole.num_kv_heads)
    first = parallel.group.rank // copies * copies
    return ranks.world.group(parallel.group.members[first:first + copies]) if copies > 1 else None


def _parts(arguments: TrainingArguments, parameters: dict[str, Tensor], group: Group | None,
           model: Llama) -> Parts:
    if group is None and not arguments.zero_stage: return Whole(parameters)
    from tinygrad_nv.train.replicas import Replicas, Sharded, one_rank  # which load dist/
    if group is None: group = one_rank()
    if not arguments.zero_stage: return Replicas(parameters, group)
    if arguments.zero_stage < 3: return Sharded(parameters, group, arguments.zero_stage)
    from tinygrad_nv.train.fully_sharded import FullySharded
    return FullySharded(model, parameters, group, arguments.regions)


def _fp8(arguments: TrainingArguments, model: Llama, group: Group | None) -> Fp8Model | None:
    if (recipe := arguments.recipe.fp8) is None: return None
    rule = HighPrecision(arguments.fp8_exclude)
    if group is None: return in_fp8(model, recipe, rule)
    from tinygrad_nv.dist.collectives.functions import all_reduce

    def maximum(amax: Tensor) -> Tensor: return all_reduce(amax, group, "max", name="largest magnitudes")
    return in_fp8(model, recipe, rule, maximum)


def _tokenizer(directory: Path) -> Tokenizer | None:
    """Returns the tokenizer of the directory; shards need none."""
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
    # of a model beside its reference, as TRL's disable_dropout has it
    dropout = 0.0 if arguments.method == "dpo" else arguments.lora_dropout
    options = AdapterOptions(arguments.lora_r, arguments.lora_alpha, dropout,
                             arguments.lora_target_modules or (ALL,), arguments.use_rslora, arguments.seed)
    return AdapterModel(model, options, inputs.number)


def _objective(arguments: TrainingArguments, another: Callable[[], Llama], model: Llama,
               adapter: AdapterModel | None, inputs: Inputs) -> Objective:
    rows, width = (int(n) for n in inputs.tokens.shape)
    if arguments.method == "dpo":
        if adapter is not None:
            return Preference(model, model, rows, width, arguments.beta, adapter.without, inputs)
        if arguments.from_scratch:
            raise ConfigError("--method dpo --from-scratch", "a model that knows something", "leave one out")
        reference = another()
        network.extend(reference, model.rope_rows)
        return Preference(model, reference, rows, width, arguments.beta, contextlib.nullcontext, inputs)
    return Supervised(model, rows, width, _loss_options(arguments), inputs)


def _loss_options(arguments: TrainingArguments) -> LossOptions:
    return LossOptions(arguments.packing, arguments.label_smoothing_factor, arguments.z_loss)


def _optimizer(arguments: TrainingArguments, parts: Parts, rows: dict[str, tuple[int, ...]] | None
               ) -> Optimizer:
    """`rows`: extents of projections in parameters that have several."""
    rule, bits, paged = OPTIMIZERS[arguments.optim]
    recipe = arguments.recipe
    state = StateOptions(recipe.master, arguments.seed, bits, paged, loss_scaling=recipe.loss,
                         max_grad_norm=arguments.max_grad_norm or None,
                         rows=None if parts.sharded else rows, squares=parts.squares,
                         counts={name: _count(each) for name, each in parts.whole.items()})
    betas, lr, parameters = (arguments.adam_beta1, arguments.adam_beta2), arguments.learning_rate, \
        parts.optimized
    # what decays is said by the shapes of whole parameters
    shared: dict[str, Any] = {"groups": decay_groups(parts.whole, arguments.weight_decay), "options": state}
    match rule:
        case "adamw": return adamw(parameters, lr, betas, arguments.adam_epsilon, **shared)
        case "lion": return lion(parameters, lr, betas, **shared)
        case "muon": return muon(parameters, lr, betas=betas, eps=arguments.adam_epsilon, **shared)
        case "adafactor": return adafactor(parameters, lr, **shared)
        case _: return sgd(parameters, lr, **shared)


def _count(tensor: Tensor) -> int: return prod(int(extent) for extent in tensor.shape)


def _steps(arguments: TrainingArguments, data: Data, ranks: int) -> int:
    """All steps of a run."""
    if arguments.max_steps > 0: return arguments.max_steps
    options = LoaderOptions(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps,
                            world=ranks)
    with Loader(data, options) as loader: each = loader.steps_per_epoch
    return max(1, int(arguments.num_train_epochs * each + 0.999999))


def _identity(arguments: TrainingArguments, data: Data, vocab_size: int, layout: Layout
              ) -> dict[str, Any]:
    names = ("method", "dtype", "seed", "optim", "max_length", "packing", "packing_strategy", "shuffle",
             "use_peft", "lora_r", "lora_alpha", "lora_dropout", "use_rslora", "learning_rate",
             "weight_decay", "lr_scheduler_type", "adam_beta1", "adam_beta2", "adam_epsilon",
             "max_grad_norm", "beta", "label_smoothing_factor", "z_loss", "completion_only_loss",
             "assistant_only_loss", "zero_stage", "online", "precision", "fp8_format", "fp8_margin",
             "fp8_amax_history_len", "fp8_amax_compute_algo", "pipeline_parallel_size", "pipeline_schedule",
             "tensor_parallel_size", "enable_expert_parallel")
    summary = data.summary
    # however a batch is cut: a run may go on with other data parallel ranks
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * layout.data
    # parts of parts of weights fit no other number of ranks
    fixed = layout.size if arguments.zero_stage and layout.tensor > 1 else 0
    return {**{name: getattr(arguments, name) for name in names}, "ranks": fixed, "batch": batch,
            "vocab_size": vocab_size, "fp8_exclude": list(arguments.fp8_exclude),
            "lora_target_modules": list(arguments.lora_target_modules), "rows": summary.rows,
            "tokens": summary.tokens}
