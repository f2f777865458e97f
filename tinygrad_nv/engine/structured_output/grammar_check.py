"""Compiles grammars in a subprocess, with time and memory limits.

Protocol: a client's grammar can take minutes, or all memory, to compile, and a thread that compiles cannot be
stopped. So `GrammarChecker.check(grammar)` first compiles it in a subprocess, with single bytes as tokens,
and returns the error, "" if there is none. The subprocess is reused. On a timeout it is killed,
`TimeoutError` is raised, and the next check starts another.

This file is also the subprocess's program, so it imports nothing of the package. The pipe carries JSON, one
line for each request and each answer.
"""
from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

# lexer limits, a tenth of the library's defaults: a mask that explodes fails after about 0.1 s, where the
# defaults would block all sequences for 3 s
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 100_000,
                          "max_lexer_states": 50_000, "max_grammar_size": 200_000, "verbose_errors": False}
COMPILE_SECONDS, MEMORY_LIMIT = 2.0, 1 << 30
STARTUP_SECONDS = 60.0


class GrammarChecker:
    """Compiles in a subprocess, one grammar at a time."""

    def __init__(self, seconds: float = COMPILE_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> str:
        """The error, or "". Raises `TimeoutError`."""
        with self._lock:
            process = self._ensure_process()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(grammar) + "\n")
                process.stdin.flush()
                line = self._read_line(process, self.seconds)
            except BaseException:
                self._kill()
                raise
            if line: return str(json.loads(line))
            self._kill()     # out of memory, or a crash of the library
            return "the process that compiles grammars ended: out of memory, or a crash"

    def close(self) -> None:
        """Kills the subprocess."""
        with self._lock: self._kill()

    def _ensure_process(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                             text=True)
            if not self._read_line(self._process, STARTUP_SECONDS):
                raise RuntimeError("the grammar process did not start")
        return self._process

    def _read_line(self, process: subprocess.Popen[str], seconds: float) -> str:
        """The next line, "" at the end. Raises `TimeoutError`."""
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

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None: return
        process.kill()
        with process: pass


def compile_grammar(tokenizer: Any, grammar: str) -> Any:
    """llguidance's matcher. `is_error()` says whether compilation failed."""
    from llguidance import LLMatcher, LLParserLimits
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


def main() -> None:
    """Answers requests until stdin ends."""
    from llguidance import LLTokenizer
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError): pass     # not on every system
    tokenizer = LLTokenizer("byte")
    print("ready", flush=True)
    for line in sys.stdin:
        matcher = compile_grammar(tokenizer, json.loads(line))
        if not matcher.is_error(): matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), flush=True)


if __name__ == "__main__": main()
