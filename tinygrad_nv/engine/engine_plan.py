"""Settings of an engine beside its model runner, in terms that a process can tell another.

Protocol: `EnginePlan.open(plan, runner)` makes the core over a loaded runner, with its pages and what drafts
tokens for it. Every replica of a model (executor/) opens the same one.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.executor.plan import RunnerPlan
from tinygrad_nv.engine.speculation.ngram import NgramProposer
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.state_table import StatePages

if TYPE_CHECKING:
    from tinygrad_nv.engine.speculation.draft_model import DraftModelFiles, DraftModelProposer


@dataclass(frozen=True)
class OpenEngine:
    """A core, and its draft model if it has one."""
    core: EngineCore
    draft_model: DraftModelProposer | None


@dataclass(frozen=True)
class EnginePlan:
    """`sharing`: prompts with a common prefix share pages. Without a draft model, a prompt's own tokens are
    looked up where drafts are asked for (`config.num_speculative_tokens`). `tokenizer` is the directory whose
    tokens structured output is made of."""
    config: EngineConfig
    sharing: bool
    draft: DraftModelFiles | None
    tokenizer: Path

    def open(self, plan: RunnerPlan, runner: ModelRunner) -> OpenEngine:
        """The engine over a runner of this plan."""
        states = None
        if plan.num_states:
            states = StatePages(plan.num_states, plan.max_seqs, plan.page_size, self.sharing)
        pool = PagePool(plan.num_pages, plan.page_size, host_pages=plan.host_pages, sharing=self.sharing,
                        windows=plan.groups.windows, states=states)
        draft = None if self.draft is None else self.draft.load(runner, plan.max_batched_tokens)
        proposer = draft or (NgramProposer() if self.config.num_speculative_tokens else None)
        return OpenEngine(EngineCore(runner, pool, self.config, proposer), draft)
