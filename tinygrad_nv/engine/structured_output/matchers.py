"""`Matchers`: the matchers of requests, by their sampling parameters.

Protocol: `Matchers(tokenizer, vocab, eos)` is made once for a model; the tokenizer is asked for when a
request first needs one. `of(params)` has a matcher for each answer, or none where every token may follow.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Matcher
from tinygrad_nv.engine.structured_output.after_reasoning import AfterReasoning
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler, GrammarMatcher
from tinygrad_nv.engine.structured_output.token_rules import TokenRules, word_tokens
from tinygrad_nv.engine.text.tokenizer import Tokenizer


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
