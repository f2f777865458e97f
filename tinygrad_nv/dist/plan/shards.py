"""Shards: the slice of a model that one rank holds, as a configuration of its own.

Protocol: `rank_config(config, layout, stage)` is the model that a rank of a pipeline stage computes: its
layers (those that the engine gives the stage: models/parallel.py), its heads, its columns, its experts.
Stages are numbered as layers follow each other: 0 has the embedding, the last one the head, whichever ranks
run them. All sizes, and the engine's estimates of memory, follow from it. Key/value heads of which there are
fewer than ranks are held by several. `parameters(config, layout, stage)`
counts what is stored; with one rank that is `config.parameters`.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad_nv.dist.plan.layout import Layout
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.parallel import stage_layers


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank: `matrices` are multiplied and can be quantised, `experts` of them
    those of experts; `others` are the embedding, the head, norms and routers."""
    matrices: int
    experts: int
    others: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.matrices + self.others


def rank_config(config: ModelConfig, layout: Layout, stage: int) -> ModelConfig:
    """The share of a rank of a stage. Raises nothing: `layout.require` comes first."""
    layers, tp = stage_layers(config.num_layers, stage, layout.pp), layout.tp
    part = slice(layers.start, layers.stop)
    moe = config.moe
    if moe is not None:
        mine = moe.experts // layout.ep
        moe = replace(moe, experts=mine, width=moe.width if layout.ep > 1 else moe.width // tp,
                      shared_width=-(-moe.shared_width // tp), layers=moe.layers[part])
        if not any(moe.layers): moe = None
    return replace(config, num_layers=len(layers), num_heads=config.num_heads // tp,
                   num_kv_heads=max(1, config.num_kv_heads // tp), head_dim=config.head_dim,
                   intermediate_size=config.intermediate_size // tp, vocab_size=-(-config.vocab_size // tp),
                   ropes=config.ropes[part], windows=config.windows[part], moe=moe)


def parameters(config: ModelConfig, layout: Layout, stage: int) -> Parameters:
    """Returns the numbers of parameters that a rank of a stage stores."""
    rank = rank_config(config, layout, stage)
    ends = rank.hidden_size * (rank.vocab_size * (2 - rank.tied) + 1)
    layers = rank.parameters - ends
    norms = rank.num_layers * rank.hidden_size * len(rank.names.norms)
    routers = experts = 0
    if rank.moe is not None and config.moe is not None:
        mixtures = sum(rank.moe.layers)
        experts = mixtures * 3 * rank.hidden_size * rank.moe.width * rank.moe.experts
        routers = mixtures * rank.hidden_size * config.moe.experts
        layers += mixtures * rank.hidden_size * (config.moe.experts - rank.moe.experts)
    first, last = stage == 0, stage == layout.pp - 1
    vocabulary = rank.hidden_size * rank.vocab_size
    kept = vocabulary * first + (vocabulary * (not (rank.tied and first)) + rank.hidden_size) * last
    return Parameters(layers - norms - routers, experts, kept + norms + routers)


def optimizer_share(held: Parameters, layout: Layout) -> float:
    """Parameters whose optimizer states a rank has where data-parallel ranks share them out: experts are on
    some of these only."""
    copies = max(1, layout.tp * layout.dp // layout.ep) if layout.ep > 1 else layout.dp
    return (held.total - held.experts) / layout.dp + held.experts / copies
