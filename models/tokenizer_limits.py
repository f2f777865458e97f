"""Limits of tokenizer.json: a hostile one may double a text at each step, or match for hours.

Protocol: `read_backend(path, known)` makes a `tokenizers.Tokenizer` of a file whose steps are within limits;
`require_bounded(parts, name, known)` checks steps that come from elsewhere, as JSON. Nothing stops the
library once it works, and it ends the process where memory is short, so all is checked before it reads the
file. `known` are regular expressions that take time in proportion to a text; others, and SentencePiece's
normalisation, are tried first by a process of their own (tokenizer_probe.py).
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from tinygrad_nv import config
from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.files import read_tokenizer_json

MAX_GROWTH = 16             # limit: times that a tokenizer's steps may multiply a text; usual are 1 and 2
MAX_STEPS = 64              # limit: steps of a normalizer, pre-tokenizer, decoder or post-processor
MAX_ADDED = 1 << 18         # limit: added tokens of a tokenizer.json; the most published are 100,000
MAX_ADDED_CHARS = 1 << 22   # limit: characters of all added tokens
MAX_TEMPLATE = 256          # limit: tokens that a post-processor puts around a text
MAX_AFFIX = 64              # limit: characters of prefixes and suffixes of a tokenizer's pieces
MAX_WORD = 1000             # limit: max_input_chars_per_word, since time grows with its square; usual is 100
MAX_PIECE = 1000            # limit: characters of a Unigram tokenizer's piece
MAX_SQUARES = 200_000_000   # limit: sum of squares of pieces' lengths; published ones have 20 million
MAX_UNKNOWN = 16            # limit: unknown regular expressions of a tokenizer, which take 0.2 s each to try
BATCH = 8                   # expressions that one process tries in its seconds; others do so beside it
MAX_PATTERN = 1 << 16       # limit: characters of a tokenizer's regular expression
# seconds to wait for the process that tries expressions: it is limited by processor time, of which a busy
# machine gives it little
PROBE_WAIT = 600
MAX_SAID = 300
LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
# keys of a tokenizer.json that must not follow its model, or they are found by reading all of it
HEAD = ("truncation", "padding", "added_tokens", *PARTS)
KNOWN = frozenset({" {2,}", r"\s+", r"[\r\n]", "[\r\n]"})
FIX = "use the model's published tokenizer.json"
TRUST = FIX + ", or set NV_TRUST_TOKENIZER=1 if you trust this one"
_ESCAPED = re.compile(r"\\u00[2-7]")
_BLANK = re.compile(r"[ \t\r\n]*")


def read_backend(path: Path, known: Collection[str] = (), *, adjust: Callable[[Any], Any] = lambda part: part,
                 expected: str = "a tokenizer.json of the tokenizers library") -> Tokenizer:
    """The tokenizer of a file, without truncation and padding. `adjust` returns the pre-tokenizer to use
    instead of the file's. Raises `TokenizerError`."""
    try:
        text = read_tokenizer_json(path)
        head = _head(text)
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {message_of(error)}", expected,
                             "download the file again") from error
    require_bounded({**head, "pre_tokenizer": adjust(head.get("pre_tokenizer"))}, str(path), known)
    with _without_panics():
        try: made: Tokenizer = Tokenizer.from_str(text)
        except BaseException as error:
            if not is_bare(error): raise
            raise TokenizerError(f"{path} cannot be read: {message_of(error)}", expected,
                                 "download the file again") from error
        made.no_truncation()
        made.no_padding()       # to a length that may be any
        require_model(made, str(path))
    return made


def as_typed(error: BaseException, what: str) -> BaseException:
    """A bare exception or a panic of the library as a `TokenizerError`; other errors as they are."""
    if not is_bare(error): return error
    return TokenizerError(f"the tokenizer cannot {what}: {message_of(error)}",
                          "a vocabulary that has all of it",
                          FIX)


def is_bare(error: BaseException) -> bool:
    """Whether an error is the library's: it raises Exception itself, and panics are no Exception."""
    return type(error) in (Exception, ValueError) or type(error).__name__ == "PanicException"


def message_of(error: BaseException) -> str:
    """The words of an error, cut off; they may quote a file."""
    text = str(error) or type(error).__name__
    return text if len(text) <= MAX_SAID else text[:MAX_SAID] + "…"


