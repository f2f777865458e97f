"""Tries the regular expressions and the charsmap of a tokenizer, in a process of its own that may be killed.

Protocol: reads {"patterns": […], "charsmap": text or null} as JSON from stdin and writes what is wrong, or
null, as JSON, in the last line. A pattern splits longer and longer runs of what it names, and is refused
where the time grows faster than the text. Runs are tried alone, and with the pattern's own characters behind
them, since some searches begin only if the letters are there that a match must have, and others end at them.
The library prints its panics, so the caller drops stderr.
"""
from __future__ import annotations

import gc
import json
import re
import resource
import sys
import time

from tokenizers import Regex, Tokenizer, pre_tokenizers

MAX_MEMORY = 1 << 30        # limit: bytes of the process that tries a tokenizer
MAX_SECONDS = 4             # limit: seconds of processor time of that process
MAX_UNITS = 96              # limit: runs that a regular expression of a tokenizer is tried on
SIZES = (64, 512, 4096)
# the slowest runs, and those whose time grows fastest, are tried at more lengths
SLOWEST, SIZE = 6, 16384
SLOW = 0.05                 # seconds of 16,384 characters: 10 times what the slowest published ones take
# the slowest of these at a longer one, too, where they may take twice as long as is in proportion: 4 times
# with the square of a length. Below LEAST seconds, 1,000,000 characters take 1 s in any case
LONGEST, LONG, BEND, LEAST = 3, 1 << 16, 2, 0.0005
TRIALS = 3                  # of a run that seems slow: other programs may have used the processor's caches
USUAL = ("a", " ", "\n", "0", ".", "A", "é", "中", "a ", " \n", "\t", "\u0301", "'", "aA", "a0", "-", "ab")
MAX_NORMALIZED = 64         # characters that stand for one; Unicode has up to 18


def try_all(patterns: list[str], charsmap: str | None) -> str | None:
    """Returns what is wrong, None if nothing is."""
    found = next((why for each in patterns if (why := _slow(each)) is not None), None)
    if found is not None or charsmap is None: return found
    _begin("its precompiled_charsmap takes")
    return _try_charsmap(charsmap)


def _slow(pattern: str) -> str | None:
    shown = f"the regular expression {pattern if len(pattern) <= 80 else pattern[:80] + '…'!r}"
    _begin(f"{shown} takes")
    try: split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error: return f"{shown} cannot be read: {str(error)[:100]}"
    before, taken, now = dict[str, float](), dict[str, float](), dict[str, float]()
    def seconds(unit: str, size: int, most: float) -> float:
        """Raises _Slow above `most`."""
        try: found = _seconds(split, pattern, unit, size, most)
        except BaseException: raise _Slow(f"{shown} fails on {size} times {unit!r}") from None
        if found > most: raise _Slow(f"{shown} takes {found:.2f} s for {size} characters of {unit!r}")
        return found
    try:
        for unit in _units(pattern):
            for size in SIZES: before[unit], taken[unit] = taken.get(unit, 0), seconds(unit, size, SLOW)
        for unit in {*_last(taken), *_last({unit: taken[unit] / before[unit] for unit in taken})}:
            now[unit] = seconds(unit, SIZE, SLOW)
        for unit in _last(now)[:-LONGEST - 1:-1]:
            seconds(unit, LONG, BEND * LONG / SIZE * max(now[unit], LEAST))
    except _Slow as slow: return str(slow)
    return None


class _Slow(Exception):
    """Says what is slow."""


def _last(values: dict[str, float]) -> list[str]:
    """The keys of the largest values."""
    return sorted(values, key=values.__getitem__)[-SLOWEST:]


def _units(pattern: str) -> list[str]:
    """Returns units of runs: characters and words of the pattern, and usual ones."""
    words = re.findall(r"\w{2,16}", pattern)
    pairs = [pattern[i:i + 2] for i in range(len(pattern) - 1) if pattern[i:i + 2].isalnum()]
    return list(dict.fromkeys([*USUAL, *pattern[:256], *words, *pairs]))[:MAX_UNITS]


def _seconds(split: pre_tokenizers.Split, pattern: str, unit: str, size: int, most: float) -> float:
    """Processor time of a run, alone and with the pattern behind it, whichever takes longer."""
    run = unit * (size // len(unit))
    alone = _least(split, run, most)
    return alone if alone > most else max(alone, _least(split, f"{run}\0{pattern[:512]}", most))


def _least(split: pre_tokenizers.Split, text: str, most: float) -> float:
    """Processor time of a text, tried again where it is above `most` but may be an accident."""
    least = float("inf")
    for _ in range(TRIALS):
        begun = time.thread_time()
        split.pre_tokenize_str(text)
        least = min(least, time.thread_time() - begun)
        if not most < least < 1.5 * most: break
    return least


def _begin(what: str) -> None:
    """Says what is tried, for a process that is ended while it is."""
    print(json.dumps(f"{what} more than {MAX_SECONDS} s or {MAX_MEMORY >> 30} GiB"), flush=True)


def _try_charsmap(charsmap: str) -> str | None:
    """Returns what is wrong with SentencePiece's normalisation, which is tried on all characters."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    part = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    try:
        made = Tokenizer.from_str(json.dumps({"model": model, "normalizer": part})).normalizer
        for start in range(0, 0x110000, 256):
            text = "".join(chr(i) for i in range(start, start + 256) if not 0xD800 <= i < 0xE000)
            if len(made.normalize_str(text)) > MAX_NORMALIZED * 256: return "its charsmap makes texts longer"
    except BaseException: return "its precompiled_charsmap is damaged"
    return None


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    gc.disable()            # or long lists of pieces take more than their share
    given = json.load(sys.stdin)
    print(json.dumps(try_all(given["patterns"], given["charsmap"])), flush=True)
