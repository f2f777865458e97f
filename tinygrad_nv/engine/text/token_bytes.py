"""The bytes of each token of a vocabulary.

Protocol: `token_bytes(backend, size)` returns them for ids 0 … size − 1, as in the middle of a text. Two
encodings are supported: byte-level BPE, whose pieces have a character for each byte (GPT-2), and
SentencePiece, whose pieces have ▁ for a blank and <0xNN> for a byte that is not a character. Special tokens,
and ids without a token, have no bytes.
"""
from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from tinygrad_nv.errors import TokenizerError

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """Bytes of each token, b"" for tokens without text. Raises `TokenizerError` for another encoding."""
    decoders = list(_flat_decoders(json.loads(backend.to_str()).get("decoder")))
    levels = any(kind == "ByteLevel" for kind, _ in decoders)
    blanks = {entry.get("pattern", {}).get("String") or entry.get("replacement") for kind, entry in decoders
              if kind in ("Metaspace", "Replace")}
    if not levels and "▁" not in blanks:
        raise TokenizerError("structured output needs the bytes of each token, and its decoder does not give "
                             f"them ({', '.join(kind for kind, _ in decoders) or 'none'})",
                             "byte-level BPE, or SentencePiece", "use a model with such a tokenizer")
    added = backend.get_added_tokens_decoder()
    made = [b""] * size
    for piece, token in backend.get_vocab(with_added_tokens=True).items():
        if not 0 <= token < size: continue
        if (entry := added.get(token)) is not None: made[token] = b"" if entry.special else piece.encode()
        elif levels: made[token] = _bytes_of_piece(piece)
        elif match := _BYTE.fullmatch(piece): made[token] = bytes([int(match[1], 16)])
        else: made[token] = piece.replace("▁", " ").encode()
    return made


def _flat_decoders(decoder: Any) -> list[tuple[str, dict[str, Any]]]:
    """Decoders with their types; those of a sequence one by one."""
    if not decoder: return []
    inner = [kind for each in decoder.get("decoders", []) for kind in _flat_decoders(each)]
    return [(decoder["type"], decoder), *inner]


def _characters() -> dict[str, int]:
    """The byte of each character of byte-level BPE: printable bytes are their own character, the others are
    U+0100 on, in order."""
    own = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTE_OF_CHARACTER = _characters()


def _bytes_of_piece(piece: str) -> bytes:
    # a piece with any other character, such as a blank, was added to the vocabulary as text
    if any(each not in BYTE_OF_CHARACTER for each in piece): return piece.encode()
    return bytes(BYTE_OF_CHARACTER[each] for each in piece)
