"""Steps of inference: decode and prefill of one rank, with the collectives between ranks.

Protocol: `decode(...)` and `prefill(...)` give a `InferenceStep`: seconds of a stage by what kernels do,
collectives, and the seconds until a step's tokens are there. With pipeline parallelism the sequences of a
rank are dealt to as many microbatches as there are stages, which follow each other through them: each stage
works all the time, and a token takes all stages' time.

Collectives of a layer: all-reduce of hidden states behind attention and behind the feed-forward (tp); with ep
the latter is two all-to-alls of the rows of tokens' experts, and an all-gather of tokens (tp). Nothing runs
beside them.

To sample, ranks gather 8 bytes a sample and rank: the best token of the rank's part of the vocabulary, and
its logit. That is what greedy sampling and sampling with a temperature need. Other samplers gather more,
which is not in the plan: 12 bytes with min-p, penalties, logit_bias or token masks, and logits of whole rows
with top-p, top-k or log probabilities.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from tinygrad_nv.dist.plan import compute
from tinygrad_nv.dist.plan.cluster import Cluster
from tinygrad_nv.dist.plan.collectives import Collective, Use, collective, expose
from tinygrad_nv.dist.plan.layer import Layer, Seconds
from tinygrad_nv.dist.plan.layout import DTYPES, HALF, Inference, Layout, parameters, rank_config
from tinygrad_nv.dist.plan.memory import kv_bytes
from tinygrad_nv.models.config import ModelConfig


@dataclass(frozen=True)
class InferenceStep:
    """A step. `kernels`, `uses`: of all stages; `seconds` until its tokens are there; `period_s` until the
    next can begin; `nbytes`: what a rank of the first stage reads of weights and cache."""
    kernels: Seconds
    uses: tuple[Use, ...]
    seconds: float
    period_s: float
    nbytes: float = 0.0


def decode(config: ModelConfig, layout: Layout, work: Inference, cluster: Cluster,
           context: int) -> InferenceStep:
    """One token of each sequence, of which `context` tokens are cached."""
    each = ceil(work.batch / layout.dp / layout.pp)
    def layer(one: Layer) -> Seconds:
        rank = one.rank
        share = kv_bytes(rank, work, context) / rank.num_layers
        return one.decode(each, context, each * share)
    made = _stages(config, layout, work, cluster, each, each, layer)
    rank = rank_config(config, layout, 0)
    cache = each * kv_bytes(rank, work, context)
    held = parameters(config, layout, 0)
    idle = 0.0
    if rank.moe is not None:
        one = Layer(rank, rank.moe.layers.index(True), layout, cluster.device, work.quantization)
        idle = held.experts * (1 - 1 / rank.moe.experts) ** one.rows(each)
    nbytes = (held.matrices - idle) * DTYPES[work.quantization] + \
        HALF * rank.hidden_size * rank.vocab_size * (layout.pp == 1) + cache
    return InferenceStep(made.kernels, made.uses, made.seconds, made.period_s * layout.pp, nbytes)


def prefill(config: ModelConfig, layout: Layout, work: Inference, cluster: Cluster, tokens: int,
            sequences: int) -> InferenceStep:
    """So many tokens of so many sequences, which are whole."""
    length = max(1, tokens // sequences)
    return _stages(config, layout, work, cluster, tokens, sequences, lambda one: one.prefill(tokens, length))


def _stages(config: ModelConfig, layout: Layout, work: Inference, cluster: Cluster, tokens: int, sampled: int,
            layer: Callable[[Layer], Seconds]) -> InferenceStep:
    kernels, times, uses = Seconds(), list[float](), dict[str, Use]()
    for stage in range(layout.pp):
        rank = rank_config(config, layout, stage)
        made, kinds = Seconds(), dict[tuple[bool, int | None], Seconds]()
        for i in range(rank.num_layers):
            one = Layer(rank, i, layout, cluster.device, work.quantization)
            key = one.mixture, rank.windows[i]
            if key not in kinds: kinds[key] = layer(one)
            made += kinds[key]
        if stage == layout.pp - 1: made += _head(rank, cluster, sampled)
        made = made.times(1 / work.achieved)
        mine = _collectives(rank, layout, cluster, tokens, sampled, stage)
        for use in mine: uses[use.purpose] = use if use.purpose not in uses else uses[use.purpose].plus(use)
        kernels += made
        times.append(made.total + sum(use.exposed_s for use in mine))
    return InferenceStep(kernels, tuple(uses.values()), sum(times), max(times))


def _head(rank: ModelConfig, cluster: Cluster, sampled: int) -> Seconds:
    """Logits, and a token of them."""
    device = cluster.device
    return Seconds(compute.matmul(device, sampled, rank.vocab_size, rank.hidden_size),
                   other=compute.move(device, sampled * rank.vocab_size * HALF, launches=2))


def _collectives(rank: ModelConfig, layout: Layout, cluster: Cluster, tokens: int, sampled: int,
                 stage: int) -> tuple[Use, ...]:
    """Returns the collectives of a stage."""
    hidden, tensor = tokens * rank.hidden_size * HALF, layout.tensor_group(cluster)
    mixtures = sum(rank.moe.layers) if rank.moe is not None and layout.ep > 1 else 0
    found: list[tuple[str, Collective, float]] = []
    if layout.tp > 1:
        reduced = collective("all_reduce", hidden, tensor, cluster)
        found.append(("hidden states (tp)", reduced, 2 * rank.num_layers - mixtures + (stage == 0)))
        if mixtures:
            found.append(("tokens (tp)", collective("all_gather", hidden, tensor, cluster), mixtures))
        if stage == layout.pp - 1:
            largest = collective("all_gather", sampled * 8 * layout.tp, tensor, cluster)
            found.append(("largest logits (tp)", largest, 1))
    if mixtures and rank.moe is not None:
        dealt = collective("all_to_all", hidden / layout.tp * rank.moe.policy.k, layout.expert_group(cluster),
                           cluster)
        found.append(("tokens to experts and back (ep)", dealt, 2 * mixtures))
    if stage < layout.pp - 1:
        sent = collective("send", hidden / layout.tp, layout.stages_apart(cluster), cluster)
        found.append(("hidden states (pp)", sent, 1))
    return tuple(expose(*each) for each in found)
