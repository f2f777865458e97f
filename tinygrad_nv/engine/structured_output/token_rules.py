"""`TokenRules`: allowed tokens and bad words of one sequence, beside its structured output.

Protocol: that of a matcher (scheduling/request.py). A mask has the allowed tokens, those that the grammar
allows if there is one, and none that would complete a bad word: one whose tokens before the last are the last
tokens of the output, as in vLLM. Where no token is left after some, only end tokens may follow, and the
answer ends; where none is left at the beginning, `TokenRules` raises a `RequestError`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tinygrad_nv.engine.structured_output.after_reasoning import AfterReasoning
from tinygrad_nv.engine.structured_output.matcher import GrammarMatcher, pack_mask
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import RequestError

Words = tuple[tuple[int, ...], ...]


def word_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> Words:
    """The tokens of each word, at the start of a text and after a blank: both may follow in an output. Blanks
    before a word are left out, as in vLLM."""
    bare = [word.lstrip() for word in words]
    found = [tuple(tokenizer.encode(text, special=False)) for word in bare for text in (word, f" {word}")]
    return tuple(dict.fromkeys(each for each in found if each))


class TokenRules:
    """See above. `allowed` is None where every token is; `vocab` ids exist, of which `eos` end an answer."""

    def __init__(self, vocab: int, eos: Sequence[int], allowed: Sequence[int] | None, words: Words,
                 grammar: GrammarMatcher | AfterReasoning | None = None) -> None:
        every = range(vocab) if allowed is None else allowed
        self._ends = pack_mask([token for token in eos if 0 <= token < vocab], vocab)
        self._allowed, self._words, self._grammar = pack_mask(every, vocab), words, grammar
        self._last: tuple[int, ...] = ()    # of the output, as many as the longest word has before its last
        self._kept = max((len(word) - 1 for word in words), default=0)
        self._mask = self._apply_mask((), None if grammar is None else grammar.mask())
        if self._mask is self._ends:
            raise RequestError("allowed_token_ids, bad_words and the structured output leave no token",
                               "one that may come first", "allow more tokens")

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow."""
        return self._grammar is not None and self._grammar.is_finished

    def mask(self) -> np.ndarray:
        """The token mask of the next token: uint32 [⌈vocab / 32⌉]."""
        return self._mask

    def masks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """The masks before each token of a draft and after it, as far as the draft is allowed."""
        grammars = [None] * (len(draft) + 1) if self._grammar is None else self._grammar.masks(draft)
        found, last = [self._mask], self._last
        for token, grammar in zip(draft, grammars[1:], strict=False):
            if not found[-1][token >> 5] >> np.uint32(token & 31) & np.uint32(1): break
            last = self._after(last, token)
            found.append(self._apply_mask(last, grammar))
        return found

    def accept(self, token: int) -> None:
        """Advances by one token."""
        self._last = self._after(self._last, token)
        if self._grammar is not None: self._grammar.accept(token)
        self._mask = self._apply_mask(self._last, None if self._grammar is None else self._grammar.mask())

    def _after(self, last: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*last, token)[-self._kept:] if self._kept else ()

    def _apply_mask(self, last: tuple[int, ...], grammar: np.ndarray | None) -> np.ndarray:
        mask = self._allowed.copy() if grammar is None else self._allowed & grammar
        for *before, token in self._words:
            if last[len(last) - len(before):] == tuple(before) and len(before) <= len(last):
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        return mask if mask.any() else self._ends
