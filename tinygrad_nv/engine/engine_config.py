"""What an engine may do at a time, checked when it is made.

Protocol: `EngineConfig` is made once; the scheduler and the core read it. Numbers that contradict each other
are a `ConfigError` here, so that no step meets them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.engine.scheduling.batch import GROUP
from tinygrad_nv.errors import ConfigError

# what those who choose them call them: arguments of LLM, options of the command line
OPTIONS = {"max_seqs": "max_num_seqs", "max_batched_tokens": "max_num_batched_tokens",
           "max_len": "max_model_len", "queue_limit": "max_queue"}


@dataclass(frozen=True)
class EngineConfig:
    """Bounds and habits of an engine.

    At most `max_seqs` sequences run at a time, and a step computes at most `max_batched_tokens` rows, those
    that only fill a group up included. A sequence has at most `max_len` tokens, prompt included. At most
    `queue_limit` requests wait that never ran. `overlap`: the next step is made before the last one's tokens
    are looked at. A request that waits gains one level of priority every `ageing_s` seconds. `eos` are the
    model's end tokens, `window` the keys a row of a sliding-window model sees. A sequence that must give its
    pages away moves them to the host rather than to compute them again if that is as long as `offload_cost`
    tokens for each page at most. `speculation`: tokens that are drafted for a sequence at most; 0: none.
    """
    max_seqs: int = 64
    max_batched_tokens: int = 512
    max_len: int = 2048
    queue_limit: int = 1024
    overlap: bool = True
    ageing_s: float = 10.0
    eos: tuple[int, ...] = ()
    window: int | None = None
    offload_cost: float = 4.0
    speculation: int = 0

    def __post_init__(self) -> None:
        _require(self, "max_seqs", self.max_seqs >= 1, "at least 1")
        _require(self, "max_batched_tokens", self.max_batched_tokens >= max(GROUP, self.max_seqs),
                 f"at least {max(GROUP, self.max_seqs)}: a row for each of max_num_seqs = {self.max_seqs} "
                 f"sequences, and a group of {GROUP}")
        _require(self, "max_len", self.max_len >= 2, "at least 2: a token of a prompt and one chosen")
        _require(self, "queue_limit", self.queue_limit >= 1, "at least 1")
        _require(self, "ageing_s", 0 < self.ageing_s < float("inf"), "a number > 0")
        _require(self, "window", self.window is None or self.window >= 1, "at least 1, or None")
        _require(self, "offload_cost", self.offload_cost >= 0, "a number ≥ 0")
        _require(self, "speculation", 0 <= self.speculation <= 64, "0 to 64 drafted tokens")


def _require(config: EngineConfig, name: str, holds: bool, expected: str) -> None:
    if holds: return
    shown = OPTIONS.get(name, name)
    raise ConfigError(f"{shown} is {getattr(config, name)!r}", expected, f"change {shown}")
