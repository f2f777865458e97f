"""Memory of a device, by what it holds.

Protocol: `memory(config, layout, work, cluster)` is of the stage that takes most. Of inference: weights, the
KV cache of all sequences at full length in whole pages, and the activations of a step, by the engine's own
estimate (engine/memory_planning.py); on one GPU these are the bytes that an `LLM` takes. Of training:

    weights       bf16, whole in a step; with ZeRO-3 the layer in use and the one gathered ahead. In pipelines
                  they stay whole after a step's first gather, and gradients until its end
    master        float32, AdamW's states 2 · float32: of ZeRO-1 and up each data-parallel rank has a share
    gradients     float32; of ZeRO-2 and up a share, and two layers whole
    activations   results that the backward pass reads, of as many microbatches as the pipeline has under way
                  (training.py); sliced by tensor parallelism, hidden states only with sp
    logits        bf16, float32 and their gradient, of a microbatch, on the last stage

Selective recomputation keeps the results of attention and of every second matmul; full keeps a layer's input.
Both hold one layer of all for the time of its backward pass.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from tinygrad.dtype import dtypes

from tinygrad_nv.dist.plan.cluster import Cluster, figures
from tinygrad_nv.dist.plan.layout import (
    DTYPES,
    HALF,
    Inference,
    Layout,
    Training,
    Work,
    optimizer_share,
    parameters,
    rank_config,
)
from tinygrad_nv.dist.plan.training import under_way
from tinygrad_nv.engine.memory_planning import step_bytes
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.models.config import ModelConfig

PAGE = 16       # tokens
FLOAT = 4
LOGITS = 2 * HALF + FLOAT       # of an element: logits and their gradient in bf16, softmax in float32
GATHERED = 2    # layers of ZeRO-3 that are whole at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest device, by name, and how many it may hold."""
    parts: tuple[tuple[str, int], ...]
    limit: int
    stage: int

    @property
    def total(self) -> int:
        """All parts."""
        return sum(size for _, size in self.parts)

    @property
    def fits(self) -> bool:
        """Whether it is enough."""
        return self.total <= self.limit

    def of(self, name: str) -> int:
        """A part."""
        return dict(self.parts).get(name, 0)


def memory(config: ModelConfig, layout: Layout, work: Work, cluster: Cluster) -> Memory:
    """Returns the memory of the stage that takes most."""
    limit = int(cluster.device.memory_bytes * work.utilization) - figures()["overhead"]["context_bytes"]
    def of(stage: int) -> Memory:
        parts = inference(config, layout, work, stage) if isinstance(work, Inference) else \
            training(config, layout, work, stage)
        return Memory(tuple((name, size) for name, size in parts.items() if size), limit, stage)
    return max(map(of, range(layout.pp)), key=lambda each: each.total)


# **** inference ****

def inference(config: ModelConfig, layout: Layout, work: Inference, stage: int) -> dict[str, int]:
    """Parts of a rank of a stage."""
    rank, held = rank_config(config, layout, stage), parameters(config, layout, stage)
    sequences = work.batch // layout.dp
    weights = held.matrices * DTYPES[work.quantization] + held.others * HALF
    activations = step_bytes(rank, dtypes.bfloat16, work.max_tokens + sequences, sequences)
    cache = sequences * kv_bytes(rank, work, work.input_len + work.output_len)
    return {"weights": ceil(weights), "KV cache": cache, "activations": activations}


def kv_bytes(rank: ModelConfig, work: Inference, tokens: int) -> int:
    """Returns the bytes of the cache of one sequence of so many tokens, in whole pages; layers with a window
    keep what it sees."""
    size = DTYPES[work.kv_dtype] * rank.kv_shape.elements
    whole = ceil((tokens + GROUP - 1) / PAGE)      # tokens are computed in groups
    pages = sum(whole if window is None else min(whole, ceil(window / PAGE) + 1) for window in rank.windows)
    return int(pages * PAGE * size)


def most_sequences(config: ModelConfig, layout: Layout, work: Inference, cluster: Cluster) -> int:
    """How many sequences fit, in all; 0 where weights alone do not."""
    low, high = 0, 1 << 16
    while low < high:
        middle = (low + high + 1) // 2
        if memory(config, layout, replace(work, batch=middle * layout.dp), cluster).fits: low = middle
        else: high = middle - 1
    return low * layout.dp


# **** training ****

def training(config: ModelConfig, layout: Layout, work: Training, stage: int) -> dict[str, int]:
    """Parts of a rank of a stage."""
    rank, held = rank_config(config, layout, stage), parameters(config, layout, stage)
    whole, share = held.total, optimizer_share(held, layout)
    layer = (held.total - _ends(rank, layout, stage)) / rank.num_layers
    resident = layer * min(GATHERED, rank.num_layers) + _ends(rank, layout, stage)
    tokens = work.microbatch * work.seq_len
    kept = activation_bytes(rank, layout, work, tokens)
    flying = under_way(work, layout.pp, stage, work.batch // (layout.dp * work.microbatch))
    last = stage == layout.pp - 1
    streams = layout.pp == 1
    return {"weights": ceil(HALF * (resident if work.zero == 3 and streams else whole)),
            "master weights": ceil(FLOAT * (share if work.zero else whole)),
            "AdamW": ceil(2 * FLOAT * (share if work.zero else whole)),
            "gradients": ceil(FLOAT * (share + resident if work.zero >= 2 and streams else whole)),
            "activations": ceil(kept * flying + recompute_bytes(rank, layout, work, tokens)),
            "logits": last * tokens * rank.vocab_size * LOGITS}


def _ends(rank: ModelConfig, layout: Layout, stage: int) -> int:
    """Parameters of embedding and head that a stage has."""
    here = (stage == 0) + (stage == layout.pp - 1 and not (rank.tied and layout.pp == 1))
    return rank.hidden_size * rank.vocab_size * here


def _widths(rank: ModelConfig, layout: Layout) -> tuple[float, float, float]:
    """Elements of a token in a layer that a backward pass reads: hidden states, results of matmuls of
    attention and of its kernel, results of matmuls of the feed-forward."""
    hidden = rank.hidden_size / (layout.tp if layout.sp else 1)
    attended = rank.attention_width + rank.num_heads * (rank.latent.value if rank.latent else rank.head_dim)
    wide = 3.0 * rank.intermediate_size
    if rank.moe is not None:
        mixtures = sum(rank.moe.layers) / rank.num_layers
        rows = rank.moe.policy.k * (3 * rank.moe.width + 2 * rank.hidden_size) + 3 * rank.moe.shared_width
        wide = (1 - mixtures) * wide + mixtures * rows
    return 4 * hidden, attended, wide


def activation_bytes(rank: ModelConfig, layout: Layout, work: Training, tokens: int) -> float:
    """Kept of a microbatch in all layers of a stage."""
    hidden, attended, wide = _widths(rank, layout)
    each = {"none": hidden + attended + wide, "full": hidden / 4,
            "selective": hidden / 2 + attended / 2 + wide / 3}[work.recompute]
    return HALF * tokens * rank.num_layers * each


def recompute_bytes(rank: ModelConfig, layout: Layout, work: Training, tokens: int) -> float:
    """Returns the bytes of one layer that is computed again, for the time of its backward pass."""
    return HALF * tokens * sum(_widths(rank, layout))