def require_bounded(parts: Mapping[str, Any], name: str, known: Collection[str] = ()) -> None:
    """Raises `TokenizerError` for steps, as a tokenizer.json has them, that grow a text too much, take too
    long, or are too many. What is no step is left to the library to refuse."""
    def refuse(what: str, expected: str) -> TokenizerError:
        return TokenizerError(f"{name}: {what}", expected, TRUST)
    if config.get("NV_TRUST_TOKENIZER"): return
    tried: dict[str, None] = {}
    charsmaps: list[Any] = []
    for part in PARTS:
        growth, steps = 1.0, list(_steps(parts.get(part)))
        if len(steps) > MAX_STEPS: raise refuse(f"{part} has {len(steps)} steps", f"at most {MAX_STEPS}")
        for step in steps:
            growth *= _growth(step, known)
            if step.get("type") == "Replace" and step.get("pattern") in ({"String": ""}, {"Regex": ""}):
                raise refuse(f"{part} replaces an empty text, which is between all characters", "a pattern")
            tried.update(dict.fromkeys(_patterns(step)))
            if step.get("type") == "Precompiled": charsmaps.append(step.get("precompiled_charsmap"))
        if growth > MAX_GROWTH:
            raise refuse(f"{part} may make a text {_times(growth)} times as long",
                         f"steps that make it at most {MAX_GROWTH} times as long")
    if (tokens := sum(map(_around, _steps(parts.get("post_processor"))))) > MAX_TEMPLATE:
        raise refuse(f"post_processor puts {tokens} tokens around a text", f"at most {MAX_TEMPLATE}")
    _require_added(parts.get("added_tokens"), refuse)
    if len(charsmaps) > 1: raise refuse(f"normalizer has {len(charsmaps)} charsmaps", "at most one")
    if long := next((each for each in tried if len(each) > MAX_PATTERN), None):
        raise refuse(f"a regular expression has {len(long)} characters", f"at most {MAX_PATTERN}")
    unknown = [each for each in tried if each not in KNOWN and each not in known]
    if len(unknown) > MAX_UNKNOWN:
        raise refuse(f"{len(unknown)} unknown regular expressions", f"at most {MAX_UNKNOWN}")
    if (why := _probe(unknown, charsmaps)) is not None:
        raise refuse(why, "steps that take time in proportion to a text, and end")


def require_model(made: Tokenizer, name: str) -> None:
    """Raises `TokenizerError` for a model whose time grows with the square of a text, or that fails."""
    model, most = made.model, f"at most {MAX_AFFIX} characters"
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(text := getattr(model, key, None) or "") > MAX_AFFIX:
            raise TokenizerError(f"{name}: {key} has {len(text)} characters", most, FIX)
    if (word := getattr(model, "max_input_chars_per_word", 0)) > MAX_WORD:
        raise TokenizerError(f"{name}: max_input_chars_per_word is {word}", f"at most {MAX_WORD}", FIX)
    require_strips(made, name)
    if isinstance(model, models.Unigram): require_pieces(made.get_vocab(False), name)
    try: made.decode(made.encode("a \u00e9").ids)
    except Exception: return      # a text with what the vocabulary lacks: said where it is encoded
    except BaseException as error:
        if not is_bare(error): raise
        raise TokenizerError(f"{name}: it fails: {message_of(error)}", "a tokenizer that encodes a letter",
                             FIX) from error


def require_strips(made: Tokenizer, name: str) -> None:
    """Raises `TokenizerError` for an added token of white space that takes the white space around it: each of
    a long run is looked for in all of the run."""
    for each in made.get_added_tokens_decoder().values():
        if (each.lstrip or each.rstrip) and not each.content.strip():
            raise TokenizerError(f"{name}: the added token {each.content[:20]!r} is white space and has "
                                 "lstrip or rstrip", "lstrip and rstrip of other tokens", FIX)


def require_pieces(pieces: Collection[str], name: str, scores: Sequence[float] = ()) -> None:
    """Raises `TokenizerError` for pieces that are too long, or have scores that are no numbers."""
    if (size := max(map(len, pieces), default=0)) > MAX_PIECE:
        raise TokenizerError(f"{name}: a piece has {size} characters", f"at most {MAX_PIECE}", FIX)
    if (squares := sum(len(each) ** 2 for each in pieces)) > MAX_SQUARES:
        raise TokenizerError(f"{name}: the squares of its pieces' lengths add up to {squares}",
                             f"at most {MAX_SQUARES}", FIX)
    if not all(map(math.isfinite, scores)):
        raise TokenizerError(f"{name}: a piece's score is NaN or infinite", "finite scores", FIX)


@contextlib.contextmanager
def _without_panics() -> Iterator[None]:
    """Drops what the library prints on stderr where it panics: the error has its words."""
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
            kept.seek(0)
            os.write(before, kept.read())
        finally:
            os.dup2(before, 2)
            os.close(before)


def _probe(patterns: Sequence[str], charsmaps: Sequence[Any]) -> str | None:
    """Returns what is wrong with regular expressions and a charsmap, None if nothing is."""
    batches = [{"patterns": patterns[at:at + BATCH], "charsmap": None}
               for at in range(0, len(patterns), BATCH)]
    if charsmaps: batches = [{"patterns": patterns[:BATCH], "charsmap": charsmaps[0]}, *batches[1:]]
    if not batches: return None
    with ThreadPoolExecutor(len(batches)) as pool:
        return next(filter(None, pool.map(_try_apart, batches)), None)


