"""Structured answers: which tokens a form allows next.

Protocol: `Grammars(tokenizer, vocab, eos)` is made once for a model, `matcher(structured)` once for each
sequence: it compiles the form, or takes it from those it has, and raises `RequestError` for one that cannot
be held. A `Matcher` says by `mask()` which tokens may come next and is told by `accept(token)` which one
came; when it is `finished` nothing may follow but an end token. Masks are packed as in batch.Sample; end
tokens are allowed where the form may end, ids that have no text never.

`masks(draft)` are those of a draft's rows: before its first token, and after each that is allowed.

The work is llguidance's: an Earley parser over a lexer of derivatives of regular expressions, over a trie of
all tokens. Where a form leaves one way to go on, the mask has the one token that the tokenizer would write.
"""
from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from tinygrad_nv.engine.structured_output.grammar_check import SECONDS, Checker, compiled
from tinygrad_nv.engine.structured_output.structured import Structured
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import EngineError, RequestError

KEPT = 64           # forms whose grammars are kept
MOST_FORCED = 1024  # characters: 20,000 took 40 ms at each of their tokens


class Matcher:
    """What a sequence's form allows next. It is one thread's."""

    def __init__(self, inner: Any, ends: np.ndarray, vocab: int) -> None:
        self._inner, self._ends, self._vocab = inner, ends, vocab
        self._mask = self._look(inner)

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but an end token."""
        return not (self._mask & ~self._ends).any()

    def mask(self) -> np.ndarray:
        """Which tokens may come next: uint32 [⌈vocab / 32⌉]."""
        return self._mask

    def masks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """What may stand in place of each token of a draft and after it, as far as they are allowed: the
        first is `mask()`. The matcher stays where it is."""
        found, inner = [self._mask], None
        for token in draft:
            if not self._allows(found[-1], token): break
            if inner is None: inner = self._inner.deep_copy()
            try:
                self._consume(inner, token)
                found.append(self._look(inner))
            except RequestError: break  # said when it is this token's turn
            if not (found[-1] & ~self._ends).any(): break
        return found

    def accept(self, token: int) -> None:
        """This token came. Raises `EngineError` if it must not, and `RequestError` if what may follow takes
        too long to tell."""
        if not self._allows(self._mask, token):
            raise EngineError(f"token {token} was chosen, and the form of the answer does not allow it",
                              "a token of the mask", "report this, with the form")
        self._consume(self._inner, token)
        self._mask = self._look(self._inner)

    def copy(self) -> Matcher:
        """Another one that stands where this one does."""
        made = copy(self)
        made._inner = self._inner.deep_copy()
        return made

    def _allows(self, mask: np.ndarray, token: int) -> bool:
        return 0 <= token < self._vocab and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

    def _consume(self, inner: Any, token: int) -> None:
        if not inner.consume_token(token): raise lost(inner)

    def _look(self, inner: Any) -> np.ndarray:
        """What may come next; nothing when an end token came."""
        if inner.is_stopped() and not inner.is_error(): return self._ends
        mask = np.frombuffer(inner.compute_bitmask(), np.uint32)[:len(self._ends)].copy()
        if inner.is_error() and inner.stop_reason() != "NoExtensionBias": raise lost(inner)
        if self._vocab & 31: mask[-1] &= np.uint32((1 << (self._vocab & 31)) - 1)
        return mask


def lost(inner: Any) -> RequestError:
    """A form that cannot be followed any further."""
    words = inner.get_error().partition("\n")[0] or inner.stop_reason()
    return RequestError(f"the form of the answer cannot be followed any further: {words}",
                        "a form whose next tokens take a bounded time to tell, in characters that the "
                        "vocabulary has",
                        "make it simpler: fewer repetitions of repetitions, fewer alternatives")


class Grammars:
    """Compiled forms over a model's tokens: `vocab` ids, of which `eos` end an answer. A form may take so
    many `seconds` to compile. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int],
                 seconds: float = SECONDS) -> None:
        from llguidance import LLTokenizer
        self.vocab = vocab
        self._words = words = _Words(tokenizer, vocab, [token for token in eos if 0 <= token < vocab])
        # it refers to `words` where no collection of cycles looks: a reference back would keep both for ever
        self._tokenizer = LLTokenizer(words, len(words.tokens),  # type: ignore[arg-type]  # a shape, not a class
                                      list(words.eos))
        self._checker = Checker(seconds)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Structured, Matcher] = OrderedDict()

    def matcher(self, structured: Structured) -> Matcher:
        """A matcher at its beginning. Takes up to seconds for a form that is new. Raises `RequestError`."""
        with self._lock:
            if (known := self._kept.get(structured)) is not None:
                self._kept.move_to_end(structured)
                return known.copy()
        made = self._compiled(structured)   # others need not wait
        with self._lock:
            self._kept[structured] = made
            while len(self._kept) > KEPT: self._kept.popitem(last=False)
            return made.copy()

    def close(self) -> None:
        """Ends the process that tries grammars."""
        self._checker.close()

    def _compiled(self, structured: Structured) -> Matcher:
        text = structured.grammar_text
        if not structured.trusted:
            try: error = self._checker.check(text)
            except TimeoutError as late:
                raise RequestError(f"the {structured.kind} takes more than {self._checker.seconds:g} s to "
                                   "compile", "a form that a person would write",
                                   "make it simpler: fewer repetitions of repetitions, smaller multiples, "
                                   "fewer alternatives") from late
            if error: raise refused(structured.kind, error)
        inner = compiled(self._tokenizer, text)
        if inner.is_error(): raise refused(structured.kind, inner.get_error())
        try: made = Matcher(inner, self._words.ends, self.vocab)
        except RequestError as error: raise refused(structured.kind, error.found) from error
        if made.finished: raise refused(structured.kind, "no answer has this form, or only the empty one")
        return made


