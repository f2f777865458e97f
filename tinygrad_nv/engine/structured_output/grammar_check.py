"""Compiles and tries grammars in a subprocess, with time and memory limits.

Protocol: a client's grammar can take minutes, or all memory, to compile, and a thread that compiles cannot be
stopped. So `GrammarChecker.check(grammar)` first compiles it in a subprocess, with single bytes as tokens,
writes the beginnings of some texts at random, and returns the error, "" if there is none: a grammar in which
a text gets stuck, or whose later states explode, is found before an answer begins. `are_dead(probes)` says
for pairs of a grammar and a text whether nothing may follow the text. The subprocess is reused. On a timeout
it is killed, `TimeoutError` is raised, and the next check starts another.

This file is also the subprocess's program, so it imports nothing of the package. The pipe carries JSON, one
line for each request and each answer.
"""
from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

# lexer limits, a tenth of the library's defaults: a mask that explodes fails after about 0.1 s, where the
# defaults would block all sequences for 3 s
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 100_000,
                          "max_lexer_states": 50_000, "max_grammar_size": 200_000,
                          "verbose_errors": False,
                          "max_items_in_row": 5000}     # four for each of 1000 optional properties
COMPILE_SECONDS, MEMORY_LIMIT = 2.0, 1 << 30
STARTUP_SECONDS = 60.0
# texts that are tried, their bytes, and the time for all of them, which a mask of a large grammar may exceed.
# A walk prefers bytes that end something: it comes to the end of an object sooner
WALKS, WALK_BYTES, WALK_SECONDS, PREFERRED = 24, 96, 0.1, b'",:}]'


class GrammarChecker:
    """Compiles in a subprocess, one grammar at a time."""

    def __init__(self, seconds: float = COMPILE_SECONDS) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self, grammar: str) -> str:
        """The error, or "". Raises `TimeoutError`."""
        found = self._ask(grammar)
        return "the process that compiles grammars ended: out of memory, or a crash" if found is None \
            else str(found)

    def are_dead(self, probes: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether nothing may follow the text of each probe, which its grammar allows. Raises `TimeoutError`.
        """
        found = self._ask(probes)
        return [False] * len(probes) if found is None else list(found)

    def _ask(self, asked: Any) -> Any:
        """The subprocess's answer; None where it ended."""
        with self._lock:
            process = self._ensure_process()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
                line = self._read_line(process, self.seconds + WALK_SECONDS)
            except BaseException:
                self._kill()
                raise
            if line: return json.loads(line)
            self._kill()     # out of memory, or a crash of the library
            return None

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


def error_of(tokenizer: Any, grammar: str) -> str:
    """The error of a grammar, "" if there is none."""
    matcher = compile_grammar(tokenizer, grammar)
    if not matcher.is_error(): matcher.compute_bitmask()
    if matcher.is_error(): return str(matcher.get_error())
    ends = time.monotonic() + WALK_SECONDS
    for seed in range(WALKS):
        if error := _walk(matcher.deep_copy(), random.Random(seed), ends): return error
    return ""


def _walk(matcher: Any, chance: random.Random, ends: float) -> str:
    """Writes a text at random. Returns the error in which it ends, "" without one."""
    text = bytearray()
    while len(text) < WALK_BYTES and time.monotonic() < ends:
        allowed = _next_bytes(matcher)
        if matcher.is_error():
            error = str(matcher.get_error())
            return f"nothing may follow {bytes(text)!r}" if "NoExtensionBias" in error else error
        if not allowed: break
        preferred = [byte for byte in PREFERRED if byte in allowed]
        byte = chance.choice(preferred if preferred and chance.random() < 0.7 else allowed)
        if not matcher.consume_token(byte): break
        text.append(byte)
        if matcher.is_stopped(): break
    if matcher.is_error(): return str(matcher.get_error())
    return ""


def _next_bytes(matcher: Any) -> list[int]:
    """Lists the bytes that may follow."""
    mask = matcher.compute_bitmask()
    return [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]


def is_dead(tokenizer: Any, grammar: str, text: str) -> bool:
    """Whether nothing but the end of an object may follow `text`, if `grammar` allows that."""
    matcher = compile_grammar(tokenizer, grammar)
    if matcher.is_error() or not all(map(matcher.consume_token, text.encode())): return False
    allowed = _next_bytes(matcher)
    return bool(matcher.is_error()) or not set(allowed) - {ord("}")}


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
        asked = json.loads(line)
        found = error_of(tokenizer, asked) if isinstance(asked, str) else \
            [is_dead(tokenizer, grammar, text) for grammar, text in asked]
        print(json.dumps(found), flush=True)


if __name__ == "__main__": main()
