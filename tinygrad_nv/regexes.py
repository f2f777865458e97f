"""Regular expressions that a file or a client brings: Python's syntax, with a bound on their size and time.

Protocol: `compile_pattern(text, name)` returns a `Pattern`, whose methods say whether a text matches. Both
raise: an error of the type that is given, for a text that is no regular expression or is too large, and for
matches that backtrack without end. `name` says in messages where the pattern stands, and matches of the
patterns of one name share a time that fills up again slowly. The engine is the package
regex, which ends a match on time and lets other threads run; Python's own re does neither, and RE2 knows no
lookaheads, which adapters have.
"""
from __future__ import annotations

import functools
import math
import re
import time
import warnings
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import ModelError, NVError

MAX_LENGTH = 1 << 16        # limit: characters of a pattern; the longest published one has some hundreds
MAX_REPEATS = 1_000_000     # limit: all counts multiplied: {1000}{1000}
MAX_PATTERNS = 1024         # limit: regular expressions of one list in a file
MAX_SECONDS = 1.0           # limit: seconds of a field's slow matches
SHORT_SECONDS = 0.001
REFILL = 0.02               # seconds of matches for each second that passes
COUNTS = re.compile(r"\{(\d+)")
FIX = "write it without repetitions inside of repetitions, or list names"


@dataclass(eq=False)
class _Budget:
    most: float
    left: float
    at: float = 0.0

    def now(self) -> float:
        """The seconds that are left."""
        before, self.at = self.at, time.monotonic()
        self.left = min(self.most, self.left + REFILL * (self.at - before))
        return max(self.left, SHORT_SECONDS)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A regular expression. Its methods raise `error` when matches have taken too long."""
    text: str
    name: str
    error: type[NVError]
    compiled: Any
    budget: _Budget

    def match(self, text: str) -> bool:
        """Whether the text begins with a match."""
        return self._run(self.compiled.match, text)

    def fullmatch(self, text: str) -> bool:
        """Whether the whole text is a match."""
        return self._run(self.compiled.fullmatch, text)

    def search(self, text: str) -> bool:
        """Whether there is a match somewhere in the text."""
        return self._run(self.compiled.search, text)

    def _run(self, function: Any, text: str) -> bool:
        begin = time.thread_time()
        try: return function(text, timeout=self.budget.now()) is not None
        except TimeoutError:
            raise self.error(f"{self.name}: matching the regular expression {_brief(self.text)} takes more "
                             f"than {self.budget.most:g} s", "one that does not backtrack without end",
                             FIX) from None
        finally:
            if (taken := time.thread_time() - begin) > SHORT_SECONDS: self.budget.left -= taken


@functools.lru_cache(4 * MAX_PATTERNS)
def compile_pattern(text: str, name: str, error: type[NVError] = ModelError,
                    seconds: float = MAX_SECONDS) -> Pattern:
    """See above."""
    if len(text) > MAX_LENGTH:
        raise error(f"{name}: a regular expression has {len(text):,} characters", f"at most {MAX_LENGTH:,}",
                    FIX)
    if math.prod(max(int(each[:12]), 1) for each in COUNTS.findall(text)) > MAX_REPEATS:
        raise error(f"{name}: the regular expression {_brief(text)} repeats too often",
                    f"counts whose product is at most {MAX_REPEATS:,}", FIX)
    import regex  # few models have patterns
    try:
        with warnings.catch_warnings():     # of sets that look nested
            warnings.simplefilter("ignore")
            re.compile(text)    # the syntax is Python's: regex accepts more
            return Pattern(text, name, error, regex.compile(text), _budget(name, seconds))
    except (re.error, regex.error, RecursionError, OverflowError, MemoryError) as wrong:
        raise error(f"{name}: {_brief(text)} is no regular expression: {wrong}",
                    "one that Python's re can read", "correct the file") from wrong


def require_few(count: int, name: str, error: type[NVError] = ModelError) -> None:
    """Raises `error` for more than MAX_PATTERNS patterns in one list."""
    if count > MAX_PATTERNS:
        raise error(f"{name} has {count:,} regular expressions", f"at most {MAX_PATTERNS:,}",
                    "list names, or write fewer expressions")


@functools.lru_cache(256)
def _budget(name: str, seconds: float) -> _Budget: return _Budget(seconds, seconds)


def _brief(text: str) -> str: return repr(text if len(text) <= 80 else text[:80] + "…")
