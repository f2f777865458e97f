"""Tries the regular expressions and the charsmap of a tokenizer, in a process of its own that may be killed.

Protocol: reads {"patterns": […], "charsmap": text or null} as JSON from stdin and writes what is wrong, or
null, as JSON. A pattern splits longer and longer runs of what it names, and is refused where the time grows
faster than the text. Behind each run stand the pattern's own characters, since a search begins only if the
letters are there that a match must have. The library prints its panics, so the caller drops stderr.
"""
from __future__ import annotations

import json
import re
import resource
import sys
import time

from tokenizers import Regex, Tokenizer, pre_tokenizers

MAX_MEMORY = 1 << 30        # limit: bytes of the process that tries a tokenizer
MAX_SECONDS = 4             # limit: seconds of processor time of that process
MAX_UNITS = 96              # limit: runs that a regular expression of a tokenizer is tried on
SIZES = (64, 512, 4096, 16384)
SLOW = 0.05                 # seconds of 16,384 characters: 10 times what the slowest published ones take
USUAL = ("a", " ", "\n", "0", ".", "A", "é", "中", "a ", " \n", "\t", "\u0301", "'", "aA", "a0", "-", "ab")
MAX_NORMALIZED = 64         # characters that stand for one; Unicode has up to 18


def tried(patterns: list[str], charsmap: str | None) -> str | None:
    """What is wrong, None if nothing is."""
    found = next((why for each in patterns if (why := _slow(each)) is not None), None)
    return found or (None if charsmap is None else _broken(charsmap))


def _slow(pattern: str) -> str | None:
    shown = repr(pattern if len(pattern) <= 80 else pattern[:80] + "…")
    try: split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error: return f"the regular expression {shown} cannot be read: {str(error)[:100]}"
    for unit in _units(pattern):
        for size in SIZES:
            text = unit * (size // len(unit)) + "\0" + pattern[:512]
            try: seconds = _seconds(split, text)
            except BaseException: return f"the regular expression {shown} fails on {size} times {unit!r}"
            if seconds > SLOW:
                return (f"the regular expression {shown} takes {seconds:.2f} s for {size} characters "
                        f"of {unit!r}")
    return None


def _units(pattern: str) -> list[str]:
    """What runs are made of: characters and words of the pattern, and usual ones."""
    words = re.findall(r"\w{2,16}", pattern)
    pairs = [pattern[i:i + 2] for i in range(len(pattern) - 1) if pattern[i:i + 2].isalnum()]
    return list(dict.fromkeys([*USUAL, *pattern[:256], *words, *pairs]))[:MAX_UNITS]


def _seconds(split: pre_tokenizers.Split, text: str) -> float:
    begun = time.thread_time()
    split.pre_tokenize_str(text)
    return time.thread_time() - begun


def _broken(charsmap: str) -> str | None:
    """What is wrong with SentencePiece's normalisation, which is tried on all characters."""
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
    given = json.load(sys.stdin)
    print(json.dumps(tried(given["patterns"], given["charsmap"])), flush=True)
