"""Channels of gpt-oss (harmony):

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant
    <|channel|>commentary to=functions.look <|constrain|>json<|message|>{"animal": "fox"}<|call|>
    <|channel|>final<|message|>the answer<|return|>

Protocol: a message is a header, up to <|message|>, and a text. The channel "analysis" is reasoning, a message
to functions.NAME a call, every other message content. An answer that has no header is content.
"""
from __future__ import annotations

import re

from tinygrad_nv.server.parsers.parser import CallDelta, Content, Machine, Reasoning, cut

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")


class Harmony(Machine):
    """`thinks`: reasoning is told apart from content; `calls_tools`: calls are."""

    def __init__(self, thinks: bool, calls_tools: bool) -> None:
        super().__init__()
        self.thinks, self.calls_tools = thinks, calls_tools
        self.state = self._beginning
        self.channel, self.index, self.wrote = "", -1, False

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self.channel == "analysis" and self.thinks

    def _beginning(self) -> bool:
        """The start of the answer, after the header's start in the prompt."""
        text = self.held.lstrip()
        heads = ("to=", *MARKS)
        if any(text.startswith(each) for each in heads): return self.next(self._header)
        if not self.ended and any(each.startswith(text) for each in heads): return False
        return self.next(self._message)

    def _header(self) -> bool:
        header, mark, rest = self.held.partition(MESSAGE)
        if not mark: return False
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        self.channel = channel[1] if channel else "final"
        self.index, self.wrote = -1, False
        if recipient and self.calls_tools and (name := recipient[1]).startswith("functions."):
            self.channel, self.index, self.calls = "call", self.calls, self.calls + 1
            self.emit(CallDelta(self.index, "", name.removeprefix("functions.")))
        return self.next(self._message, rest)

    def _message(self) -> bool:
        text, mark, self.held = cut(self.held, (*ENDS, START, CHANNEL), self.ended)
        if mark and self.channel == "call" and not (self.wrote or text.strip()): text = "{}"
        self._write(text)
        if mark in (START, CHANNEL): return self.next(self._header, mark + self.held)
        return bool(mark) and self.next(self._between)

    def _write(self, text: str) -> None:
        self.wrote = self.wrote or bool(text.strip())
        if self.channel == "call": self.emit(CallDelta(self.index, text))
        elif self.reasoning: self.emit(Reasoning(text))
        else: self.emit(Content(text))

    def _between(self) -> bool:
        """After a message: what is before the next header is of no message."""
        self.channel = ""
        _, mark, self.held = cut(self.held, (START, CHANNEL), self.ended)
        return bool(mark) and self.next(self._header, mark + self.held)
