"""The best of all layouts.

Protocol: `search(config, cluster, work, Choice(tp=8))` plans every layout that `choice` leaves open: tensor
parallelism within a node, any pipeline, whole experts or sliced ones; of training ZeRO, recomputation and
microbatches, too. `Found` has plans that fit, the fastest first, and of the others one reason each, the
nearest to fitting first. A plan of a layout without enough memory is not timed.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tinygrad_nv.dist.plan import layout as layouts
from tinygrad_nv.dist.plan.cluster import Cluster
from tinygrad_nv.dist.plan.layout import Inference, Layout, Training, Work, divisors
from tinygrad_nv.dist.plan.memory import Memory, memory
from tinygrad_nv.dist.plan.planning import Plan, plan
from tinygrad_nv.errors import PlanError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.runtime.observe.memory_report import human

ZEROS = (1, 3)
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Choice:
    """Choices that are made already; None is searched. `sp` None: wherever training is tensor parallel."""
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    sp: bool | None = None
    zero: int | None = None
    recompute: str | None = None
    microbatch: int | None = None


@dataclass(frozen=True)
class Refused:
    """A layout that cannot be (`over` 0), or that takes `over` bytes more than fit."""
    layout: Layout
    work: Work
    why: str
    over: int = 0


@dataclass(frozen=True)
class Found:
    """Plans that fit, the fastest first; others with reasons."""
    plans: tuple[Plan, ...]
    refused: tuple[Refused, ...]


def search(config: ModelConfig, cluster: Cluster, work: Work, choice: Choice) -> Found:
    """All that is open."""
    plans, refused = [], []
    for layout, variant in variants(config, cluster, work, choice):
        try: layouts.require(layout, config, cluster, variant)
        except PlanError as error:
            refused.append(Refused(layout, variant, error.found))
            continue
        held = memory(config, layout, variant, cluster)
        if held.fits: plans.append(plan(config, layout, cluster, variant))
        else: refused.append(Refused(layout, variant, _too_much(held), held.total - held.limit))
    plans.sort(key=lambda each: (-each.tokens_per_s, each.step_s))
    refused.sort(key=lambda each: (not each.over, each.over))
    return Found(tuple(plans), tuple(refused))


def _too_much(held: Memory) -> str:
    most = max(held.parts, key=lambda part: part[1])
    over = human(held.total - held.limit)
    return f"{human(held.total)} a GPU, {over} too much; {human(most[1])} of {most[0]}"


def variants(config: ModelConfig, cluster: Cluster, work: Work,
             choice: Choice) -> Iterator[tuple[Layout, Work]]:
    """All layouts and works of a choice."""
    for layout in _layouts(config, cluster, isinstance(work, Training), choice):
        if isinstance(work, Inference): yield layout, work
        else:
            for setting in _settings(work, choice, layout.dp): yield layout, setting


def _settings(work: Training, choice: Choice, dp: int) -> Iterator[Training]:
    zeros = (ZEROS if dp > 1 else (0,)) if choice.zero is None else (choice.zero,)
    recomputes = layouts.RECOMPUTES if choice.recompute is None else (choice.recompute,)
    sizes = MICROBATCHES if choice.microbatch is None else (choice.microbatch,)
    for zero, recompute, size in product(zeros, recomputes, sizes):
        yield replace(work, zero=zero, recompute=recompute, microbatch=size)


def _layouts(config: ModelConfig, cluster: Cluster, trains: bool, choice: Choice) -> Iterator[Layout]:
    near = [tp for tp in divisors(cluster.gpus) if tp <= cluster.per_node]
    for tp in near if choice.tp is None else [choice.tp]:
        for pp in divisors(cluster.gpus) if choice.pp is None else [choice.pp]:
            dp = max(1, cluster.gpus // (tp * pp)) if choice.dp is None else choice.dp
            if choice.tp is None and tp * pp * dp != cluster.gpus: continue
            if choice.pp is None and (tp * pp * dp != cluster.gpus or pp > config.num_layers): continue
            sp = tp > 1 and trains if choice.sp is None else choice.sp
            for ep in _experts(config, tp, dp) if choice.ep is None else [choice.ep]:
                yield Layout(tp, pp, dp, ep, sp)


def _experts(config: ModelConfig, tp: int, dp: int) -> list[int]:
    if config.moe is None: return [1]
    whole = [ep for ep in divisors(tp * dp) if ep > 1 and ep % tp == 0 and config.moe.experts % ep == 0]
    return [1, *whole]
