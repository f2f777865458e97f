"""The memory of a rank, by what it holds: `rank_memory(config, arguments)`.

Protocol: the step of the run is built as training builds it, from the configuration alone, and scheduled
(programs.py); no weight is read, and no memory taken. What lives as long as the run is counted by its
tensors; what a step needs beside it are the arenas of its programs, which stay, too, once a step has run. The
largest is told by what is alive at its peak:

    logits         what the kernels of the loss read and write
    update         what is computed of the optimiser's state and master weights, or of sums of gradients
    gradients      of as many elements as a parameter, last read by the update
    activations    all others
    unused         what the planner cannot give to any of them at that moment

Bytes on the host are of states and activations that are moved there. Not among them: the process itself,
token files (mapped, not read), checkpoints that are being written, and samples on the way.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod

from tinygrad import Device, Tensor
from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised.layers import matrices
from tinygrad_nv.models.weights import slots
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec
from tinygrad_nv.train import layout, network
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.objectives import Inputs
from tinygrad_nv.train.plan.programs import Scheduled, buffers_in, buffers_of, recording, schedule_graph
from tinygrad_nv.train.ranks import OneRank
from tinygrad_nv.train.regions.host import OFFLOAD
from tinygrad_nv.train.run import Learner, learning
from tinygrad_nv.train.step import Step

HOST = "CPU"
UNUSED = "unused"
UPDATED = ("master weights", "optimizer state", "sums of gradients")
WHOLE = 8       # layers that are scheduled one by one
FIRST = 3       # layers at least of the shorter prefix: in fewer, other moments may be the peak


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank at its peak, by name: on the device, and on the host of what is moved there. `layers`:
    of how many layers programs were scheduled, where those of all follow from them; `kernels` of a step."""
    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    kernels: int = 0
    layers: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """On the device."""
        return sum(self.parts.values())


