"""Incremental detokenization, and stop strings.

Protocol: a `Detokenizer` takes one id at a time and returns the text that id completed, possibly none;
`flush` returns the text held back at the end of the sequence. All pieces joined are exactly decode(prompt +
ids) without decode(prompt): bytes of an incomplete character are held until the character is complete, and
the first word keeps the space that decoders strip at the start of a text. `StopStrings` holds back text that
may become a stop string.

Technique: decode a short window twice, with and without the new ids, and emit the difference (as vLLM and
transformers' streamers do). The cost depends on the window, not on the length of the text.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

# prompt tokens in the first window: enough for any character (4 bytes) and a word before it
CONTEXT_TOKENS = 6
UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character


class Detokenizer:
    """Turns a stream of ids into a stream of text; `decode` maps ids to text. `silent` ids have no text and
    take no place in the window."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (),
                 silent: Callable[[int], bool] = lambda _: False) -> None:
        self.decode, self.silent = decode, silent
        self.ids = list(prompt[-CONTEXT_TOKENS:])
        self.start, self.end = 0, len(self.ids)  # ids[start:end] has been emitted
        self.emitted = decode(self.ids)

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self.ids.append(token)
        now = self.decode(self.ids[self.start:])
        if now == self.emitted and self.silent(token): self.ids.pop()
        if now.endswith(UNFINISHED) or not now.startswith(self.emitted): return ""
        piece = now[len(self.emitted):]
        if piece:
            self.start, self.end = self.end, len(self.ids)
            self.emitted = self.decode(self.ids[self.start:])
        return piece

    def flush(self) -> str:
        """The text still held back; undecodable bytes become U+FFFD."""
        now = self.decode(self.ids[self.start:])
        piece = now[len(self.emitted):]
        self.start, self.end, self.emitted = len(self.ids), len(self.ids), ""
        return piece


class StopStrings:
    """Cuts a stream of text before the first stop string, or after it (`include`). Holds back any tail that
    may become one. `found` is the stop string met."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include = tuple(stops), include
        self.held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that can no longer become part of a stop string."""
        if self.found is not None: return ""
        if not self.stops: return piece
        text = self.held + piece
        if places := [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]:
            at, self.found = min(places, key=lambda place: place[0])
            self.held = ""
            return text[:at + len(self.found)] if self.include else text[:at]
        keep = max(overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """The text held back."""
        text, self.held = self.held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    if stop[0] not in text: return 0
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