def _try_apart(batch: Mapping[str, Any]) -> str | None:
    """Says what is wrong with some of them, which a process of its own tries."""
    program = Path(__file__).with_name("tokenizer_probe.py")
    try:
        done = subprocess.run([sys.executable, "-P", str(program)], input=json.dumps(batch).encode(),
                              capture_output=True, timeout=PROBE_WAIT)
        # the last line is the result, or what was tried when the process was ended
        found = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return "its regular expressions or its charsmap take too long"
    return None if found is None else str(found)


def _require_added(added: Any, refuse: Callable[[str, str], TokenizerError]) -> None:
    if not isinstance(added, list): return
    if len(added) > MAX_ADDED: raise refuse(f"added_tokens has {len(added)} entries", f"at most {MAX_ADDED}")
    size = sum(len(str(each.get("content", ""))) for each in added if isinstance(each, dict))
    if size > MAX_ADDED_CHARS:
        raise refuse(f"added_tokens has {size} characters", f"at most {MAX_ADDED_CHARS} in all")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a part, those of sequences one by one."""
    waiting = [part]
    while waiting:
        if not isinstance(step := waiting.pop(), dict): continue
        lists = [step[key] for key in LISTS if isinstance(step.get(key), list)]
        if lists: waiting += [each for found in lists for each in reversed(found)]
        else: yield step


# **** growth ****

def _growth(step: Mapping[str, Any], known: Collection[str]) -> float:
    """How many times as long a step may make a text, at most. A regular expression that is not known may
    match nothing between all characters."""
    kind, pattern = step.get("type"), step.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict):
        put = len(str(step.get("content", "")))
        if isinstance(text := pattern.get("String"), str) and text: return max(1.0, put / len(text))
        return max(1, put) if {*pattern.values()} <= {*KNOWN, *known} else 1 + put
    if kind == "Prepend": return 1 + len(str(step.get("prepend", "")))
    if kind in ("ByteLevel", "Metaspace") and "decoders" not in step: return 2
    if kind == "BPEDecoder" and not step.get("suffix"): return 2
    if kind == "CTC" and not (step.get("pad_token") and step.get("word_delimiter_token")): return 2
    if kind == "TemplateProcessing":
        return max([1, *(_count(step.get(form), "Sequence", text)
                         for form in ("single", "pair") for text in "AB")])
    return 1


def _count(pieces: Any, kind: str, token: str) -> int:
    found = [each.get(kind) for each in pieces if isinstance(each, dict)] if isinstance(pieces, list) else []
    return sum(isinstance(each, dict) and each.get("id") == token for each in found)


def _around(step: Mapping[str, Any]) -> int:
    """Tokens that a post-processor puts around two texts."""
    special = step.get("special_tokens")
    forms = [form for form in (step.get("single"), step.get("pair")) if isinstance(form, list)]
    if not isinstance(special, dict) or not forms: return 3     # those of BERT and RoBERTa
    return max(sum(_ids(special, each) for each in form if isinstance(each, dict)) for form in forms)


def _ids(special: Mapping[str, Any], piece: Mapping[str, Any]) -> int:
    found = piece.get("SpecialToken")
    if not isinstance(found, dict): return 0
    entry = special.get(str(found.get("id")))
    return max(1, len(entry["ids"])) if isinstance(entry, dict) and isinstance(entry.get("ids"), list) else 1


def _times(growth: float) -> str: return f"{growth:.0f}" if growth < 1e9 else f"10^{math.log10(growth):.0f}"


def _patterns(step: Mapping[str, Any]) -> Iterator[str]:
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and isinstance(found := pattern.get("Regex"), str): yield found


# **** the file ****

def _head(text: str) -> dict[str, Any]:
    """All of a tokenizer.json but its model, which comes last and is large. Raises ValueError."""
    decoder, head, at = json.JSONDecoder(), dict[str, Any](), _after(text, 0, "{")
    while True:
        key, at = decoder.raw_decode(text, _blank(text, at))
        at = _blank(text, _after(text, at, ":"))
        if key == "model": break
        head[key], at = decoder.raw_decode(text, at)
        at = _blank(text, at)
        if text[at:at + 1] != ",": break
        at += 1
    # a key could be written with escapes, and a key that is there twice is read twice
    if any(text.find(f'"{key}"', at) >= 0 for key in HEAD) or _ESCAPED.search(text, at):
        whole = json.loads(text, object_pairs_hook=_once)
        return {key: value for key, value in whole.items() if key != "model"}
    return head


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs) and any(key in HEAD for key in made):
        raise ValueError("a key is there twice")
    return made


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _after(text: str, at: int, mark: str) -> int:
    at = _blank(text, at)
    if text[at:at + 1] != mark: raise ValueError(f"{text[at:at + 20]!r} at character {at}, and no {mark}")
    return at + 1