class PlannedRanks(OneRank):
    """Rank 0 of `size`, of which no other is there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.layout = size, layout.Layout(data=size)


def rank_memory(config: ModelConfig, arguments: TrainingArguments, ranks: int = 1,
                device: str | None = None) -> RankMemory:
    """Returns the memory of one of so many ranks, with rows of --max-length tokens. Raises what a run
    raises."""
    device = Device.canonicalize(device)
    with Context(TRAINING=1):
        found = {each: _of_model(shorten(config, each.layers), arguments, ranks, device)
                 for each in Shortened.of(config)}
    if len(found) == 1: return next(iter(found.values()))
    (low, a), (high, b) = found.items()
    def of(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        made = {name: max(0, round(high.at(config.num_layers, low, one.get(name, 0), other.get(name, 0))))
                for name in {**one, **other}}
        # gaps between buffers do not grow by layers
        if UNUSED in made: made[UNUSED] = max(one.get(UNUSED, 0), other.get(UNUSED, 0))
        return made
    kernels = round(high.at(config.num_layers, low, a.kernels, b.kernels))
    return RankMemory(of(a.parts, b.parts), of(a.host, b.host), kernels, (low.layers, high.layers))


def step_programs(config: ModelConfig, arguments: TrainingArguments, ranks: int, device: str
                  ) -> list[Scheduled]:
    """The programs of a step of one of so many ranks."""
    _, _, step = _build(config, arguments, ranks, device)
    return [schedule_graph(each) for each in step.programs]


def _build(config: ModelConfig, arguments: TrainingArguments, ranks: int, device: str
           ) -> tuple[Llama, Learner, Step]:
    with recording():
        model, learner = _make(config, arguments, ranks, device)
        fp8 = None if learner.fp8 is None else learner.fp8.state
        step = Step(learner.objective, learner.optimizer, arguments.gradient_accumulation_steps,
                    learner.parts, PlannedRanks(ranks), fp8)
    return model, learner, step


def _of_model(config: ModelConfig, arguments: TrainingArguments, ranks: int, device: str) -> RankMemory:
    model, learner, step = _build(config, arguments, ranks, device)
    programs = [schedule_graph(each) for each in step.programs]
    largest = max(programs, key=lambda each: each.arenas.get(device, 0))
    if arguments.eval_data: programs.append(schedule_graph(step.evaluation))
    held = _hold(model, learner, step)
    used = set[UOp]().union(*(each.held for each in programs))
    held["weights"] &= used     # of ZeRO-3 they are in no memory
    held["batch, tables"] = used - set[UOp]().union(*held.values())
    parts = {name: _bytes(each, device) for name, each in held.items()}
    updated = set[UOp]().union(*(held[name] for name in UPDATED))
    parts |= _at_peak(largest, _shapes(step, learner), updated, device)
    others = sum(each.arenas.get(device, 0) for each in programs) - largest.arenas.get(device, 0)
    parts["other programs"] = others
    host = {} if device == HOST else {name: _bytes(each, HOST) for name, each in held.items()
                                      if name != "batch, tables"}
    if device != HOST: host["activations"] = max(map(_move, programs))
    calls = [len(each.calls) for each in programs[:len(step.programs)]]
    kernels = calls[0] * (arguments.gradient_accumulation_steps if len(calls) > 1 else 1) + sum(calls[1:])
    return RankMemory(_some(parts), _some(host), kernels)


def _make(config: ModelConfig, arguments: TrainingArguments, ranks: int, device: str
          ) -> tuple[Llama, Learner]:
    """A model without weights, and what trains it."""
    def another() -> Llama:
        model = Llama(config, arguments.weights, device)
        network.extend(model, arguments.max_length)
        return model
    if config.quantization is not None:
        raise ConfigError("--plan of quantised weights of a checkpoint", "a model of floats, with "
                          "--quantization for what they are read as", "plan the model that they were made of")
    model = another()
    if arguments.online is not None: network.with_empty_matrices(model, arguments.online)
    rows = arguments.per_device_train_batch_size * (2 if arguments.method == "dpo" else 1)
    inputs = Inputs(rows, arguments.max_length, device)
    group = None
    if ranks > 1:
        from tinygrad_nv.dist.group import Group
        group = Group("plan", range(ranks), 0, 1.0)
        group.planned = True
    return model, learning(arguments, model, inputs, group, another)


# **** what is held ****

def _hold(model: Llama, learner: Learner, step: Step) -> dict[str, set[UOp]]:
    """Buffers that live as long as the run, each under the first name that has it."""
    optimizer, parts = learner.optimizer, learner.parts
    states = optimizer.state.parameters.values()
    masters = [each.master for each in states if each.master is not None]
    quantised = [each for matrix, _ in matrices(model) if isinstance(matrix, QTensor)
                 for each in matrix.buffers.values()]
    named: dict[str, Iterable[Tensor]] = {
        "weights": [*quantised, *(each.tensor for each in slots(model).values())],
        "adapter": [] if learner.adapter is None else learner.adapter.parameters.values(),
        "master weights": [*masters, *(parts.optimized.values() if parts.sharded else ())],
        "optimizer state": optimizer.state.tensors().values(),
        "sums of gradients": step.between}
    found, seen = dict[str, set[UOp]](), set[UOp]()
    for name, tensors in named.items():
        found[name] = set(buffers_of(tensors)) - seen
        seen |= found[name]
    return found


def _bytes(buffers: Iterable[UOp], device: str) -> int:
    return sum(each.nbytes() for each in buffers if each.device == device)


def _move(program: Scheduled) -> int:
    """Bytes that a program has on the host in between."""
    copied = sum(call.src[2].nbytes() for call in program.calls
                 if call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == OFFLOAD)
    return copied + program.arenas.get(HOST, 0)


def _some(parts: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


# **** what is alive at a step's peak ****

def _shapes(step: Step, learner: Learner) -> set[int]:
    """Elements of parameters, and of parts of them."""
    both = (*step.parameters.values(), *learner.parts.optimized.values())
    return {prod(int(n) for n in each.shape) for each in both}


def _at_peak(program: Scheduled, shapes: set[int], updated: set[UOp], device: str) -> dict[str, int]:
    """Bytes of its arenas, by what is alive at its peak."""
    peak, alive = program.peak(device)
    made = _update(program, updated)
    lossy = {each for call in program.calls if isinstance(getattr(note_of(call.src[0]), "spec", None),
                                                          CrossEntropySpec)
             for node in call.src[1:] for each in node.toposort()}
    found = dict.fromkeys(("gradients", "activations", "logits", "update"), 0)
    for each in alive:
        last = buffers_in(program.calls[program.alive[each][1]])
        if each in lossy: name = "logits"
        elif each in made: name = "update"
        elif each.max_numel() in shapes and not last.isdisjoint(updated | made): name = "gradients"
        else: name = "activations"
        found[name] += each.nbytes()
    return found | {UNUSED: max(0, program.arenas.get(device, 0) - peak)}


def _update(program: Scheduled, updated: set[UOp]) -> set[UOp]:
    """Buffers that are computed of those that an update changes, or of each other. A call makes what is in
    none before it."""
    found = set[UOp]()
    for number, call in enumerate(program.calls):
        own = buffers_in(call)
        if not own.isdisjoint(updated | found):
            found |= {each for each in own if program.alive.get(each, (-1, -1))[0] == number}
    return found


# **** fewer layers ****

@dataclass(frozen=True)
class Shortened:
    """A prefix of so many layers, from which the memory of a model of many is extrapolated. Layers come in a
    period of kinds (window, rotation, experts), after some that differ. Programs of models of more than
    `WHOLE` layers are scheduled for two prefixes, one period of layers apart. Each further period adds as
    much as the second has more than the first: the bytes of a step are an affine function of the number of
    periods, but for gaps between buffers."""
    layers: int

    @staticmethod
    def of(config: ModelConfig) -> tuple[Shortened, ...]:
        """The prefixes to schedule: the whole model, or two."""
        count, kinds = config.num_layers, _kinds(config)
        for period in range(1, count):
            start = next(i for i in range(count) if all(kinds[j] == kinds[j + period]
                                                        for j in range(i, count - period)))
            low = max(FIRST, start + period)
            if low + period < count and low + period <= max(WHOLE, count // 2) and count > WHOLE:
                return Shortened(low), Shortened(low + period)
        return Shortened(count),

    def at(self, layers: int, before: Shortened, low: float, high: float) -> float:
        """Returns what `low` of the prefix before and `high` of this one come to with so many layers."""
        return low + (high - low) * (layers - before.layers) / (self.layers - before.layers)


def shorten(config: ModelConfig, layers: int) -> ModelConfig:
    """The model of the first layers alone."""
    moe = config.moe
    if moe is not None: moe = replace(moe, layers=moe.layers[:layers])
    return replace(config, num_layers=layers, ropes=config.ropes[:layers], windows=config.windows[:layers],
                   moe=moe, mixers=config.mixers[:layers], halves=config.halves[:layers])


def _kinds(config: ModelConfig) -> list[tuple[object, ...]]:
    mixtures = (False,) * config.num_layers if config.moe is None else config.moe.layers
    none = (None,) * config.num_layers
    return list(zip(config.windows, config.ropes, mixtures, config.mixers or none, config.halves or none,
                    strict=True))
