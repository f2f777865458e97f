"""Limits of an engine, checked when they are set.

Protocol: `EngineConfig` is created once; the scheduler and the core read it. Values that contradict each
other raise `ConfigError` here, before any step runs.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.errors import ConfigError

# names in error messages: the arguments of LLM and options of the command line that set these fields
OPTIONS = {"max_seqs": "max_num_seqs", "max_batched_tokens": "max_num_batched_tokens",
           "max_len": "max_model_len", "queue_limit": "max_queue"}


@dataclass(frozen=True)
class EngineConfig:
    """Limits and options of an engine.

    `max_seqs`: sequences that run at a time. `max_batched_tokens`: token budget of a step, padding of groups
    included. `max_len`: tokens of a sequence, prompt included. `queue_limit`: requests that wait and have
    never run; the cores of several replicas have no limit of their own. `overlap`: schedule the next step
    before the output of the last one is processed. `ageing_s`: a waiting request gains one level of priority
    every so many seconds. `eos`: end tokens of the model. `offload_cost`: a preempted sequence is offloaded
    to the host, rather than recomputed, if it has more than `offload_cost` tokens for each page.
    `num_speculative_tokens`: draft tokens for each sequence and step; 0 turns speculative decoding off.
    `max_adapters`: adapters that run at a time. `stages`: ranks that a step passes one after the other
    (pipeline parallelism), each of which may have a step of its own."""
    max_seqs: int = 64
    max_batched_tokens: int = 512
    max_len: int = 2048
    queue_limit: int = 1024
    overlap: bool = True
    ageing_s: float = 10.0
    eos: tuple[int, ...] = ()
    offload_cost: float = 4.0
    num_speculative_tokens: int = 0
    max_adapters: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        _require(self, "max_seqs", self.max_seqs >= 1, "at least 1")
        _require(self, "max_batched_tokens", self.max_batched_tokens >= max(GROUP, self.max_seqs),
                 f"at least {max(GROUP, self.max_seqs)}: a token for each of max_num_seqs = {self.max_seqs} "
                 f"sequences, and a group of {GROUP} tokens")
        _require(self, "max_len", self.max_len >= 2, "at least 2: one prompt token and one output token")
        _require(self, "queue_limit", self.queue_limit >= 1, "at least 1")
        _require(self, "ageing_s", 0 < self.ageing_s < float("inf"), "a number > 0")
        _require(self, "offload_cost", self.offload_cost >= 0, "a number ≥ 0")
        _require(self, "num_speculative_tokens", 0 <= self.num_speculative_tokens <= 64,
                 "0 to 64 draft tokens")


def _require(config: EngineConfig, name: str, holds: bool, expected: str) -> None:
    if holds: return
    shown = OPTIONS.get(name, name)
    raise ConfigError(f"{shown} is {getattr(config, name)!r}", expected, f"change {shown}")
