"""Tells whether a grammar compiles in a bounded time, in a process that can be ended.

Protocol: a grammar that somebody sends can take minutes, or all memory, to compile, and a thread that does so
cannot be stopped. So `Checker.check(grammar)` compiles it first in a process of its own, over single bytes
for tokens, and gives the error in words, "" if there is none. The process lives on for the next one; one that
is over its time is killed, `TimeoutError` is raised, and the next check starts another.

This file is that process's program, too, so it imports nothing of the package: a line of JSON in, one out.
"""
from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

# what a lexer may spend: with a tenth of the library's own bounds a mask that explodes is an error after
# some 0.1 s, where it would hold all answers up for 3 s
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 100_000,
                          "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
SECONDS, MEMORY = 2.0, 1 << 30
START_SECONDS = 60.0


class Checker:
    """Compiles in another process, one grammar at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> str:
        """The error, or "". Raises `TimeoutError`."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(grammar) + "\n")
                process.stdin.flush()
                line = self._line(process, self.seconds)
            except BaseException:
                self._end()
                raise
            if line: return str(json.loads(line))
            self._end()     # it ran out of memory, or into a fault of the library
            return "the process that compiles grammars ended: too much memory, or a fault"

    def close(self) -> None:
        """Ends the process."""
        with self._lock: self._end()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                             text=True)
            if not self._line(self._process, START_SECONDS): raise RuntimeError("no process for grammars")
        return self._process

    def _line(self, process: subprocess.Popen[str], seconds: float) -> str:
        """The next line, "" at its end. Raises `TimeoutError`."""
        assert process.stdout is not None
        expired = threading.Event()
        def end() -> None:
            expired.set()
            process.kill()
        timer = threading.Timer(seconds, end)
        timer.start()
        try: line = process.stdout.readline()
        finally: timer.cancel()
        if not line and expired.is_set(): raise TimeoutError
        return line

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None: return
        process.kill()
        with process: pass


def compiled(tokenizer: Any, grammar: str) -> Any:
    """llguidance's matcher; `is_error()` says whether it is one."""
    from llguidance import LLMatcher, LLParserLimits
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def main() -> None:
    """Answers lines until there are no more."""
    from llguidance import LLTokenizer
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError): pass     # not on every system
    tokenizer = LLTokenizer("byte")
    print("ready", flush=True)
    for line in sys.stdin:
        matcher = compiled(tokenizer, json.loads(line))
        if not matcher.is_error(): matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__": main()
