"""Constraints that hold after the reasoning: whatever a model prefers, and with drafts."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.engine.structured_case import allowed, grammars, text, tokenizer
from tinygrad_nv.engine.structured_output.after_reasoning import AfterReasoning
from tinygrad_nv.engine.structured_output.params import ReasoningTokens
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured

START, STOP, MARK = 7, 9, 11    # of the vocabulary of "tales"
_, VOCAB, EOS = tokenizer("tales")
CHOICE = Structured(choice=["a fox", "two"])


def made(tokens: ReasoningTokens, constrained: bool = True) -> AfterReasoning:
    return AfterReasoning(tokens, grammars("tales").matcher(CHOICE) if constrained else None, VOCAB, [EOS])


def can_follow(mask: np.ndarray | None) -> list[int]:
    return [*range(VOCAB)] if mask is None else allowed(mask)


def said(matcher: AfterReasoning, seed: int, end: Sequence[int], after: int) -> tuple[list[int], list[int]]:
    """The reasoning and the answer of a model that likes every token, and its end after so many."""
    rng, ids, at = np.random.default_rng(seed), list[int](), -1
    while not matcher.is_finished:
        choice = can_follow(matcher.mask())
        wanted = end[len(ids) - after] if at < 0 and 0 <= len(ids) - after < len(end) else None
        token = wanted if wanted in choice else int(choice[rng.integers(len(choice))])
        assert token is not None
        matcher.accept(token)
        ids.append(token)
        if at < 0 and tuple(ids[-len(end):]) == tuple(end): at = len(ids)
        assert len(ids) < 100
    return ids[:max(at, 0)], ids[max(at, 0):]


@pytest.mark.parametrize("end", [(STOP,), (STOP, 100, MARK)])
def test_the_constraint_holds_after_the_reasoning(end: tuple[int, ...]):
    for seed in range(4):
        thought, answer = said(made(ReasoningTokens(None, end, True)), seed, end, 5 + seed)
        assert len(thought) >= 5
        assert EOS not in thought
        assert text("tales", answer) in ("a fox", "two")


def test_an_answer_may_begin_with_reasoning_or_without():
    tokens, grammar = ReasoningTokens(START, (STOP,), False), grammars("tales").matcher(CHOICE)
    assert can_follow(made(tokens).mask()) == sorted([*allowed(grammar.mask()), START])
    matcher = made(tokens)
    matcher.accept(START)
    assert len(can_follow(matcher.mask())) == VOCAB - 1     # all but the end token
    matcher.accept(3)
    matcher.accept(STOP)
    assert can_follow(matcher.mask()) == allowed(grammar.mask())
    # without: the first token is the constraint's
    matcher = made(tokens)
    first = allowed(grammar.mask())[0]
    for each in (matcher, grammar): each.accept(first)
    assert can_follow(matcher.mask()) == allowed(grammar.mask())
    assert made(ReasoningTokens(START, (STOP,), False, may_end=True)).mask() is not None


def test_an_answer_may_end_where_channels_have_calls():
    assert EOS in can_follow(made(ReasoningTokens(None, (STOP,), True, may_end=True)).mask())
    assert EOS not in can_follow(made(ReasoningTokens(None, (STOP,), True)).mask())


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_reasoning(budget: int):
    end = (STOP, 100, MARK)
    matcher = made(ReasoningTokens(None, end, True, budget=budget))
    for token in range(20, 20 + budget):
        assert len(can_follow(matcher.mask())) == VOCAB - 1
        matcher.accept(token)
    for token in end:
        assert can_follow(matcher.mask()) == [token]
        matcher.accept(token)
    assert can_follow(matcher.mask()) == allowed(grammars("tales").matcher(CHOICE).mask())
    # what the model has begun is completed
    matcher = made(ReasoningTokens(None, end, True, budget=2))
    for token in end[:2]: matcher.accept(token)
    assert can_follow(matcher.mask()) == [MARK]
    # without a constraint anything may follow
    free = made(ReasoningTokens(None, (STOP,), True, budget=0), constrained=False)
    free.accept(STOP)
    assert free.mask() is None
    assert not free.is_finished


@pytest.mark.parametrize("tokens", [
    ReasoningTokens(START, (STOP,), False), ReasoningTokens(None, (5, STOP), True),
    ReasoningTokens(None, (STOP,), True, budget=2)])
def test_masks_of_a_draft_are_those_after_its_tokens(tokens: ReasoningTokens):
    for seed in range(12):
        rng, matcher, draft = np.random.default_rng(seed), made(tokens), list[int]()
        steps = [matcher.mask()]
        while not matcher.is_finished and len(draft) < 7:
            choice = can_follow(matcher.mask())
            likely = [each for each in (START, 5, STOP) if each in choice]
            token = likely[seed % len(likely)] if likely and rng.random() < 0.6 else \
                int(choice[rng.integers(len(choice))])
            draft.append(token)
            matcher.accept(token)
            steps.append(matcher.mask())
        found = made(tokens).masks(draft)
        assert len(found) == len(steps)
        for one, other in zip(found, steps, strict=True): assert can_follow(one) == can_follow(other)
        # it ends at the first token that is not allowed
        for at, mask in enumerate(steps[:-1]):
            if bad := sorted({*range(VOCAB)} - {*can_follow(mask)})[:1]:
                assert len(made(tokens).masks([*draft[:at], *bad, *draft[at:]])) == at + 1
