"""A text of many megabytes, tokenized in parts.

The tokenizers library takes hundreds of bytes of memory a character, all at once. Protocol: `encode_long`
gives the ids that one call would give. It cuts a text only between lines where the tokens around the cut are
the same with and without it, as those of byte-level tokenizers are; what cannot be cut is encoded at once.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.engine.text.tokenizer import Tokenizer

LONG = 1 << 20      # characters that are encoded at once: below 1 GB
AROUND = 256        # characters on either side of a cut that are compared
TRIES = 16          # lines that are tried for one cut


def encode_long(tokenizer: Tokenizer, text: str, long: int = LONG) -> list[int]:
    """The ids of a text, with the special tokens that the model expects around it."""
    backend, own = tokenizer.backend, list[int]()
    for part in _parts(tokenizer, text, long): own += backend.encode(part, add_special_tokens=False).ids
    # what stands before and after a text is seen at one character, which may be several tokens
    probe, inside = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    at = next(at for at in range(len(probe)) if probe[at:at + len(inside)] == inside)
    return [*probe[:at], *own, *probe[at + len(inside):]]


def _parts(tokenizer: Tokenizer, text: str, long: int) -> Iterator[str]:
    begin = 0
    while len(text) - begin > long:
        cut = _cut(tokenizer, text, begin, begin + long)
        if cut is None: break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _cut(tokenizer: Tokenizer, text: str, begin: int, end: int) -> int | None:
    """The end of a line before `end`, where the text can be cut."""
    at = end
    for _ in range(TRIES):
        if (at := text.rfind("\n", begin, at)) <= begin: return None
        left, right = text[max(begin, at + 1 - AROUND):at + 1], text[at + 1:at + 1 + AROUND]
        both, *alone = (tokenizer.backend.encode(each, add_special_tokens=False).ids
                        for each in (left + right, left, right))
        if both == alone[0] + alone[1]: return at + 1
    return None
