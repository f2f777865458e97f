"""Rows of logits for tests of the sampler, and what transformers makes of one."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tinygrad import Tensor
from transformers import generation

from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler import apply_filters, next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.patterns.embedding import embedding

V = 300


def logits_of(seed: int, scale: float = 3.0, size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def union(rows: Sequence[SamplingParams]) -> Filters:
    """What any of them needs."""
    found = Filters()
    for params in rows: found |= params.filters
    return found


class Case:
    """Rows of logits, each with its own slot, in another order than the slots. `seen` are prompt tokens,
    `said` output tokens, of every row."""

    def __init__(self, rows: Sequence[SamplingParams], size: int = V, seen: Sequence[int] = (),
                 said: Sequence[int] = (), state: SamplerState | None = None,
                 device: str | None = None) -> None:
        self.filters, self.size, self.device = union(rows), size, device
        self.state = state or SamplerState(len(rows) + 2, size, device)
        order = np.random.default_rng(len(rows)).permutation(len(rows)).astype(np.int32)
        for slot, params in zip(order.tolist(), rows, strict=True):
            self.state.start_slot(slot, params, params.seed or 0, seen, said)
        self.rows = Tensor(order, device=device).realize()

    def tokens(self, logits: np.ndarray, positions: int | Sequence[int] = 0, filters: Filters | None = None,
               masks: np.ndarray | None = None) -> list[int]:
        """The rows' next tokens."""
        at = np.broadcast_to(np.array(positions, np.int32), len(logits))
        made = self.made(Tensor(logits, device=self.device), Tensor(at.copy(), device=self.device), filters,
                         None if masks is None else Tensor(masks, device=self.device))
        return [int(each) for each in made.numpy()]

    def made(self, logits: Tensor, positions: Tensor, filters: Filters | None = None,
             masks: Tensor | None = None) -> Tensor:
        """The rows' next tokens on the device."""
        return next_tokens(logits, filters or self.filters, self.state, self.rows, positions, masks)

    def apply_filters(self, logits: np.ndarray, filters: Filters | None = None) -> np.ndarray:
        """The rows' logits after every filter."""
        numbers = embedding(self.state.numbers, self.rows)
        made = apply_filters(Tensor(logits, device=self.device), filters or self.filters, self.state,
                             self.rows, numbers)
        return made.numpy()


def their_filtered(logits: np.ndarray, params: SamplingParams, seen: Sequence[int],
                   said: Sequence[int] = ()) -> np.ndarray:
    """transformers' logits [V] after its processors, in the order of its `generate`; bias before, and
    vLLM's penalties of the output, which it has not, after that of repetition."""
    ids, scores = torch.tensor([[*seen, *said]], dtype=torch.int64), torch.tensor(logits)[None].clone()
    for token, each in (params.logit_bias or {}).items(): scores[0, token] += each
    steps: list[generation.LogitsProcessor] = []
    if params.repetition_penalty != 1:
        scores = generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    for token in said: scores[0, token] -= params.frequency_penalty
    for token in set(said): scores[0, token] -= params.presence_penalty
    if params.temperature: steps.append(generation.TemperatureLogitsWarper(params.temperature))
    if params.top_k: steps.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1: steps.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p: steps.append(generation.MinPLogitsWarper(params.min_p))
    for step in steps: scores = step(ids, scores)
    made: np.ndarray = scores[0].numpy()
    return made
