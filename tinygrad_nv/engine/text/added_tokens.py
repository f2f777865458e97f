"""Tokens that a directory adds to a vocabulary, and those around a text, for tokenizers that are made from
other files than tokenizer.json.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tinygrad_nv.errors import TokenizerError, brief

FLAGS = ("lstrip", "rstrip", "single_word")


def is_id(key: str) -> bool:
    """Whether a key of `added_tokens_decoder` is the id of a token."""
    return key.isascii() and key.isdecimal() and len(key) < 10


def add_tokens(made: Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any],
               special: Mapping[str, str], name: str) -> None:
    """Adds the tokens of tokenizer_config.json's `added_tokens_decoder`, of added_tokens.json (`older`, text
    to id), and special tokens, by their ids. Raises `TokenizerError` where an id is not the next one."""
    found: dict[int, AddedToken] = {}
    known = set(special.values())
    for text, token in older.items():
        if isinstance(token, int): found[token] = AddedToken(text, normalized=False, special=text in known)
    decoder = config.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if not is_id(key) or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise TokenizerError(f"{name}: added_tokens_decoder has {brief(key)}: {brief(entry)}",
                                 "ids, and objects with content", "download the file again")
        flags = {flag: bool(entry.get(flag)) for flag in FLAGS}
        found[int(key)] = AddedToken(entry["content"], normalized=False, special=bool(entry.get("special")),
                                     **flags)
    for token, added in sorted(found.items()):
        if added.special: made.add_special_tokens([added])
        else: made.add_tokens([added])
        if (given := made.token_to_id(added.content)) != token:
            raise TokenizerError(f"{name}: the added token {brief(added.content)} has id {token}, and the "
                                 f"vocabulary gives it {given}",
                                 "ids that follow the vocabulary's, without gaps",
                                 "use the files that belong to each other, or a tokenizer.json")
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special.values()
                             if made.token_to_id(text) is not None])


def add_ends(made: Tokenizer, first: str | None, last: str | None) -> None:
    """A token before and one after each text; None for none."""
    ends = [text for text in (first, last) if text is not None and made.token_to_id(text) is not None]
    if not ends: return
    single = [text for text in (first, "$A", last) if text == "$A" or text in ends]
    pair = [f"{text}:1" for text in (first, "$B", last) if text == "$B" or text in ends]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=single + pair,
        special_tokens=[(text, made.token_to_id(text)) for text in dict.fromkeys(ends)])