def refused(kind: str, error: str) -> RequestError:
    """A form that cannot be held, in our words; `error` is llguidance's, or our own."""
    if match := re.search(r"Unimplemented keys: \[(.*?)\]", error):
        return RequestError(f"the {kind} uses {match[1]}, which cannot be held while tokens are chosen",
                            "keywords that docs/structured.md names",
                            "leave it out, and check the answer for it afterwards")
    if match := re.search(r"Unknown format: (\S*)", error):
        return RequestError(f"the {kind} has format {match[1]!r}, which is not known",
                            "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid or uri",
                            "use one of them, or a pattern")
    if match := re.search(r"(?m)^error: (.*)$", error): error = match[1]
    error = error.partition("\n")[0]
    return RequestError(f"the {kind} of a structured answer cannot be compiled: {error}",
                        f"a {kind} that some text matches, without look-around or references back, of a "
                        "bounded size", f"change the {kind}")


class _Words:
    """A tokenizer as llguidance asks for it: the bytes of tokens, and a text's tokens by bytes."""
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> None:
        self.backend, self.tokens = tokenizer.backend, token_bytes(tokenizer.backend, vocab)
        self.ends = packed(eos, vocab)
        if not eos:     # there must be one: a token that no mask has a bit for
            eos, self.tokens = [vocab], [*self.tokens, b""]
        for token in eos: self.tokens[token] = b""
        self.eos, self.eos_token_id = tuple(eos), eos[0]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text in the middle of another: the tokenizer's own if their bytes are the text's, which
        those of a text at the beginning may not be, or else the longest first. Of a long text the first
        ones do: of what a form forces, a mask has one token."""
        text = text[:MOST_FORCED]
        data = text.encode()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        known = all(token < len(self.tokens) for token in ids)
        if known and b"".join(self.tokens[token] for token in ids) == data: return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        found, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                if (token := self._ids.get(data[at:end])) is not None:
                    found.append(token)
                    at = end
                    break
            else: break     # no token has this byte, and the mask will be empty here
        return found


def packed(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """A mask of these tokens alone."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
