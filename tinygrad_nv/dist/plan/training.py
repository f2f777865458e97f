"""A step of training: microbatches through stages, and what data-parallel ranks exchange.

Protocol: `train(config, layout, work, cluster)` gives a `TrainStep`. Of each stage:

    kernels    of a microbatch in all layers: a backward pass has two matmuls for each, 2.5 times the
               operations of attention, twice the bytes of everything else, and recomputation
    tp         all-gather before and reduce-scatter behind attention and feed-forward with sp, else all-reduce
               behind each. With `overlap_tp` a share of them runs beside the matmuls, as long as these take
    ZeRO-3     a layer's weights are gathered beside the layer before it, in both passes, its gradients are
               reduced beside the next; the first gather and the last reduction have nothing beside them. With
               pipeline parallelism weights stay whole after a step's first gather, and gradients are reduced
               once
    else       gradients are reduced once a step, beside the last microbatch's backward pass (with ZeRO-2
               beside each), and with ZeRO new weights are gathered beside the first's forward pass
    ep         all-to-all of tokens' rows to experts and back, in both passes, nothing beside
    pp         hidden states to the next stage, their gradients back, nothing beside

    step = (microbatches + idle) · slowest stage + what is exposed of a step's exchange + AdamW

where a stage's time is of a microbatch: kernels, and what is exposed of the collectives of each microbatch.

MFU is that of PaLM's appendix B: 6 operations for each parameter in a matmul (of experts those that a token
has), and 12 · layers · heads · d · length for attention, over the bf16 peak.

Of p stages and m microbatches, whose forward and backward pass take one and two units in a stage, `idle` is
the time that a stage waits in a step, in microbatches, `bubble` its share of the step, and `under_way` how
many microbatches' activations a stage holds. All three are counted on the schedules that ranks run
(dist/train/schedules.py), by what runs them on paper (dist/train/check.py). Of four stages and eight
microbatches:

    gpipe         waits 3      keeps 8, 8, 8, 8 microbatches
    1f1b          3            4, 3, 2, 1
    interleaved   3 / 2        5.5, 4.5, 3.5, 2.5, with two chunks a stage
    zero-bubble   3 / 3        4, 4, 4, 4

Beyond two microbatches a stage, none waits longer or, but for gpipe, keeps more: no more are counted.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.dist.plan import compute
from tinygrad_nv.dist.plan.cluster import Cluster
from tinygrad_nv.dist.plan.collectives import Collective, Use, beside, collective, expose
from tinygrad_nv.dist.plan.layer import Layer, Seconds
from tinygrad_nv.dist.plan.layout import HALF, Layout, Training, optimizer_share, parameters, rank_config
from tinygrad_nv.dist.train.check import EVEN, Report, check
from tinygrad_nv.dist.train.schedules import Schedule, gpipe, interleave, one_f_one_b, zero_bubble_h1
from tinygrad_nv.models.config import ModelConfig

ADAMW_BYTES = 34        # of a parameter: master and states read and written, gradient read twice, bf16 made
LOSS_BYTES = 14         # of a logit: written, read, as float32 written and read, its gradient written
COUNTED = 2     # microbatches of each stage
PLAIN: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "zero-bubble": zero_bubble_h1}


@dataclass(frozen=True)
class TrainStep:
    """A step of all GPUs. `forward`, `backward`: of a microbatch in the slowest stage, kernels alone;
    `microbatch_s` with what is exposed of collectives; `bubble` is the share of the step that stages wait."""
    forward: Seconds
    backward: Seconds
    uses: tuple[Use, ...]
    microbatch_s: float
    microbatches: int
    optimizer_s: float
    seconds: float
    bubble: float
    mfu: float


@dataclass(frozen=True)
class _Stage:
    forward: Seconds
    backward: Seconds
    uses: tuple[Use, ...]       # of all microbatches
    microbatch_s: float
    once_s: float               # of a step


def train(config: ModelConfig, layout: Layout, work: Training, cluster: Cluster) -> TrainStep:
    """A step."""
    microbatches = work.batch // (layout.dp * work.microbatch)
    stages = [_stage(config, layout, work, cluster, stage, microbatches) for stage in range(layout.pp)]
    slowest = max(stages, key=lambda each: each.microbatch_s)
    waits = idle(work.schedule, layout.pp, microbatches, work.virtual)
    optimizer = max(_optimizer(config, layout, work, cluster, stage) for stage in range(layout.pp))
    seconds = (microbatches + waits) * slowest.microbatch_s + max(each.once_s for each in stages) + optimizer
    return TrainStep(slowest.forward, slowest.backward, slowest.uses, slowest.microbatch_s, microbatches,
                     optimizer, seconds, bubble(work.schedule, layout.pp, microbatches, work.virtual),
                     operations(config, work) / seconds / cluster.gpus / cluster.device.peak_flops_per_s)


def operations(config: ModelConfig, work: Training) -> float:
    """Returns the operations of a step, as MFU counts them."""
    embedding = config.hidden_size * config.vocab_size * (not config.tied)
    used = config.parameters - config.inactive_parameters() - embedding
    d = config.head_dim if config.latent is None else (config.latent.head + config.latent.value) / 2
    attended = 12.0 * config.num_layers * config.num_heads * d * work.seq_len
    return work.batch * work.seq_len * (6.0 * used + attended)


def _stage(config: ModelConfig, layout: Layout, work: Training, cluster: Cluster, stage: int,
           microbatches: int) -> _Stage:
    rank, device = rank_config(config, layout, stage), cluster.device
    tokens = work.microbatch * work.seq_len
    forward, backward = Seconds(), Seconds()
    kinds: dict[tuple[bool, int | None], tuple[Seconds, Seconds]] = {}
    for i in range(rank.num_layers):
        one = Layer(rank, i, layout, device, work.precision)
        key = one.mixture, rank.windows[i]
        if key not in kinds: kinds[key] = _layer(one, work, tokens)
        forward, backward = forward + kinds[key][0], backward + kinds[key][1]
    if stage == layout.pp - 1:
        logits = compute.matmul(device, tokens, rank.vocab_size, rank.hidden_size)
        loss = compute.move(device, tokens * rank.vocab_size * LOSS_BYTES / 2)
        forward += Seconds(logits, other=loss)
        backward += Seconds(compute.matmul(device, tokens, rank.hidden_size, rank.vocab_size) +
                            compute.matmul(device, rank.vocab_size, rank.hidden_size, tokens), other=loss)
    forward, backward = forward.times(1 / work.achieved), backward.times(1 / work.achieved)
    uses = _within(rank, layout, work, cluster, tokens, forward.matmul + backward.matmul)
    once = 0.0
    kernels = forward.total + backward.total + sum(each.exposed_s for each in uses)
    uses = [each.times(microbatches) for each in uses]
    if layout.dp > 1:
        exchange = _exchange(config, rank, layout, work, cluster, stage, (forward.total, backward.total),
                             microbatches)
        repeated = exchange.repeated_s - forward.total - backward.total if exchange.repeated_s else 0.0
        kernels, once = kernels + repeated, exchange.once_s
        uses += exchange.uses
    return _Stage(forward, backward, tuple(uses), kernels, once)


def _layer(one: Layer, work: Training, tokens: int) -> tuple[Seconds, Seconds]:
    """Forward and backward pass, recomputation in the latter."""
    moved = compute.move(one.device, one.elementwise(tokens), launches=5)
    forward = Seconds(one.matmul_s(tokens), one.attention_s(tokens, work.seq_len), moved)
    backward = Seconds(one.gradients(tokens), one.attention_s(tokens, work.seq_len, backward=True), 2 * moved)
    again = {"none": Seconds(), "full": forward,
             "selective": Seconds(forward.matmul / 2, 0.0, forward.other)}[work.recompute]
    return forward, backward + again


# **** collectives of a microbatch ****

def _within(rank: ModelConfig, layout: Layout, work: Training, cluster: Cluster,
            tokens: int, matmul_s: float) -> list[Use]:
    """Returns the collectives of tensor, expert and pipeline parallelism, in both passes of a microbatch."""
    hidden = tokens * rank.hidden_size * HALF
    passes = 2 + (work.recompute == "full")
    tensor, found = layout.tensor_group(cluster), list[Use]()
    if layout.tp > 1:
        kinds = ("all_gather", "reduce_scatter") if layout.sp else ("all_reduce",)
        calls = 2 * rank.num_layers * passes
        each = [collective(kind, hidden, tensor, cluster, peer=False) for kind in kinds]
        if work.overlap_tp: found += _overlap(each, calls, work.overlap, matmul_s)
        else: found += [expose("hidden states (tp)", one, calls) for one in each]
    if layout.ep > 1 and rank.moe is not None:
        sent = hidden / layout.tp * rank.moe.policy.k
        one = collective("all_to_all", sent, layout.expert_group(cluster), cluster)
        found.append(expose("tokens to experts and back (ep)", one, 2 * passes * sum(rank.moe.layers)))
    if layout.pp > 1:
        share = hidden / (layout.tp if layout.sp else 1)
        one = collective("send", share, layout.stages_apart(cluster), cluster)
        found.append(expose("hidden states (pp)", one, 2 * work.virtual))
    return found


def _overlap(each: list[Collective], calls: float, share: float, matmul_s: float) -> list[Use]:
    """A share of them runs beside the matmuls, which copy engines leave their SMs."""
    total = calls * sum(one.seconds for one in each)
    open_s = total - min(share * total, matmul_s)
    return [Use("hidden states (tp)", one, calls, open_s * calls * one.seconds / total, "matmuls")
            for one in each]


# **** data-parallel ranks ****

@dataclass(frozen=True)
class _Exchange:
    uses: list[Use]
    repeated_s: float       # of a microbatch, kernels included; 0 where nothing is exchanged in each
    once_s: float


def _exchange(config: ModelConfig, rank: ModelConfig, layout: Layout, work: Training, cluster: Cluster,
              stage: int, passes: tuple[float, float], microbatches: int) -> _Exchange:
    """Returns the exchange of weights and gradients. Experts on other data-parallel ranks are not
    exchanged."""
    held, group, device = parameters(config, layout, stage), layout.data_group(cluster), cluster.device
    shared = held.total - (held.experts if layout.ep > 1 else 0)
    layers, (forward_s, backward_s) = rank.num_layers, passes
    if work.zero == 3 and layout.pp == 1:
        gather = collective("all_gather", HALF * shared / layers, group, cluster)
        reduce = collective("reduce_scatter", work.grad_bytes * shared / layers, group, cluster)
        ahead, both = layers * gather.seconds, layers * (gather.seconds + reduce.seconds)
        repeated = beside(device, forward_s, ahead) + beside(device, backward_s, both) + \
            gather.seconds + reduce.seconds
        extra = (repeated - forward_s - backward_s) * microbatches
        weight = 2 * gather.seconds / (2 * gather.seconds + reduce.seconds)
        calls = layers * microbatches
        return _Exchange([Use("weights (dp)", gather, 2 * calls, extra * weight, "kernels"),
                          Use("gradients (dp)", reduce, calls, extra * (1 - weight), "kernels")],
                         repeated, 0.0)
    kind = "reduce_scatter" if work.zero else "all_reduce"
    reduce = collective(kind, work.grad_bytes * shared / layers, group, cluster)
    reduced_s = layers * reduce.seconds
    times = microbatches if work.zero == 2 else 1
    extra = times * (beside(device, backward_s, reduced_s) - backward_s) + reduce.seconds
    uses = [Use("gradients (dp)", reduce, times * layers, extra, "backward pass")]
    if not work.zero: return _Exchange(uses, 0.0, extra)
    gather = collective("all_gather", HALF * shared / layers, group, cluster)
    more = beside(device, forward_s, layers * gather.seconds) - forward_s + gather.seconds
    uses.append(Use("weights (dp)", gather, layers, more, "forward pass"))
    return _Exchange(uses, 0.0, extra + more)


def _optimizer(config: ModelConfig, layout: Layout, work: Training, cluster: Cluster, stage: int) -> float:
    """AdamW of a rank's share, and the norm of gradients."""
    held = parameters(config, layout, stage)
    mine = optimizer_share(held, layout) if work.zero else held.total
    return compute.move(cluster.device, ADAMW_BYTES * mine) / work.achieved


@lru_cache(1024)
def report(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> Report:
    """A schedule on paper. Raises `DistError` for microbatches that an interleaved one cannot have."""
    return check(interleave(stages, microbatches, virtual) if schedule == "interleaved" else
                 PLAIN[schedule](stages, microbatches), EVEN)


def idle(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Microbatches' time that a stage waits in a step."""
    counted = min(microbatches, COUNTED * stages)
    return report(schedule, stages, counted, virtual).makespan / (sum(EVEN.values()) * virtual) - counted


def bubble(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Share of a step."""
    waits = idle(schedule, stages, microbatches, virtual)
    return waits / (microbatches + waits)


def under_way(work: Training, stages: int, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a stage holds at most."""
    if work.schedule == "gpipe": return microbatches
    counted = min(microbatches, COUNTED * stages)
    return report(work.schedule, stages, counted, work.virtual).kept[stage] / work.virtual
