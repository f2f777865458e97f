"""`AfterReasoning`: structured output of a model that reasons first, as in vLLM.

Protocol: that of a matcher (scheduling/request.py). While the model reasons every token is allowed, but no
end token, unless `may_end`; the constraint holds from the token after the markers of the end on. Where the
answer does not begin inside of the reasoning, its first token is the marker of the start, or the constraint's
first. After `budget` tokens of reasoning only the markers of the end may follow.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from tinygrad_nv.engine.structured_output.matcher import GrammarMatcher, pack_mask
from tinygrad_nv.engine.structured_output.params import ReasoningTokens


class Phase(Enum):
    """Phases of an answer."""
    BEGINNING = 0
    REASONING = 1
    ANSWER = 2


@dataclass(frozen=True)
class State:
    """`last`: the tokens of the reasoning that may be a start of its end; `count`: its tokens so far."""
    phase: Phase
    last: tuple[int, ...] = ()
    count: int = 0


class AfterReasoning:
    """See above. `inner` is the constraint; None where only the budget binds. `vocab` ids exist, of which
    `eos` end an answer."""

    def __init__(self, tokens: ReasoningTokens, inner: GrammarMatcher | None, vocab: int,
                 eos: Sequence[int]) -> None:
        self._tokens, self._inner, self._vocab = tokens, inner, vocab
        self._state = State(Phase.REASONING if tokens.inside else Phase.BEGINNING)
        every = pack_mask(range(vocab), vocab)
        ends = pack_mask([token for token in eos if 0 <= token < vocab], vocab)
        self._open = every if tokens.may_end else every & ~ends

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._state.phase is Phase.ANSWER and self._inner is not None and self._inner.is_finished

    def mask(self) -> np.ndarray | None:
        """The token mask of the next token; None allows every token."""
        return self._mask(self._state)

    def masks(self, draft: Sequence[int]) -> list[np.ndarray | None]:
        """The masks before each token of a draft and after it, as far as the draft is allowed."""
        return self._masks(self._state, draft)

    def accept(self, token: int) -> None:
        """Advances by one token."""
        phase, self._state = self._state.phase, self._next(self._state, token)
        # the first token of an answer without reasoning is the constraint's, too
        answers = self._state.phase is Phase.ANSWER and phase is not Phase.REASONING
        if answers and self._inner is not None: self._inner.accept(token)

    def _masks(self, state: State, draft: Sequence[int]) -> list[np.ndarray | None]:
        if state.phase is Phase.ANSWER: return self._answer(draft)
        mask = self._mask(state)
        if not draft or (mask is not None and not allows(mask, draft[0], self._vocab)): return [mask]
        then = self._next(state, draft[0])
        if then.phase is Phase.ANSWER and state.phase is Phase.BEGINNING:
            return [mask, *self._answer(draft)[1:]]
        return [mask, *self._masks(then, draft[1:])]

    def _answer(self, draft: Sequence[int]) -> list[np.ndarray | None]:
        return [None] * (len(draft) + 1) if self._inner is None else [*self._inner.masks(draft)]

    def _next(self, state: State, token: int) -> State:
        if state.phase is Phase.ANSWER: return state
        if state.phase is Phase.BEGINNING:
            return State(Phase.REASONING if token == self._tokens.start else Phase.ANSWER)
        last, size = (*state.last, token), len(self._tokens.end)
        if last[-size:] == self._tokens.end: return State(Phase.ANSWER)
        return State(Phase.REASONING, last[-size:], state.count + 1)

    def _mask(self, state: State) -> np.ndarray | None:
        if state.phase is Phase.ANSWER: return self._inner_mask()
        if state.phase is Phase.REASONING:
            budget = self._tokens.budget
            return self._open if budget is None or state.count < budget else self._ending(state)
        inner = self._inner_mask()
        start = self._tokens.start
        return inner if inner is None or start is None else inner | pack_mask([start], self._vocab)

    def _inner_mask(self) -> np.ndarray | None: return None if self._inner is None else self._inner.mask()

    def _ending(self, state: State) -> np.ndarray:
        """The mask of the end's next token, after as much of it as there is."""
        end = self._tokens.end
        size = next(n for n in range(len(end) - 1, -1, -1) if state.last[len(state.last) - n:] == end[:n])
        return pack_mask([end[size]], self._vocab)


def allows(mask: np.ndarray, token: int, vocab: int) -> bool:
    """Whether the mask allows a token."""
    return 0 <= token < vocab and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))
