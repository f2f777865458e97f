"""Parsers fed in pieces: the events must not depend on where a text is cut."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad_nv.server.parsers.parser import CallDelta, Event, Parser, join_events


@dataclass(frozen=True)
class Call:
    """A call whose deltas are put together."""
    name: str
    arguments: str


def fed(make: Callable[[], Parser], pieces: Sequence[str]) -> list[Event]:
    """The events of a text in these pieces, neighbours joined."""
    parser, events = make(), list[Event]()
    for piece in pieces: events += parser.feed(piece)
    return join_events([*events, *parser.flush()])


def every_cut(make: Callable[[], Parser], text: str) -> list[Event]:
    """The events of `text`: the same in one piece, in two that are cut anywhere, and in single characters."""
    whole = fed(make, [text])
    for at in range(1, len(text)): assert fed(make, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    assert fed(make, list(text)) == whole
    return whole


def calls_of(events: Sequence[Event]) -> list[Call]:
    """The calls in events. A call has a name in its first delta alone."""
    out: list[Call] = []
    for event in events:
        if not isinstance(event, CallDelta): continue
        assert (event.name is not None) == (event.index == len(out))
        if event.name is not None: out.append(Call(event.name, ""))
        out[event.index] = Call(out[event.index].name, out[event.index].arguments + event.text)
    return out
