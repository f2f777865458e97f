"""The protocol of a parser: text in, events out.

Protocol: `feed(text)` takes the next piece of an answer and returns the events that it completes; `flush()`
ends the answer. Joined events do not depend on where the text was cut into pieces. A parser holds back what
may be the start of a marker, and nothing else.

`Machine` is the base class of parsers: `state` is a method that consumes some of `held` and returns True, or
returns False if it needs more text. `ended` says that there is none.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinygrad_nv.engine.text.detokenizer import overlap


@dataclass(frozen=True)
class Reasoning:
    """Text of the model's reasoning."""
    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer."""
    text: str


@dataclass(frozen=True)
class CallDelta:
    """Text of the arguments of call `index`, which is JSON when it is complete. The first delta of a call has
    its `name`."""
    index: int
    text: str
    name: str | None = None


Event = Reasoning | Content | CallDelta


class Parser(Protocol):
    """See above. `reasoning`: whether the next text is reasoning, as far as is known."""
    @property
    def reasoning(self) -> bool: ...
    def feed(self, text: str) -> list[Event]: ...
    def flush(self) -> list[Event]: ...


class Machine:
    """A parser that consists of states; `calls` are begun so far."""

    def __init__(self) -> None:
        self.held, self.ended, self.calls = "", False, 0
        self.events: list[Event] = []
        self.state: Callable[[], bool] = self.plain

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return False

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        self.held += text
        while self.state(): pass
        return self.take_events()

    def flush(self) -> list[Event]:
        """The events left at the end."""
        self.ended = True
        while self.state(): pass
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Returns the events since the last call, neighbours of one kind joined."""
        events, self.events = self.events, []
        return join_events(events)

    def emit(self, event: Event) -> None:
        """Adds an event to those that the next call returns."""
        self.events.append(event)

    def plain(self) -> bool:
        """The state in which all text is content."""
        self.emit(Content(self.held))
        self.held = ""
        return False

    def next(self, state: Callable[[], bool], held: str | None = None) -> bool:
        """Goes to another state, with `held` as the text left."""
        self.state = state
        if held is not None: self.held = held
        return True


class CallMachine(Machine):
    """A parser of tool calls in content. White space before a call, and after the last one, is no content.
    `has_text`: whether there was content."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.has_text = "", False

    def content(self, text: str) -> None:
        """Content, without the white space at its end, which is held back."""
        text = self.space + text
        kept = text.rstrip()
        self.space, self.has_text = text[len(kept):], self.has_text or bool(kept)
        self.emit(Content(kept))

    def begin(self) -> int:
        """The index of a new call."""
        self.space, self.calls = "", self.calls + 1
        return self.calls - 1

    def flush(self) -> list[Event]:
        """The events left at the end."""
        events = super().flush()
        return events if self.calls else join_events([*events, Content(self.space)])

    def rest(self) -> bool:
        """The state after the last call: all text is content."""
        self.content(self.held)
        self.held = ""
        return False


class Chain:
    """`first` finds reasoning, and `second` calls in what `first` leaves as content."""

    def __init__(self, first: Parser, second: Parser) -> None: self.first, self.second = first, second

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self.first.reasoning

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        return join_events(self._through(self.first.feed(text)))

    def flush(self) -> list[Event]:
        """The events left at the end."""
        return join_events([*self._through(self.first.flush()), *self.second.flush()])

    def _through(self, events: Sequence[Event]) -> Iterable[Event]:
        for event in events:
            if isinstance(event, Content): yield from self.second.feed(event.text)
            else: yield event


def join_events(events: Iterable[Event]) -> list[Event]:
    """Returns events without empty ones, neighbours of one kind joined."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, CallDelta):
            if isinstance(last, CallDelta) and last.index == event.index and event.name is None:
                out[-1] = CallDelta(last.index, last.text + event.text, last.name)
            elif event.text or event.name is not None: out.append(event)
        elif not event.text: continue
        elif type(last) is type(event): out[-1] = type(event)(last.text + event.text)
        else: out.append(event)
    return out


def cut(text: str, markers: Sequence[str], ended: bool) -> tuple[str, str, str]:
    """The text before the first of `markers`, that marker ("" if there is none), and the text after it, or
    without one the end of the text that may be the start of one."""
    if found := [(at, -len(mark), mark) for mark in markers if (at := text.find(mark)) >= 0]:
        at, _, mark = min(found)
        return text[:at], mark, text[at + len(mark):]
    keep = 0 if ended else max(overlap(text, mark) for mark in markers)
    return text[:len(text) - keep], "", text[len(text) - keep:]


def may_begin(text: str, mark: str, ended: bool) -> bool:
    """Whether `text` is a start of `mark`, so that more text would tell."""
    return not ended and len(text) < len(mark) and mark.startswith(text)
