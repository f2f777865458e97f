"""Token ids to text while they arrive.

Protocol: a `Detokenizer` is fed one id at a time and gives the text that id completed, possibly none;
`flush` gives what was held back when the sequence ends. All pieces joined are exactly decode(prompt + ids)
without decode(prompt): bytes of an unfinished character are held until the character is complete, and the
first word keeps the space that decoders strip at the start of a text. `StopStrings` holds back what may
become a stop string.

Technique: decode a short window twice, with and without the new ids, and emit the difference (as vLLM and
transformers' streamers do): the cost is that of the window, not of the text.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # prompt tokens in the first window: enough for any character (4 bytes) and a word before it
UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character


class Detokenizer:
    """Turns a stream of ids into a stream of text; `decode` maps ids to text. It leaves `silent` ids out, and
    so they need no place in the window."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (),
                 silent: Callable[[int], bool] = lambda _: False) -> None:
        self.decode, self.silent = decode, silent
        self.ids = list(prompt[-CONTEXT:])
        self.start, self.end = 0, len(self.ids)  # ids[start:end] has been emitted
        self.before = decode(self.ids)

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self.ids.append(token)
        now = self.decode(self.ids[self.start:])
        if now == self.before and self.silent(token): self.ids.pop()
        if now.endswith(UNFINISHED) or not now.startswith(self.before): return ""
        piece = now[len(self.before):]
        if piece:
            self.start, self.end = self.end, len(self.ids)
            self.before = self.decode(self.ids[self.start:])
        return piece

    def flush(self) -> str:
        """What is still held back, undecodable bytes as U+FFFD."""
        now = self.decode(self.ids[self.start:])
        piece = now[len(self.before):]
        self.start, self.end, self.before = len(self.ids), len(self.ids), ""
        return piece


class StopStrings:
    """Cuts a stream of text before the first stop string, or after it (`include`), holding back any tail that
    may become one. `found` is the stop string met."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.stops, self.include = tuple(stops), include
        self.held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The part of what has arrived that is certainly text."""
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
        """What was held back and did not become a stop string."""
        text, self.held = self.held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    if stop[0] not in text: return 0
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
