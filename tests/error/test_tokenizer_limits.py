"""tokenizer.json files that grow texts, match for hours or end the process: refused when they are read."""
from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.engine.text.sentencepiece import tokenizer_of
from tinygrad_nv.engine.text.sentencepiece_file import SentencePieceModel
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError

Part = dict[str, Any]
VOCAB = {"<unk>": 0, "a": 1, "b": 2, "▁": 3, "c": 4}
BPE = {"type": "BPE", "unk_token": "<unk>", "vocab": VOCAB, "merges": []}
A: Part = {"Sequence": {"id": "A", "type_id": 0}}
B: Part = {"Sequence": {"id": "B", "type_id": 1}}
NAMED: Part = {"SpecialToken": {"id": "x", "type_id": 0}}


def replace(pattern: str, content: str, kind: str = "String") -> Part:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def around(pieces: list[Part], ids: list[int] | None = None) -> Part:
    ids = [0] if ids is None else ids
    return {"type": "TemplateProcessing", "single": pieces, "pair": [A, B],
            "special_tokens": {"x": {"id": "x", "ids": ids, "tokens": ["<unk>"] * len(ids)}}}


def sequence(key: str, steps: list[Part]) -> Part: return {"type": "Sequence", key: steps}


def load(directory: Path, model: Part = BPE, **parts: Any) -> Tokenizer:
    (directory / "tokenizer.json").write_text(json.dumps(
        {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
         "post_processor": None, "decoder": None, **parts, "model": model}))
    return Tokenizer.load(directory)


DOUBLE = [replace("a", "aa")] * 30
BYTES: Part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + b"\xff\xff\xff\x3f" * 256 + b"abc\0").decode()


@pytest.mark.parametrize(("parts", "words"), [
    ({"normalizer": sequence("normalizers", DOUBLE)}, "normalizer may make a text 10.9 times as long"),
    ({"normalizer": sequence("normalizers", [sequence("normalizers", DOUBLE[:3])] * 2)}, "64 times as long"),
    ({"normalizer": replace("", "b")}, "normalizer replaces an empty text"),
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    ({"pre_tokenizer": split("<[^>]*>")}, r"takes 0.* s for 16384 characters of '<'"),
    ({"pre_tokenizer": split("((a{100}){100}){100}{100}b")}, r"'\(\(a\{100.* for 65536 characters of 'a'"),
    ({"added_tokens": [{"id": 5, "content": " ", "lstrip": True, "rstrip": False, "single_word": False,
                        "normalized": False, "special": True}]}, "' ' is white space and has lstrip"),
    ({"normalizer": replace(" ", "b" * 1000)}, "normalizer may make a text 1000 times"),
    ({"normalizer": replace("x*", "bbbb" * 4, "Regex")}, "normalizer may make a text 17 times"),
    ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "normalizer may make a text 1000001 times"),
    ({"normalizer": sequence("normalizers", [{"type": "NFC"}] * 65)}, "normalizer has 65 steps"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "charsmap is damaged"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap is damaged"),
    ({"pre_tokenizer": sequence("pretokenizers", [BYTES] * 30)}, "pre_tokenizer may make a text 10.9 times"),
    ({"pre_tokenizer": split("(a+)+$")}, r"'\(a\+\)\+\$' fails on 64 times 'a'"),
    ({"pre_tokenizer": split("q+bc")}, r"'q\+bc' takes 0.* s for 16384 characters of 'q'"),
    ({"pre_tokenizer": split("(qz)+c")}, r"takes 0.* s for 16384 characters of 'qz'"),
    ({"pre_tokenizer": split("a|" * 40_000)}, "a regular expression has 80000 characters"),
    ({"decoder": sequence("decoders", DOUBLE)}, "decoder may make a text 10.9 times as long"),
    ({"decoder": replace("a+b", "b", "Regex")}, r"'a\+b' takes 0.* s for 16384 characters of 'a'"),
    ({"post_processor": around([NAMED] * 257 + [A])}, "post_processor puts 257 tokens around a text"),
    ({"post_processor": around([NAMED, A], [0] * 10**5)}, "post_processor puts 100000 tokens"),
    ({"post_processor": sequence("processors", [around([A, A])] * 30)}, "post_processor may make a text"),
    ({"added_tokens": [{}] * ((1 << 18) + 1)}, "has 262145 entries"),
    ({"added_tokens": [{"id": 5, "content": "x" * (1 << 23)}]}, "added_tokens has 8388608 characters"),
    ({"model": {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##", "vocab": VOCAB,
                "max_input_chars_per_word": 10**18}}, "max_input_chars_per_word is 1000000000000000000"),
    ({"model": {**BPE, "continuing_subword_prefix": "s" * 65}}, "continuing_subword_prefix has 65 char"),
    ({"model": {**BPE, "vocab": {"a": 0, "b": 1, "ab": 2, "<unk>": 3}, "merges": ["a b", "ab a"]}},
     "tokenizer.json cannot be read"),
    ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a" * 1001, -1.0]]}},
     "a piece has 1001 characters")], ids=lambda value: value if isinstance(value, str) else "")
