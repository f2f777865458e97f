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
    """Turns a stream of ids into a stream of text; `decode` maps ids to text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self.decode = decode
        self.ids = list(prompt[-CONTEXT:])
        self.start, self.end = 0, len(self.ids)  # ids[start:end] has been emitted

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self.ids.append(token)
        before, now = self.decode(self.ids[self.start:self.end]), self.decode(self.ids[self.start:])
        if now.endswith(UNFINISHED) or not now.startswith(before): return ""
        if len(now) > len(before): self.start, self.end = self.end, len(self.ids)
        return now[len(before):]

    def flush(self) -> str:
        """What is still held back, undecodable bytes as U+FFFD."""
        before, now = self.decode(self.ids[self.start:self.end]), self.decode(self.ids[self.start:])
        self.start = self.end = len(self.ids)
        return now[len(before):]


class StopStrings:
    """Cuts a stream of text before the first stop string, holding back any tail that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = tuple(stops), "", False

    def push(self, piece: str) -> str:
        """The part of what has arrived that is certainly before a stop string."""
        if self.found: return ""
        text = self.held + piece
        if places := [at for stop in self.stops if (at := text.find(stop)) >= 0]:
            self.found, self.held = True, ""
            return text[:min(places)]
        keep = max((overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        text, self.held = self.held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
