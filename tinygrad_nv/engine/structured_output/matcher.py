"""Compiled grammars of structured output, and the token masks of a sequence.

Protocol: `GrammarCompiler(tokenizer, vocab, eos)` is created once for a model. `matcher(structured)` returns
a matcher for one sequence. It compiles the grammar, or takes it from its cache, and raises `RequestError` for
one that cannot be enforced. `GrammarMatcher.mask()` is the token mask of the next token; `accept(token)`
advances the matcher. When it is `is_finished`, only an end token may follow. Masks are packed as in
`Sample.mask`. End tokens are allowed where the output may end; ids without text are never allowed.

`masks(draft)` are the masks for a draft: before its first token, and after each allowed token.

llguidance does the work: an Earley parser over a lexer of regular-expression derivatives, over a trie of all
tokens. Where the grammar forces a text, the mask has the one token that the tokenizer would produce.
"""
from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from tinygrad_nv.engine.structured_output.grammar_check import (
    COMPILE_SECONDS,
    GrammarChecker,
    compile_grammar,
)
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.engine.structured_output.schema import find_closed_patterns
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import EngineError, RequestError

MAX_COMPILED = 64       # compiled grammars in the cache
MAX_FORCED_CHARS = 1024 # characters of a forced text; 20,000 took 40 ms a token


class GrammarMatcher:
    """The grammar state of one sequence. Not thread-safe."""

    def __init__(self, inner: Any, ends: np.ndarray, vocab: int) -> None:
        self._inner, self._ends, self._vocab = inner, ends, vocab
        self._mask = self._compute_mask(inner)

    @property
    def is_finished(self) -> bool:
        """Whether only an end token may follow."""
        return not (self._mask & ~self._ends).any()

    def mask(self) -> np.ndarray:
        """The token mask of the next token: uint32 [⌈vocab / 32⌉]."""
        return self._mask

    def masks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """The masks before each token of a draft and after it, as far as the draft is allowed. The first is
        `mask()`. The state of the matcher does not change."""
        found, inner = [self._mask], None
        for token in draft:
            if not self._allows(found[-1], token): break
            if inner is None: inner = self._inner.deep_copy()
            try:
                self._consume(inner, token)
                found.append(self._compute_mask(inner))
            except RequestError: break  # `accept` raises it if this token is accepted
            if not (found[-1] & ~self._ends).any(): break
        return found

    def accept(self, token: int) -> None:
        """Advances by one token. Raises `EngineError` if the token is not allowed, and `RequestError` if the
        next mask takes too long to compute."""
        if not self._allows(self._mask, token):
            raise EngineError(f"token {token} was sampled, and the structured output does not allow it",
                              "a token of the mask", "report this bug, with the request")
        self._consume(self._inner, token)
        self._mask = self._compute_mask(self._inner)

    def copy(self) -> GrammarMatcher:
        """A copy in the same state."""
        made = copy(self)
        made._inner = self._inner.deep_copy()
        return made

    def _allows(self, mask: np.ndarray, token: int) -> bool:
        return 0 <= token < self._vocab and bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

    def _consume(self, inner: Any, token: int) -> None:
        if not inner.consume_token(token): raise mask_error(inner)

    def _compute_mask(self, inner: Any) -> np.ndarray:
        """The token mask of the next token. After an end token, the mask of end tokens."""
        if inner.is_stopped() and not inner.is_error(): return self._ends
        mask = np.frombuffer(inner.compute_bitmask(), np.uint32)[:len(self._ends)].copy()
        if inner.is_error() and inner.stop_reason() != "NoExtensionBias": raise mask_error(inner)
        if self._vocab & 31: mask[-1] &= np.uint32((1 << (self._vocab & 31)) - 1)
        return mask


def mask_error(inner: Any) -> RequestError:
    """Returns the error for a grammar whose next mask cannot be computed."""
    reason = inner.get_error().partition("\n")[0] or inner.stop_reason()
    return RequestError(f"the structured output cannot be continued: {reason}",
                        "a grammar whose token masks take a bounded time to compute, with characters "
                        "that the vocabulary has",
                        "make it simpler: fewer repetitions of repetitions, fewer alternatives")