def test_what_grows_or_never_ends_is_refused(tmp_path: Path, capfd, parts: Part, words: str):
    with pytest.raises(TokenizerError, match=words) as error: load(tmp_path, **parts)
    assert str(tmp_path / "tokenizer.json") in error.value.found
    assert len(str(error.value)) < 700
    assert capfd.readouterr().err == ""     # where the library's panics go


def test_who_trusts_a_file_may_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts = {"pre_tokenizer": split(r"b+c"), "normalizer": replace("c", "b" * 20)}
    with pytest.raises(TokenizerError, match="20 times as long") as error: load(tmp_path, **parts)
    assert "NV_TRUST_TOKENIZER=1" in error.value.fix
    monkeypatch.setenv("NV_TRUST_TOKENIZER", "1")
    assert load(tmp_path, **parts).encode("ac") == [1] + [2] * 20


@pytest.mark.parametrize("key", ["normalizers", "decoders"])
def test_deep_files_are_refused(tmp_path: Path, key: str):
    part = {"normalizers": "normalizer", "decoders": "decoder"}[key]
    text = f'{{"type":"Sequence","{key}":[' * 10**5 + "]}" * 10**5
    (tmp_path / "tokenizer.json").write_text(f'{{"{part}":{text},"model":{json.dumps(BPE)}}}')
    with pytest.raises(TokenizerError, match="cannot be read: maximum recursion"): Tokenizer.load(tmp_path)


@pytest.mark.parametrize("key", ["normalizer", "n\\u006frmalizer"])
def test_steps_behind_the_model_are_found(tmp_path: Path, key: str):
    steps = json.dumps(sequence("normalizers", DOUBLE))
    (tmp_path / "tokenizer.json").write_text(f'{{"model":{json.dumps(BPE)},"{key}":{steps}}}')
    with pytest.raises(TokenizerError, match="normalizer may make a text"): Tokenizer.load(tmp_path)


def test_usual_steps_are_read(tmp_path: Path):
    llama = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]
    decoder = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
               {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    made = load(tmp_path, normalizer=sequence("normalizers", llama), decoder=sequence("decoders", decoder),
                pre_tokenizer=split(r"\d{1,3}|\p{L}+| ?[^\s\p{L}\d]+|\s+"),       # none that is known
                post_processor=around([NAMED, A]), padding={
                    "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"})
    assert made.encode("ab c") == [0, 3, 1, 2, 3, 4]
    assert made.decode([3, 1, 2, 3, 4]) == "ab c"


def test_several_unknown_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Processes side by side try them; the last one is tried as the first."""
    monkeypatch.setattr("tinygrad_nv.models.tokenizer_limits.BATCH", 1)
    linear = [split(rf"{letter}\d{{1,3}}|\p{{L}}+| ?[^\s\p{{L}}\d]+|\s+") for letter in "abcdefghijklmnopq"]
    made = load(tmp_path, pre_tokenizer=sequence("pretokenizers", linear[:2]))
    assert made.encode("ab c") == [1, 2, 0, 4]
    with pytest.raises(TokenizerError, match=r"17 unknown regular expressions\n.*at most 16"):
        load(tmp_path, pre_tokenizer=sequence("pretokenizers", linear))
    with pytest.raises(TokenizerError, match=r"'\(a\+\)\+\$' fails on 64 times 'a'"):
        load(tmp_path, pre_tokenizer=sequence("pretokenizers", [linear[0], split("(a+)+$")]))


def test_a_text_that_the_vocabulary_lacks_is_typed(tmp_path: Path):
    made = load(tmp_path, {"type": "WordLevel", "unk_token": "nope", "vocab": {"a": 0}})
    assert made.encode("a") == [0]
    with pytest.raises(TokenizerError, match="the tokenizer cannot encode this text: WordLevel error"):
        made.encode("b")


@pytest.mark.parametrize(("pieces", "score", "words"), [
    (("<unk>", "a"), float("nan"), "score is NaN"), (("<unk>", "a"), float("inf"), "NaN or infinite"),
    (("<unk>", "a" * 10**6), -1.0, "a piece has 1000000 characters")])
def test_pieces_of_sentencepiece(pieces: tuple[str, ...], score: float, words: str):
    model = SentencePieceModel("bpe", pieces, (0.0, score), (2, 1), False, 0, -1, -1, -1, False, b"", True,
                               True, True)
    with pytest.raises(TokenizerError, match=words): tokenizer_of(model, {})
