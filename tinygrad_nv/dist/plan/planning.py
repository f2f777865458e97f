"""A plan: memory, times and rates of a layout.

Protocol: `plan(config, layout, cluster, work)` returns a frozen `Plan`, and raises `PlanError` for a layout
that is impossible. The plan of a layout that does not fit into memory has a false `memory.fits`;
`require_room` raises for it, with what would fit.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tinygrad_nv.dist.plan import layout as layouts
from tinygrad_nv.dist.plan.cluster import Cluster
from tinygrad_nv.dist.plan.collectives import Use
from tinygrad_nv.dist.plan.inference import decode, prefill
from tinygrad_nv.dist.plan.layer import Seconds
from tinygrad_nv.dist.plan.layout import Inference, Layout, Training, Work
from tinygrad_nv.dist.plan.memory import Memory, memory, most_sequences
from tinygrad_nv.dist.plan.training import train
from tinygrad_nv.errors import PlanError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.observe.memory_report import human


@dataclass(frozen=True)
class Plan:
    """Plan of a layout. `kernels`: seconds of a step's kernels in the slowest stage, of training those of a
    microbatch; `uses`: collectives of a step; `step_s` a decode step at the middle of the answer, or a step
    of training; `first_token_s` of one prompt by itself; `tokens_per_s` of all GPUs: of output tokens with
    prompts between them, or of all tokens trained on; `mfu` of training, `bandwidth` the share of HBM's peak
    that a decode step reads at; `bubble` the share of a step that stages wait."""
    layout: Layout
    cluster: Cluster
    work: Work
    memory: Memory
    kernels: Seconds
    uses: tuple[Use, ...]
    step_s: float
    tokens_per_s: float
    first_token_s: float = 0.0
    prefill_s: float = 0.0
    mfu: float = 0.0
    bandwidth: float = 0.0
    bubble: float = 0.0
    optimizer_s: float = 0.0
    microbatches: int = 1

    @property
    def per_gpu(self) -> float:
        """Tokens a second."""
        return self.tokens_per_s / self.cluster.gpus

    @property
    def exposed_s(self) -> float:
        """Seconds of collectives in a step that nothing hides."""
        return sum(each.exposed_s for each in self.uses)


def plan(config: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> Plan:
    """The plan of a layout. Raises `PlanError` for one that cannot be."""
    layouts.require(layout, config, cluster, work)
    held = memory(config, layout, work, cluster)
    if isinstance(work, Training): return _training(config, layout, cluster, work, held)
    return _inference(config, layout, cluster, work, held)


def _inference(config: ModelConfig, layout: Layout, cluster: Cluster, work: Inference, held: Memory) -> Plan:
    step = decode(config, layout, work, cluster, work.input_len + work.output_len // 2)
    alone = prefill(config, layout, work, cluster, work.input_len, 1)
    sequences = work.batch // layout.dp
    together = max(1, min(sequences, work.max_tokens // work.input_len))
    chunk = alone
    if together > 1: chunk = prefill(config, layout, work, cluster, together * work.input_len, together)
    prompts = ceil(sequences / together) * chunk.period_s
    seconds = prompts + work.output_len * step.period_s
    return Plan(layout, cluster, work, held, step.kernels, step.uses, max(step.seconds, step.period_s),
                work.batch * work.output_len / seconds, alone.seconds, prompts,
                bandwidth=step.nbytes * layout.pp / step.period_s / cluster.device.model.hbm_bytes_per_s)


def _training(config: ModelConfig, layout: Layout, cluster: Cluster, work: Training, held: Memory) -> Plan:
    step = train(config, layout, work, cluster)
    return Plan(layout, cluster, work, held, step.forward + step.backward, step.uses, step.seconds,
                work.batch * work.seq_len / step.seconds, mfu=step.mfu, bubble=step.bubble,
                optimizer_s=step.optimizer_s, microbatches=step.microbatches)


def require_room(config: ModelConfig, layout: Layout, cluster: Cluster, work: Work) -> None:
    """Raises `PlanError` for a layout that cannot be, and where memory is not enough: by how much, and what
    would fit."""
    layouts.require(layout, config, cluster, work)
    held = memory(config, layout, work, cluster)
    if held.fits: return
    parts = ", ".join(f"{human(size)} of {name}" for name, size in
                      sorted(held.parts, key=lambda part: -part[1])[:3])
    device = cluster.device
    raise PlanError(f"{layout}: {human(held.total)} a GPU, {human(held.total - held.limit)} more than "
                    f"fit ({parts})",
                    f"at most {human(held.limit)} of the {human(device.memory_bytes)} of {device.name}",
                    _advice(config, layout, cluster, work, held))


def _advice(config: ModelConfig, layout: Layout, cluster: Cluster, work: Work, held: Memory) -> str:
    if isinstance(work, Inference):
        if fitting := most_sequences(config, layout, work, cluster): return f"--batch {fitting}, which fits"
        smaller = "" if work.quantization != "bf16" else ", or --quantization int4"
        return f"more GPUs: weights are {human(held.of('weights'))} each{smaller}"
    tried = ["--zero 3"] * (work.zero < 3 and layout.dp > 1) + \
        ["--recompute full"] * (work.recompute != "full") + \
        ["--microbatch 1"] * (work.microbatch > 1) + ["--sp"] * (layout.tp > 1 and not layout.sp)
    return "; or ".join([*tried, "more GPUs, or a shorter --seq-len"])
