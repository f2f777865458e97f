"""`Matchers`: the matchers of requests, by their sampling parameters.

Protocol: `Matchers(tokenizer, vocab, eos)` is made once for a model; the tokenizer is asked for when a
request first needs one. `of(params)` has a matcher for each answer, or none where every token may follow.

`TokenRules` is a matcher (scheduling/request.py) of allowed tokens and bad words of one sequence, beside its
structured output. A mask has the allowed tokens, those that the grammar allows if there is one, and none that
would complete a bad word: one whose tokens before the last are the last tokens of the output, as in vLLM.
Where no token is left after some, only end tokens may follow, and the answer ends; where none is left at the
beginning, `TokenRules` raises a `RequestError`.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Matcher
from tinygrad_nv.engine.structured_output.after_reasoning import AfterReasoning
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler, GrammarMatcher, pack_mask
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


class Matchers:
    """See above. `vocab` ids exist, of which `eos` end an answer. Any thread may call it."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab: int, eos: Sequence[int]) -> None:
        self._tokenizer, self._vocab, self._eos = tokenizer, vocab, eos
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler and cache of structured output grammars."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer(), self._vocab, self._eos)
            return self._grammars

    def of(self, params: SamplingParams) -> tuple[Matcher, ...]:
        """A matcher for each answer if not every token may follow; compiling a new grammar takes up to
        seconds. Raises `RequestError` for a grammar that cannot be enforced."""
        if not params.needs_masks: return ()
        made = [self._matcher(params) for _ in range(params.n)]
        if params.allowed_token_ids is None and not params.bad_words: return tuple(filter(None, made))
        words = word_tokens(self._tokenizer(), params.bad_words) if params.bad_words else ()
        return tuple(TokenRules(self._vocab, self._eos, params.allowed_token_ids, words, each)
                     for each in made)

    def close(self) -> None:
        """Ends the subprocess that checks grammars."""
        if self._grammars is not None: self._grammars.close()

    def _matcher(self, params: SamplingParams) -> GrammarMatcher | AfterReasoning | None:
        """Makes the matcher of the structured output, and of the reasoning before it."""
        constraint = params.structured_outputs
        grammar = None if constraint is None else self.grammars.matcher(constraint)
        if params.reasoning is None: return grammar
        return AfterReasoning(params.reasoning, grammar, self._vocab, self._eos)
