"""Markdown on a terminal while it is generated.

Protocol: `MarkdownStream` is a context manager; `push` takes text. A block (a paragraph, a list, fenced code)
is rendered once it is complete; the text of the current one shows as it is.
"""
from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

FENCES = ("```", "~~~")


def block_end(text: str) -> int:
    """Returns where the first complete block of Markdown ends: after a blank line outside fenced code; 0 if
    none."""
    fence, at, begun = "", 0, False
    for line in text.splitlines(keepends=True):
        at += len(line)
        if not line.endswith("\n"): return 0
        word = line.strip()[:3]
        if fence: fence = "" if word == fence else fence
        elif word in FENCES: fence = word
        if not word and begun and not fence: return at
        begun = begun or bool(word)
    return 0


class MarkdownStream:
    """Renders Markdown block by block."""

    def __init__(self, console: Console | None = None) -> None:
        self.console, self.text = console or Console(), ""
        self.live = Live(console=self.console, transient=True, refresh_per_second=12)

    def push(self, text: str) -> None:
        """Adds text."""
        self.text += text
        while end := block_end(self.text):
            self._render(self.text[:end])
            self.text = self.text[end:]
        self.live.update(Text(self.text))

    def _render(self, block: str) -> None:
        self.console.print(Markdown(block.strip("\n")))
        self.console.print()

    def __enter__(self) -> MarkdownStream:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.live.update(Text(""))
        self.live.stop()
        if self.text.strip(): self.console.print(Markdown(self.text.strip("\n")))