class GrammarCompiler:
    """Compiled grammars over a model's tokens: `vocab` ids, of which `eos` end an answer. A grammar may take
    `seconds` to compile. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int],
                 seconds: float = COMPILE_SECONDS) -> None:
        from llguidance import LLTokenizer
        self.vocab = vocab
        known_eos = [token for token in eos if 0 <= token < vocab]
        self._tokenizer_info = tokenizer_info = _TokenizerInfo(tokenizer, vocab, known_eos)
        # llguidance's reference to it is invisible to the garbage collector: a reference back would leak both
        # type: a protocol, not a class
        self._tokenizer = LLTokenizer(tokenizer_info, len(tokenizer_info.tokens),  # type: ignore[arg-type]
                                      list(tokenizer_info.eos))
        self._checker = GrammarChecker(seconds)
        self._lock = threading.Lock()
        self._cache: OrderedDict[StructuredOutputsParams, GrammarMatcher] = OrderedDict()

    def matcher(self, structured: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher in its initial state. Compiling a new grammar takes up to seconds. Raises `RequestError`.
        """
        with self._lock:
            if (cached := self._cache.get(structured)) is not None:
                self._cache.move_to_end(structured)
                return cached.copy()
        made = self._compile(structured)   # outside the lock
        with self._lock:
            self._cache[structured] = made
            while len(self._cache) > MAX_COMPILED: self._cache.popitem(last=False)
            return made.copy()

    def close(self) -> None:
        """Ends the subprocess that checks grammars."""
        self._checker.close()

    def _compile(self, structured: StructuredOutputsParams) -> GrammarMatcher:
        text = structured.grammar_text
        if not structured.is_trusted:
            try:
                text = self._without_dead_patterns(text)
                error = self._checker.check(text)
            except TimeoutError as late:
                raise RequestError(f"the {structured.kind} takes more than {self._checker.seconds:g} s to "
                                   "compile", "a grammar that compiles in that time",
                                   "make it simpler: fewer repetitions of repetitions, smaller multiples, "
                                   "fewer alternatives") from late
            if error: raise compile_error(structured.kind, error)
        inner = compile_grammar(self._tokenizer, text)
        if inner.is_error(): raise compile_error(structured.kind, inner.get_error())
        try: made = GrammarMatcher(inner, self._tokenizer_info.stop_ids, self.vocab)
        except RequestError as error: raise compile_error(structured.kind, error.found) from error
        if made.is_finished: raise compile_error(structured.kind, "no text matches it, or only the empty one")
        return made


    def _without_dead_patterns(self, text: str) -> str:
        """The grammar without patterns of names that allow no name but those that its schema lists: after a
        comma nothing could follow."""
        if "patternProperties" not in text: return text
        grammar = json.loads(text)
        found = [(each, pattern) for each in find_closed_patterns(grammar["grammars"][0].get("json_schema"))
                 for pattern in each["patternProperties"]]
        dead = self._checker.are_dead([_probe(*each) for each in found])
        for (each, pattern), is_dead in zip(found, dead, strict=True):
            if is_dead: del each["patternProperties"][pattern]
        return json.dumps(grammar) if any(dead) else text


def _probe(schema: dict[str, Any], pattern: str) -> tuple[str, str]:
    """A grammar with the names of an object and one of its patterns, and the text of all these names."""
    names = [*(schema.get("properties") or ())]
    probed = {"type": "object", "properties": {name: {"const": 0} for name in names}, "required": names,
              "patternProperties": {pattern: {"const": 0}}, "additionalProperties": False,
              "x-guidance": {"whitespace_flexible": False}}
    members = [f"{json.dumps(name, ensure_ascii=False)}:0," for name in names]
    return json.dumps({"grammars": [{"json_schema": probed}]}), "{" + "".join(members)


def compile_error(kind: str, error: str) -> RequestError:
    """The error for a grammar that cannot be enforced; `error` is llguidance's message, or our own."""
    if match := re.search(r"Unimplemented keys: \[(.*?)\]", error):
        return RequestError(f"the {kind} uses {match[1]}, which cannot be enforced while tokens are sampled",
                            "keywords that docs/structured.md names",
                            "leave it out, and check the answer for it afterwards")
    if match := re.search(r"Unknown format: (\S*)", error):
        return RequestError(f"the {kind} has format {match[1]!r}, which is not known",
                            "date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid or uri",
                            "use one of them, or a pattern")
    if match := re.search(r"(?m)^error: (.*)$", error): error = match[1]
    error = error.partition("\n")[0]
    return RequestError(f"the {kind} of the structured output cannot be compiled: {error}",
                        f"a {kind} of bounded size that some text matches, without look-around or "
                        "back-references", f"change the {kind}")


class _TokenizerInfo:
    """A tokenizer as llguidance expects it: the bytes of each token, and the tokens of a text."""
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> None:
        self.backend, self.tokens = tokenizer.backend, token_bytes(tokenizer.backend, vocab)
        self.stop_ids = pack_mask(eos, vocab)
        if not eos:     # llguidance needs an end token: one that no mask has a bit for
            eos, self.tokens = [vocab], [*self.tokens, b""]
        for token in eos: self.tokens[token] = b""
        self.eos, self.eos_token_id = tuple(eos), eos[0]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self._ids = {text: token for token, text in reversed(list(enumerate(self.tokens))) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text in the middle of another. The tokenizer's own if their bytes equal the text's; at
        the start of a text they may not, and then the longest match is taken. Of a long text only the start
        is tokenized: a forced text needs one token at a time."""
        text = text[:MAX_FORCED_CHARS]
        data = text.encode()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        cached = all(token < len(self.tokens) for token in ids)
        if cached and b"".join(self.tokens[token] for token in ids) == data: return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        found, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                if (token := self._ids.get(data[at:end])) is not None:
                    found.append(token)
                    at = end
                    break
            else: break     # no token has this byte: the mask will be empty here
        return found


def pack_mask(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """The packed mask that allows only these tokens."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
