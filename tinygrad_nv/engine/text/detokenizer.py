"""Incremental detokenization, and stop strings.

Protocol: a `Detokenizer` takes one id at a time and returns the text that id completed, possibly none;
`flush` returns the text held back at the end of the sequence. All pieces joined are exactly decode(prompt +
ids) without decode(prompt): bytes of an incomplete character are held until the character is complete, and
left out where none completes it, as vLLM has it. The first word keeps the space that decoders strip at the
start of a text. A character that the prompt's ids begin and the answer completes is the answer's: its pieces
have all of it, and `Echo` leaves what the prompt shows of it out. `StopStrings` holds back text that may
become a stop string.

Technique: decode a short window twice, with and without the new ids, and emit the difference (as vLLM and
transformers' streamers do). The cost depends on the window, not on the length of the text.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

# prompt tokens in the first window: enough for any character (4 bytes) and a word before it
CONTEXT_TOKENS = 6
OPEN_TOKENS = 3     # of a character that is not complete
CHARACTER_TOKENS = 4
UNFINISHED = "\ufffd"  # what decoders put for bytes that are not (yet) a character


class Detokenizer:
    """Turns a stream of ids into a stream of text; `decode` maps ids to text. `silent` ids have no text and
    take no place in the window."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (),
                 silent: Callable[[int], bool] = lambda _: False) -> None:
        self.decode, self.silent = decode, silent
        self.ids = self._window(prompt)
        self.emitted = self.complete = decode(self.ids)
        self.start, self.end = 0, len(self.ids)  # ids[start:end] has been emitted
        if self.emitted.endswith(UNFINISHED):
            self.complete, count = before_open_end(decode, self.ids)
            self.end -= count

    def push(self, token: int) -> str:
        """The text that `token` completes."""
        self.ids.append(token)
        now = self.decode(self.ids[self.start:])
        if now == self.emitted and self.silent(token): self.ids.pop()
        if now.endswith(UNFINISHED): return ""
        piece = self._new(now)
        if piece:
            self.start, self.end = self.end, len(self.ids)
            self.emitted = self.complete = self.decode(self.ids[self.start:])
        return piece

    def flush(self) -> str:
        """The text still held back, without the bytes of a character that the ids do not complete."""
        piece = self._new(self.decode(self.ids[self.start:])).rstrip(UNFINISHED)
        self.start, self.end, self.emitted, self.complete = len(self.ids), len(self.ids), "", ""
        return piece

    def _window(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character on: of one that begins earlier,
        byte fallback would take the bytes behind it for broken ones, too."""
        sizes = range(CONTEXT_TOKENS, CONTEXT_TOKENS + OPEN_TOKENS + 1)
        windows = [list(prompt[-size:]) for size in sizes]
        return next((ids for ids in windows if any(     # an open end breaks the run before it, too
            not self.decode(ids[:len(ids) - size]).startswith(UNFINISHED)
            for size in range(OPEN_TOKENS + 1))), windows[0])

    def _new(self, now: str) -> str:
        """The text after what was emitted, given that of the window."""
        for before in (self.emitted, self.complete):
            if now.startswith(before): return now[len(before):]
        # byte fallback takes a whole run of bytes back where a broken one follows
        return self.decode(self.ids[self.end:])


def before_open_end(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> tuple[str, int]:
    """The text before the character that ids end inside of, and how many tokens have bytes of it."""
    whole = decode(ids).rstrip(UNFINISHED)
    for size in range(1, min(OPEN_TOKENS, len(ids)) + 1):
        if not (before := decode(ids[:-size])).endswith(UNFINISHED):
            return max(before, whole, key=len), size    # a token may have text before the bytes
    return whole, 0


def text_in_place(alone: str, decode: Callable[[Sequence[int]], str], before: Sequence[int],
                  token: int) -> str:
    """The text that `token` adds to the tokens `before` it, where its text `alone` may be bytes of a
    character: the last token of a character has all of it, and those before have none, as in vLLM's log
    probabilities."""
    if not alone.endswith(UNFINISHED): return alone
    for size in range(1, len(before) + 1):
        context = before[-size:]
        whole = decode([*context, token])
        if whole.endswith(UNFINISHED): continue
        while context and decode(context[-1:]).endswith(UNFINISHED): context = context[:-1]
        return whole.removeprefix(decode(context))
    return ""


class Echo:
    """The text of a prompt in front of its answer's, which may complete the prompt's last character."""

    def __init__(self, decode: Callable[[Sequence[int]], str], text: str, prompt: Sequence[int]) -> None:
        self.decode, self.text, self.held, self.first = decode, text, "", ""
        self.ids: list[int] = []    # from the beginning of that character
        if not text.endswith(UNFINISHED): return
        self.text, count = before_open_end(decode, prompt)
        self.ids = list(prompt[len(prompt) - count:])
        self.first = decode(self.ids)
        self.held = self.first.lstrip() or UNFINISHED

    def push(self, text: str, tokens: Sequence[int], ended: bool) -> str:
        """The text to show for a piece of the answer."""
        shown, self.text = self.text, ""
        if self.held: self.ids += tokens
        if not self.held or not (text or ended): return shown + text
        held, self.held = self.held, ""
        broken = self.decode(self.ids).startswith(self.first)
        return shown + (held if broken else "") + text


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
