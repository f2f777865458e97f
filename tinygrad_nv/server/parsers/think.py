"""Reasoning between two markers: <think> … </think> (DeepSeek, Qwen and many others), [THINK] … [/THINK].

Protocol: the answer begins inside of the reasoning if the prompt ends with the first marker, as templates of
newer models write it. Otherwise reasoning begins where the first marker is the first text of the answer.
After the second marker all text is content. Without it all is reasoning, cut by `max_tokens`.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.server.parsers.parser import Machine, Reasoning, cut, may_begin


class Think(Machine):
    """`inside`: the answer begins inside of the reasoning. `implicit` markers end it, too, and are content.
    """

    def __init__(self, start: str, end: str, inside: bool, implicit: Sequence[str] = ()) -> None:
        super().__init__()
        self.start, self.end, self.inside, self.implicit = start, end, inside, tuple(implicit)
        self.state = self._beginning

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self.inside

    def _beginning(self) -> bool:
        text = self.held.lstrip()
        if text.startswith(self.start):
            self.inside = True
            return self.next(self._thinking, text[len(self.start):])
        if may_begin(text, self.start, self.ended): return False
        return self.next(self._thinking if self.inside else self.plain)

    def _thinking(self) -> bool:
        before, mark, self.held = cut(self.held, (self.end, *self.implicit), self.ended)
        self.emit(Reasoning(before))
        if not mark: return False
        self.inside = False
        if mark != self.end: self.held = mark + self.held
        return self.next(self.plain)


def begins_inside(prefix: str, start: str, end: str, continued: bool) -> bool:
    """Whether an answer after `prefix`, the end of the prompt, begins inside of the reasoning. Where a
    message is `continued`, `prefix` is its text."""
    if prefix.rstrip().endswith(start): return True
    return continued and prefix.rfind(start) > prefix.rfind(end)
