"""`tinygrad-nv replay LOG`: a recorded run again, bit for bit, or at which kernel it parts.

Protocol: LOG is of `tinygrad-nv generate --record LOG`, or of `record(LOG, fn, …)`. What is recorded of a
command is its answer: the kernels from the prompt to the last token, after the model is loaded and compiled.
The command line that is kept has a seed, and no option that writes a file or downloads. A function is
imported by its name and called with arguments of the log: that is code, and asks for --run-function. Prints
one line, or where it parts; exits with 1 where it does, and with 2 for a log that cannot be repeated.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.errors import ReplayError

if TYPE_CHECKING:   # each loads tinygrad
    from tinygrad_nv.engine.request_output import RequestOutput
    from tinygrad_nv.numerics.replay.recorder import Take
    from tinygrad_nv.numerics.replay.run import Recording


FILES = ("record", "trace")     # options of generate that write files, which no log has


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser],
                parsed: Callable[[list[str]], argparse.Namespace]) -> None:
    """Adds `replay`. `parsed` are the arguments of a command line."""
    replay = commands.add_parser("replay", help="repeat a recorded run bit for bit, or say where it parts",
                                 usage="%(prog)s [options] LOG")
    replay.add_argument("log", type=Path, metavar="LOG", help="what `generate --record` or record() wrote")
    replay.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    replay.add_argument("--run-function", action="store_true", help="of a log of record(): import the "
                        "function that it names, and call it; for logs that you trust")
    replay.set_defaults(run=run, parsed=parsed)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from tinygrad_nv.numerics.replay import replay
    from tinygrad_nv.numerics.replay.log import read
    what = read(arguments.log).header.what
    if "command" not in what and not arguments.run_function:
        raise ReplayError(f"{arguments.log} is of the function {what.get('function')!r:.200}, which would be "
                          "imported and called", "the log of a command line, or --run-function",
                          "add --run-function, if you trust the log")
    report = replay(arguments.log, commands=partial(_again, arguments.parsed))
    print(json.dumps({"same": report.same, **asdict(report)}) if arguments.json else report)
    return 0 if report.same else 1


def _again(parsed: Callable[[list[str]], argparse.Namespace], what: dict[str, Any], take: Take) -> str:
    """Runs a command line, quietly; the hash of what it answers."""
    words, place = [str(word) for word in what["command"]], Path(str(what.get("directory", ".")))
    if words[:1] != ["generate"]:
        raise ReplayError(f"a log of tinygrad-nv {' '.join(words[:1])}", "one of generate")
    with contextlib.chdir(place if place.is_dir() else Path.cwd()), \
            contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try: arguments = parsed(words)
        except SystemExit as error:
            raise ReplayError(f"a log of {' '.join(words)[:200]}", "words that generate takes",
                              "record it again") from error
        if named := [name for name in FILES if getattr(arguments, name)]:
            raise ReplayError(f"a log of generate --{named[0]}, which would write files",
                              "words without it: record leaves them out", "run the command yourself")
        arguments.take = take
        arguments.run(arguments)
    return str(arguments.answer)


# **** what generate does ****

class Region:
    """The part of a command that is recorded, or repeated."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.path = arguments, arguments.record
        self.take: Take | None = getattr(arguments, "take", None)
        self.answered: Callable[[str], None] = lambda answer: setattr(arguments, "answer", answer)
        if self.path is not None and arguments.seed is None:
            from tinygrad_nv.engine.sampling import fresh_seed
            arguments.seed = fresh_seed()

    def whole(self) -> AbstractContextManager[None]:
        """Around all, so that captured kernels know their layers."""
        if self.path is None and self.take is None: return nullcontext()
        from tinygrad_nv.runtime.observe import ranges
        return ranges.track_layers()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around the answer."""
        if self.path is None and self.take is None:
            yield
            return
        from tinygrad_nv.numerics.replay.recorder import record_kernels
        with ExitStack() as stack:
            take = self.take
            if take is None:
                made = stack.enter_context(self._recording())
                take, self.answered = made.take, lambda answer: setattr(made, "result", answer)
            with record_kernels(take): yield

    def _recording(self) -> AbstractContextManager[Recording]:
        from tinygrad_nv.numerics.replay import recording
        words = _without(self.arguments.argv, "--record", "--trace", "--seed")
        what = {"command": [words[0], "--seed", str(self.arguments.seed), *words[1:]],
                "directory": os.getcwd()}
        return recording(self.path, what, self.arguments.seed)

    def answer(self, done: RequestOutput) -> RequestOutput:
        """Takes the answer of the region."""
        if self.path is not None or self.take is not None:
            from tinygrad_nv.numerics.replay.log import digest
            self.answered(digest(repr([list(each.token_ids) for each in done.outputs]).encode()))
        return done


def _without(words: list[str], *options: str) -> list[str]:
    """Words less options and their values."""
    made, skip = list[str](), False
    for word in words:
        if skip: skip = False
        elif word in options: skip = True
        elif word.partition("=")[0] not in options: made.append(word)
    return made
