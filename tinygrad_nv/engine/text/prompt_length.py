"""Bounds of a text's tokens that need no tokenizing.

Protocol: a text has `TextBound.of(backend).least(text)` tokens or more; 0 where nothing can be said, since
the tokenizer drops or merges what it reads: a normalizer that strips, one token for a run of unknown
characters.
Tokens of a byte-level vocabulary stand for as many bytes as their name has characters, others for as many
characters.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

# code points that Unicode composes to one, at most
COMPOSED = 4
# steps of tokenizers that make no text shorter, with what they may divide its characters by
NORMALIZERS = {"Lowercase": 1, "Prepend": 1, "NFD": 1, "NFKD": 1, "NFC": COMPOSED, "NFKC": COMPOSED,
               "ByteLevel": 1}
PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")
# what added tokens with lstrip or rstrip take with them
BLANKS = "".join(chr(i) for i in range(0x3001) if chr(i).isspace())


@dataclass(frozen=True)
class TextBound:
    """`most` bytes or characters that a token stands for, at most; None where there is no such number.
    `blanks`: without those that belong to added tokens."""
    most: int | None
    in_bytes: bool = False
    blanks: bool = True

    @staticmethod
    def of(backend: tokenizers.Tokenizer) -> TextBound:
        """The bound of a tokenizer."""
        model, unbounded = backend.model, TextBound(None)
        before, steps = [*_steps(backend.pre_tokenizer)], [*_steps(backend.normalizer)]
        shrink = 1
        for step in steps:
            if not (by := _shrinks(step)): return unbounded
            shrink *= by
        if not all(map(_keeps, before)): return unbounded
        byte_level = any(step["type"] == "ByteLevel" for step in (*before, *steps))
        # others have unknown characters, which are dropped, or one token for many
        if not isinstance(model, models.BPE) or not (byte_level or model.byte_fallback): return unbounded
        added = backend.get_added_tokens_decoder().values()
        longest = max(map(len, backend.get_vocab()), default=1)
        return TextBound(longest * shrink, byte_level and not steps,
                         not any(each.lstrip or each.rstrip for each in added))

    def least(self, text: str) -> int:
        """Tokens that `text` has at least."""
        if self.most is None: return 0
        size = len(text.encode(errors="surrogatepass")) if self.in_bytes else len(text)
        if not self.blanks: size -= sum(text.count(each) * len(each.encode()) for each in BLANKS)
        return -(-size // self.most)


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those inside sequences one by one."""
    if part is not None: yield from _flat(json.loads(part.__getstate__()))


def _flat(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] != "Sequence": yield step
    else:
        for each in step.get("normalizers", step.get("pretokenizers", ())): yield from _flat(each)


def _shrinks(step: Mapping[str, Any]) -> int:
    """By what a normalizer may divide the characters of a text, 0 for any number."""
    if step["type"] != "Replace": return NORMALIZERS.get(step["type"], 0)
    return int(len(step["pattern"].get("String") or step["content"] + " ") <= len(step["content"]))


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer keeps all of a text."""
    if step["type"] in ("Split", "Punctuation"): return step.get("behavior") != "Removed"
    return step["type"] in PRE_TOKENIZERS
