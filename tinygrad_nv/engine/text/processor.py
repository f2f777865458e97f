"""`OutputProcessor`: a request's chosen tokens become text.

Protocol: `process(chosen)` gives the `Delta` of one `Chosen`, or None for what comes after a sequence's end.
The core knows tokens, and ends sequences at end tokens and lengths; stop strings are found here. A delta that
ends a sequence which its `Chosen` did not end says so (`Delta.finish_reason`): its caller tells the core to
stop, and what the core chose meanwhile is dropped.

An end token has no text, unless `include_stop_str_in_output`. Text of the first `min_tokens` tokens is not
searched for stop strings.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.engine.outputs import Chosen, Delta, TokenLogprobs
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.batch import Logprobs
from tinygrad_nv.engine.text.detokenizer import Detokenizer, StopStrings
from tinygrad_nv.engine.text.tokenizer import Tokenizer


class OutputProcessor:
    """The texts of a request with `prompt`. Without a tokenizer they are empty."""

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams) -> None:
        self.tokenizer, self.prompt, self.params = tokenizer, prompt, params
        self.growing = {index: self._text() for index in range(params.n)}

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return not self.growing

    def process(self, chosen: Chosen) -> Delta | None:
        """What became certain by `chosen`."""
        if (text := self.growing.get(chosen.index)) is None: return None
        reason, stop = chosen.finish_reason, chosen.stop_reason
        shown, used = text.push(chosen.tokens, reason, chosen.complete)
        if text.stops.found is not None: reason, stop = "stop", text.stops.found
        if reason is not None: del self.growing[chosen.index]
        tokens, logprobs = chosen.tokens[:used], chosen.logprobs[:used]
        told = tuple(self._told(*each) for each in zip(tokens, logprobs, strict=True)) if logprobs else ()
        return Delta(chosen.index, shown, tokens, told, reason, stop, chosen.cached_tokens, chosen.error)

    def _text(self) -> Text:
        if self.tokenizer is None: return Text(Detokenizer(lambda _: ""), self.params)
        return Text(Detokenizer(self.tokenizer.decode, self.prompt, self.tokenizer.silent), self.params)

    def _told(self, token: int, logprobs: Logprobs) -> TokenLogprobs:
        text = self.tokenizer.token_text if self.tokenizer else lambda _: ""
        top = tuple((each, text(each), value) for each, value in logprobs.top)
        return TokenLogprobs(token, text(token), logprobs.chosen, logprobs.rank, top)


class Text:
    """A sequence's text while it grows."""

    def __init__(self, pieces: Detokenizer, params: SamplingParams) -> None:
        self.pieces, self.params, self.count = pieces, params, 0
        self.stops = StopStrings(params.stop, params.include_stop_str_in_output)

    def push(self, tokens: Sequence[int], reason: str | None, complete: bool = False) -> tuple[str, int]:
        """The text that became certain, and how many of `tokens` are in use: those behind a stop string are
        not. `reason` is why the sequence ends with them, if it does; without an end token if `complete`."""
        shown, used = "", 0
        ended = reason == "stop" and not complete and not self.params.include_stop_str_in_output
        end_token = len(tokens) if ended else 0
        for used, token in enumerate(tokens, 1):
            self.count += 1
            if used != end_token: shown += self._searched(self.pieces.push(token))
            if self.stops.found is not None: return shown, used
        if reason is not None: shown += self._searched(self.pieces.flush()) + self.stops.flush()
        return shown, used

    def _searched(self, piece: str) -> str:
        return self.stops.push(piece) if self.count > self.params.min_tokens else piece
