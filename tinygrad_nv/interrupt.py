"""Ctrl-C while the command line is still being imported, and while the interpreter ends: exit code 130,
without a traceback. What runs in between gets KeyboardInterrupt, as in any program.

The first import of the package takes 0.7 s, and no `try` of ours stands around it: the console script imports
before it calls. So the package begins with `starting`, which acts where it is the command that is starting.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

_own = False  # whether this process is the command


def starting() -> None:
    """From now on Ctrl-C ends the process, if it is `tinygrad-nv` or `python -m tinygrad_nv`."""
    global _own
    _own = is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ending()


def ready() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, which the caller catches."""
    if _own: signal.signal(signal.SIGINT, signal.default_int_handler)


def ending() -> None:
    """From now on Ctrl-C ends the process again."""
    if _own: signal.signal(signal.SIGINT, _end)


def forget_interrupt() -> None:
    """Forgets a KeyboardInterrupt that was caught outside of `exec` of a text, such as a dataclass's: CPython
    (3.10 to 3.13, `python -m`) remembers that it left one, and ends by SIGINT whatever the exit code is. The
    next text that runs clears that."""
    exec("")


def leave() -> None:
    """Ends the process, if it is the command: threads that compute are not waited for, and processes that
    compile are killed."""
    if not _own: return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError): stream.flush()
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for each in processes.active_children(): each.kill()
    os._exit(130)


def is_command() -> bool:
    """Whether this process is the command: `-m` names a module in a word of its own, or in the same one."""
    words = sys.orig_argv
    following = zip(words, [*words[1:], ""], strict=True)
    modules = [after if word == "-m" else word[2:] for word, after in following if word.startswith("-m")]
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0] if sys.argv else ""
    if name == "tinygrad-nv": return True
    return name in ("-m", "__main__") and modules[:1] in (["tinygrad_nv"], ["tinygrad_nv.cli"])


def asks_version() -> bool:
    """Tells whether this process is `tinygrad-nv --version`."""
    return is_command() and sys.argv[1:] == ["--version"]


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\n")
    os._exit(130)
