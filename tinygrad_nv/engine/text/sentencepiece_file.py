"""A SentencePiece model file (tokenizer.model), as it is stored.

Protocol: `read_model(path)` returns a `SentencePieceModel`, or raises `TokenizerError`. The file is one
protobuf message, ModelProto of sentencepiece_model.proto; of its fields those that decide how text becomes
tokens are read. Protobuf's wire format is a sequence of fields, each a key (number · 8 + wire type) and a
value: a varint (0), 8 bytes (1), a length and so many bytes (2), or 4 bytes (5). A field that is not there
has the default of the .proto file.
"""
from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.files import read_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)      # types of pieces
MAX_MODEL_BYTES = 32 << 20      # limit: bytes of a SentencePiece model; the largest has 5 MB
MAX_PIECES = 1_000_000          # limit: pieces of a SentencePiece model; the largest has 262 144
KINDS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
PIECES, TRAINER, NORMALIZER = 1, 2, 3                                   # fields of ModelProto
Value = int | bytes


@dataclass(frozen=True)
class SentencePieceModel:
    """Pieces are in the order of their ids; `types` and `scores` are theirs. `charsmap` is SentencePiece's
    own normalisation, compiled. An id of -1 is a token that the model lacks."""
    kind: str
    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    byte_fallback: bool
    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int
    suffix: bool                # blanks belong to the word before them
    charsmap: bytes
    dummy_prefix: bool
    remove_blanks: bool
    escape_blanks: bool

    def piece(self, token: int) -> str | None:
        """The text of an id, None of one that is not there."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else None


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file. Raises `TokenizerError` for a file that cannot be read, is truncated, or is
    something else."""
    try: data = read_bytes(path, MAX_MODEL_BYTES)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}", "a readable file",
                             "check its permissions") from error
    if _is_tiktoken(data):
        raise TokenizerError(f"{path} is a tiktoken file, and its pattern that splits text is not in it",
                             "a SentencePiece model, or a tokenizer.json",
                             "put the model's tokenizer.json into the directory")
    try: model = parse_model(data)
    except (ValueError, IndexError, struct.error) as error:
        raise TokenizerError(f"{path} is no SentencePiece model, or damaged: {error}",
                             "a complete file that SentencePiece wrote",
                             "download the file again") from error
    if model.kind not in ("unigram", "bpe") or model.suffix:
        found = "treats blanks as suffixes" if model.suffix else f"is of type {model.kind}"
        raise TokenizerError(f"{path}: the SentencePiece model {found}", "unigram or bpe, blanks as prefixes",
                             "put a tokenizer.json into the directory")
    return model


def parse_model(data: bytes) -> SentencePieceModel:
    """The model in a message. Raises `ValueError`."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Value] = {}
    normalizer: dict[int, Value] = {}
    for number, value in fields(data):
        if number == PIECES: pieces.append(_piece(_bytes(value)))
        if len(pieces) > MAX_PIECES: raise ValueError(f"it has more than {MAX_PIECES} pieces")
        elif number == TRAINER: trainer.update(fields(_bytes(value)))
        elif number == NORMALIZER: normalizer.update(fields(_bytes(value)))
    if not pieces: raise ValueError("it has no pieces")
    if not trainer: raise ValueError("nothing follows its pieces")
    if (kind := _int(trainer.get(3, 1))) not in KINDS: raise ValueError(f"model type {kind}")
    texts, scores, types = zip(*pieces, strict=True)
    if not 0 <= (unknown := _id(trainer.get(40, 0))) < len(texts):
        raise ValueError(f"its unknown token is piece {unknown} of {len(texts)}")
    return SentencePieceModel(
        KINDS[kind], texts, scores, types, bool(trainer.get(35, 0)), unknown, _id(trainer.get(41, 1)),
        _id(trainer.get(42, 2)), _id(trainer.get(43, -1)), bool(trainer.get(24, 0)),
        _bytes(normalizer.get(2, b"")), bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)),
        bool(normalizer.get(5, 1)))


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message, in order. Raises `ValueError` where it ends early."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if not (number := key >> 3): raise ValueError(f"field 0 at byte {at}")
        value: Value
        if (wire := key & 7) == 0: value, at = _varint(data, at)
        elif wire in (1, 2, 5):
            size = {1: 8, 5: 4}.get(wire, 0)
            if wire == 2: size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError(f"field {number} ends at byte {at + size} of {len(data)}")
            value, at = data[at:at + size], at + size
        else: raise ValueError(f"field {number} of wire type {wire} at byte {at}")
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(data): raise ValueError(f"it ends within a number, at byte {len(data)}")
        value |= (data[at + i] & 0x7F) << 7 * i
        if data[at + i] < 0x80: return value, at + i + 1
    raise ValueError(f"a number of more than 10 bytes at byte {at}")


def _piece(data: bytes) -> tuple[str, float, int]:
    """Text, score and type."""
    found = dict(fields(data))
    text, score = _bytes(found.get(1, b"")).decode("utf-8"), _bytes(found.get(2, b"\0\0\0\0"))
    return text, struct.unpack("<f", score)[0], _int(found.get(3, NORMAL))


def _bytes(value: Value) -> bytes:
    if isinstance(value, bytes): return value
    raise ValueError("a number where a text or a message is expected")


def _int(value: Value) -> int:
    if isinstance(value, int): return value
    raise ValueError("a text where a number is expected")


def _id(value: Value) -> int:
    """An int32; negative ones are stored as 64 bits."""
    found = _int(value)
    return found - (1 << 64) if found >= 1 << 63 else found


def _is_tiktoken(data: bytes) -> bool:
    """Whether lines are base64 and a rank."""
    first, _, rank = data[:4096].partition(b"\n")[0].partition(b" ")
    if not rank.strip().isdigit(): return False
    try: return bool(base64.b64decode(first, validate=True))
    except binascii.Error: return False
