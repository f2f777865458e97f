"""`OutputProcessor`: sampled tokens of a request to text.

Protocol: `process(output)` returns the `Delta` of one `EngineCoreOutput`, or None after the end of the
sequence. The core ends sequences at end tokens and length limits; stop strings are found here. If a delta has
a finish reason and its `EngineCoreOutput` has none, the caller must tell the core to finish the sequence;
tokens that the core sampled meanwhile are dropped.

An end token has no text, unless `include_stop_str_in_output`. Text of the first `min_tokens` tokens is not
searched for stop strings.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput, TokenLogprobs
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs
from tinygrad_nv.engine.text.detokenizer import CHARACTER_TOKENS, Detokenizer, StopStrings, text_in_place
from tinygrad_nv.engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """The texts of a request. Without a tokenizer they are empty."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokenizer, self.prompt, self.params = tokenizer, prompt, params
        self.texts = {index: self._text() for index in range(params.n)}
        self.before: dict[int, list[int]] = {}      # the last tokens of a sequence with log probabilities

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return not self.texts

    def process(self, chosen: EngineCoreOutput) -> Delta | None:
        """The delta of `chosen`."""
        if (text := self.texts.get(chosen.index)) is None: return None
        reason, stop = chosen.finish_reason, chosen.stop_reason
        new_text, num_used = text.push(chosen.tokens, reason, chosen.complete)
        if text.stops.found is not None: reason, stop = "stop", text.stops.found
        if reason is not None: del self.texts[chosen.index]
        tokens, logprobs = chosen.tokens[:num_used], chosen.logprobs[:num_used]
        found = self._tokens_logprobs(self.before.setdefault(chosen.index, []), tokens, logprobs) \
            if logprobs else ()
        prompt = self._tokens_logprobs([*self.prompt[:1]], self.prompt[1:], chosen.prompt_logprobs) \
            if chosen.prompt_logprobs else ()
        return Delta(chosen.index, new_text, tokens, found, reason, stop, chosen.cached_tokens, chosen.error,
                     prompt)

    def _text(self) -> SequenceText:
        if self.tokenizer is None or not self.params.detokenize:
            return SequenceText(Detokenizer(lambda _: ""), self.params)
        tokenizer, skip = self.tokenizer, self.params.skip_special_tokens
        decode = partial(tokenizer.decode, skip_special_tokens=skip)
        silent = tokenizer.silent if skip else tokenizer.unknown
        return SequenceText(Detokenizer(decode, self.prompt, silent), self.params)

    def _tokens_logprobs(self, before: list[int], tokens: Sequence[int],
                         logprobs: Sequence[Logprobs]) -> tuple[TokenLogprobs, ...]:
        """Those of tokens that follow `before`, which gets them."""
        made = []
        for token, found in zip(tokens, logprobs, strict=True):
            text = self._text_after(before)
            top = tuple((each, text(each), value) for each, value in found.top)
            made.append(TokenLogprobs(token, text(token), found.chosen, found.rank, top))
            before[:] = [*before[1 - CHARACTER_TOKENS:], token]
        return tuple(made)

    def _text_after(self, before: Sequence[int]) -> Callable[[int], str]:
        """The texts of tokens that may follow `before`."""
        if (tokenizer := self.tokenizer) is None: return lambda _: ""
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        return lambda token: text_in_place(tokenizer.token_text(token), decode, before, token)


class SequenceText:
    """The text of one sequence."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self.detokenizer, self.params, self.count = detokenizer, params, 0
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output)

    def push(self, tokens: Sequence[int], reason: str | None, complete: bool = False) -> tuple[str, int]:
        """The new text, and how many of `tokens` are used: tokens after a stop string are not. `reason` is
        the finish reason, if the sequence ends with them. `complete`: it ends without an end token."""
        new_text, num_used = "", 0
        ended = reason == "stop" and not complete and not self.params.include_stop_str_in_output
        end_token = len(tokens) if ended else 0
        for num_used, token in enumerate(tokens, 1):
            self.count += 1
            if num_used != end_token: new_text += self._check_stops(self.detokenizer.push(token))
            if self.stops.found is not None: return new_text, num_used
        if reason is not None: new_text += self._check_stops(self.detokenizer.flush()) + self.stops.flush()
        return new_text, num_used

    def _check_stops(self, piece: str) -> str:
        return self.stops.push(piece) if self.count > self.params.min_tokens else piece
