"""Vocabulary files without tokenizer.json that are damaged, or of a kind that is not read."""
from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError

AGAIN = "  to fix:   download the file again"


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def entry(number: int, value: int | bytes | float) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float): return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int): return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: str, score: float = 0.0, kind: int = 1) -> bytes:
    return entry(1, entry(1, text.encode()) + entry(2, score) + entry(3, kind))


PIECES = piece("<unk>", 0.0, 2) + piece("<s>", 0.0, 3) + piece("</s>", 0.0, 3) + piece("a", -1.0)
WHOLE = PIECES + entry(2, entry(3, 2))


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(TokenizerError) as caught: Tokenizer.load(directory)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_the_message_of_these_tests_is_whole(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(WHOLE)
    assert Tokenizer.load(tmp_path).encode("a", special=False) == [0, 3]


@pytest.mark.parametrize(("content", "found"), [
    (b"", "it has no pieces"), (b"\xff" * 40, "a number of more than 10 bytes"),
    (b'{"model": {"type": "BPE"}}', "wire type 3"), (b"PK\x03\x04" * 9, "field"),
    (WHOLE[:25], "ends at byte"), (PIECES, "nothing follows its pieces"), (WHOLE[:-1], "ends at byte"),
    (entry(2, entry(3, 2)), "it has no pieces"),
    (PIECES + entry(2, entry(3, 9)), "model type 9"), (PIECES + entry(2, entry(40, 7)), "piece 7 of 4"),
    (PIECES + entry(1, entry(1, b"\xff")), "can't decode byte 0xff"), (entry(1, 5), "a number where a text")])
def test_no_model(tmp_path: Path, content: bytes, found: str):
    (tmp_path / "tokenizer.model").write_bytes(content)
    refused(tmp_path, f"{tmp_path / 'tokenizer.model'} is no SentencePiece model, or damaged: ", found,
            "expected: a complete file that SentencePiece wrote", AGAIN)


@pytest.mark.parametrize(("trainer", "found"), [
    (entry(3, 3), "is of type word"), (entry(3, 4), "is of type char"),
    (entry(3, 2) + entry(24, 1), "treats blanks as suffixes")])
def test_kinds_that_are_not_read(tmp_path: Path, trainer: bytes, found: str):
    (tmp_path / "tokenizer.model").write_bytes(PIECES + entry(2, trainer))
    refused(tmp_path, f"the SentencePiece model {found}", "expected: unigram or bpe, blanks as prefixes",
            "to fix:   put a tokenizer.json into the directory")


def test_tiktoken(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    refused(tmp_path, "is a tiktoken file, and its pattern that splits text is not in it",
            "to fix:   put the model's tokenizer.json into the directory")


def test_added_tokens_with_a_gap(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(WHOLE)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 9}))
    refused(tmp_path, "the added token '<x>' has id 9, and the vocabulary gives it 4",
            "expected: ids that follow the vocabulary's, without gaps")
    (tmp_path / "added_tokens.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"x": 3}}))
    refused(tmp_path, "added_tokens_decoder has 'x': 3", "expected: ids, and objects with content")


def test_merges_of_no_tokens(tmp_path: Path):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("a b\n")
    refused(tmp_path, f"{tmp_path / 'merges.txt'}: merge 'a' 'b' is not of tokens",
            "expected: merges of two tokens to a token")
    (tmp_path / "vocab.json").write_text("[]")
    refused(tmp_path, f"{tmp_path / 'vocab.json'}: its tokenizer cannot be made", "files of one tokenizer")


def test_wordpiece_without_its_tokens(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    refused(tmp_path, f"{tmp_path / 'vocab.txt'} lacks the cls_token '[CLS]'",
            "expected: a token on each line")


def test_nothing_there(tmp_path: Path):
    refused(tmp_path, f"{tmp_path} has no tokenizer.json",
            "or tokenizer.model, vocab.json with merges.txt, or vocab.txt",
            "to fix:   download tokenizer.json, or pass token ids instead of text")
