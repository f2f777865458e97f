"""`tinygrad-nv chat`: a conversation, and the commands in it.

Protocol: a line that begins with `/` is a command of `COMMANDS`, `//` begins a question with a slash. Answers
go to stdout as they are generated; on a terminal as Markdown, a block at a time, with the current block's
text as it comes. What commands say, and the speed of an answer, goes to stderr. On a terminal, lines are
edited with readline, and its history is kept in the cache directory; Ctrl-C stops an answer, whose text so
far stays in the conversation. Ctrl-D, /bye or Ctrl-C at the prompt end the chat.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tinygrad_nv import cache, interrupt
from tinygrad_nv.cli import console
from tinygrad_nv.cli.console import adapter
from tinygrad_nv.cli.markdown import MarkdownStream
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.request_output import RequestOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.files import read_json

HISTORY_LINES = 1000
LATE_S = 1.0    # after an answer, in which Ctrl-C is not for the prompt
Messages = list[dict[str, str]]


@dataclass
class Conversation:
    """The messages so far, and how the next answer is sampled."""
    llm: LLM
    params: SamplingParams
    markdown: bool
    messages: Messages = field(default_factory=list)
    lora: LoRARequest | None = None
    ended: bool = False
    answered_s: float = 0.0     # when the last answer ended

    def line(self, text: str) -> None:
        """A line that was typed: a command or a question."""
        if text.startswith("/") and not text.startswith("//"): self.command(text)
        elif text: self.ask(text[1:] if text.startswith("//") else text)

    def ask(self, question: str) -> None:
        """Answers a question. One that does not fit is left out of the conversation."""
        asked, ids = console.fit(self.llm, [*self.messages, {"role": "user", "content": question}])
        text, done = self._answer(ids)
        if text or done: self.messages = [*asked, {"role": "assistant", "content": text}]
        self.answered_s = time.monotonic()
        if done is not None:
            if sys.stdin.isatty(): tell(f"[{len(done.token_ids)} tokens · {done.tokens_per_s:.1f} tokens/s · "
                                        f"first after {done.ttft_s * 1e3:.0f} ms]")
        elif text: tell("[stopped; the text so far stays in the conversation]")
        else: tell("[stopped before there was any text; the question is left out]")

    def _answer(self, ids: list[int]) -> tuple[str, RequestOutput | None]:
        """Writes an answer. Returns its text, and its figures unless Ctrl-C stopped it."""
        pieces: list[str] = []
        try:
            with self._open_output() as write:
                def push(piece: Delta) -> None:
                    pieces.append(piece.text)
                    write(piece.text)
                done = self.llm.complete(ids, self.params, push, lora_request=self.lora)
        except KeyboardInterrupt:
            if not sys.stdin.isatty(): raise
            interrupt.forget_interrupt()
            return "".join(pieces), None
        return done.text, done

    @contextlib.contextmanager
    def _open_output(self) -> Iterator[Callable[[str], None]]:
        try:
            if self.markdown:
                with MarkdownStream() as stream: yield stream.push
            else: yield lambda text: console.say(text, end="")
        finally: console.say("" if self.markdown else "\n")

    # commands

    def command(self, text: str) -> None:
        """Runs a command. Raises `RequestError` for one that is not there, or a value it does not take."""
        name, _, value = text.partition(" ")
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            near = [each for each in COMMANDS if each.startswith(name)] or get_close_matches(name, COMMANDS,
                                                                                             1)
            raise RequestError(f"{name} is no command",
                               "a command of /help, or // for a question with a slash",
                               f"did you mean {near[0]}?" if near else "")
        COMMANDS[name].run(self, value.strip())

    def reset(self, _: str) -> None:
        """Forgets all but the system message."""
        self.messages = self.messages[:self._first]
        tell("a new conversation")

    def system(self, value: str) -> None:
        """Sets, shows or (with "") removes the system message."""
        if not value:
            tell(self.messages[0]["content"] if self._first else "no system message")
            return
        text = "" if value in ('""', "''") else value
        self.messages = [*([{"role": "system", "content": text}] if text else []),
                         *self.messages[self._first:]]

    def save(self, value: str) -> None:
        """Writes the messages as JSON."""
        Path(_require_path(value)).write_text(json.dumps({"messages": self.messages}, ensure_ascii=False,
                                                         indent=1)
                                       + "\n", encoding="utf-8")
        tell(f"{len(self.messages)} messages in {value}")

    def load(self, value: str) -> None:
        """Reads what /save has written."""
        wanted = "a file that /save has written"
        try: found = read_json(_require_path(value))
        except ValueError as error: raise RequestError(f"{value} is not JSON: {error}", wanted) from error
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(
                isinstance(each, dict) and isinstance(each.get("content"), str)
                and each.get("role") in ("system", "user", "assistant") for each in messages):
            raise RequestError(f"{value} holds no messages", wanted)
        self.messages = messages
        tell(f"{len(messages)} messages")

    def retry(self, _: str) -> None:
        """Answers the last question again, with the next seed if there is one."""
        if len(self.messages) < self._first + 2: raise RequestError("there is no answer yet",
                                                                    "a question first")
        question = self.messages[-2]["content"]
        before, self.messages = self.messages, self.messages[:-2]
        if self.params.seed is not None: self.params = replace(self.params, seed=self.params.seed + 1)
        try: self.ask(question)
        except BaseException:
            self.messages = before
            raise

    def exit(self, _: str) -> None: self.ended = True

    def help(self, _: str) -> None:
        """Lists the commands."""
        tell("\n".join(f"{name + ' ' + each.value:<22}{each.words}" for name, each in COMMANDS.items()))

    @property
    def _first(self) -> int: return int(bool(self.messages) and self.messages[0]["role"] == "system")


def _number(name: str, kind: type) -> Callable[[Conversation, str], None]:
    def change(self: Conversation, value: str) -> None:
        if value:
            try: number = kind(value)
            except ValueError as error: raise RequestError(f"{value!r} is no number", "a number") from error
            self.params = replace(self.params, **{name: number})
        tell(f"{name} {getattr(self.params, name)}")
    return change


@dataclass(frozen=True)
class Command:
    """A command: what follows it, what it does."""
    value: str
    words: str
    run: Callable[[Any, str], None]


COMMANDS = {
    "/help": Command("", "this list", Conversation.help),
    "/reset": Command("", "a new conversation with the same system message; also /clear", Conversation.reset),
    "/system": Command("[TEXT]", 'set or show the system message; "" removes it', Conversation.system),
    "/retry": Command("", "answer the last question again", Conversation.retry),
    "/save": Command("FILE", "write the conversation to a file", Conversation.save),
    "/load": Command("FILE", "go on with a conversation from a file", Conversation.load),
    "/temperature": Command("[T]", "set or show it; 0 is greedy", _number("temperature", float)),
    "/top-p": Command("[P]", "set or show it", _number("top_p", float)),
    "/top-k": Command("[K]", "set or show it", _number("top_k", int)),
    "/seed": Command("[N]", "set or show it", _number("seed", int)),
    "/max-tokens": Command("[N]", "set or show it", _number("max_tokens", int)),
    "/bye": Command("", "end; also /exit, /quit or Ctrl-D", Conversation.exit)}
ALIASES = {"/exit": "/bye", "/quit": "/bye", "/clear": "/reset", "/?": "/help"}


def tell(text: str) -> None:
    """Prints the message of a command."""
    print(text, file=sys.stderr)


def _require_path(value: str) -> str:
    if value: return value
    raise RequestError("no file is named", "the path of a file", "write it after the command")


def run(arguments: argparse.Namespace, directory: Path) -> int:
    """The command `chat`."""
    llm = console.load(directory, arguments)
    params = console.sampling(arguments, llm)
    llm.encode_chat([{"role": "user", "content": "?"}])  # raises before the first question
    console.compile_steps(llm, params, 1)
    markdown = sys.stdout.isatty() if arguments.markdown is None else arguments.markdown
    system: Messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    conversation = Conversation(llm, params, markdown, system, adapter(arguments))
    if sys.stdin.isatty(): tell(f"{directory.resolve().name} on {console.device_name(llm)} · /help lists "
                                "commands, /bye ends · Ctrl-C stops an answer")
    with editing():
        while not conversation.ended and (line := _ask(conversation)) is not None:
            try: conversation.line(line)
            except (NVError, OSError) as error: tell(f"tinygrad-nv: {error}")
            except KeyboardInterrupt:   # around an answer: while its prompt is made, or once it is whole
                if not sys.stdin.isatty(): raise
                interrupt.forget_interrupt()
    return 0


def _ask(conversation: Conversation) -> str | None:
    """A line of input, or None at its end and after Ctrl-C, unless that comes so soon after an answer that it
    was meant for it."""
    while True:
        try: return console.ask()
        except KeyboardInterrupt:
            if not sys.stdin.isatty(): raise
            interrupt.forget_interrupt()
            tell("")
            if time.monotonic() > conversation.answered_s + LATE_S: return None
            tell("[the answer has ended; Ctrl-C again or /bye ends the chat]")
            conversation.answered_s = 0.0


@contextlib.contextmanager
def editing() -> Iterator[None]:
    """Line editing, completion of commands and a history, where lines come from a terminal."""
    try:
        if not sys.stdin.isatty(): raise ImportError
        import readline
    except ImportError:
        yield
        return
    path = cache.directory() / "chat_history"
    with contextlib.suppress(OSError): readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    try: yield
    finally:
        readline.set_completer(None)
        with contextlib.suppress(OSError): readline.write_history_file(path)


def complete(text: str, state: int) -> str | None:
    """Completes a text with the commands that begin with it, one a state."""
    names = [name for name in (*COMMANDS, *ALIASES) if text and name.startswith(text)]
    return dict(enumerate(names)).get(state)
