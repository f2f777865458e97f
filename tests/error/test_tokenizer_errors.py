"""Tokenizers, vocabularies and chat templates that are missing, damaged or hostile: refused when they are
read."""
from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from tinygrad_nv.engine.text.sentencepiece import tokenizer_of
from tinygrad_nv.engine.text.sentencepiece_file import SentencePieceModel
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}{{ (''|attr('__class__')).mro() }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].system('true') }}",
    "{{ raise_exception.__globals__['datetime'].sys.modules['os'].system('true') }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
]
FAILURES = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ (''|attr('__class__')|attr('__mro__'))[1] }}", "has no attribute '__mro__'"),
    ("{% if %}", "Expected an expression"),
    ("{% for m in messages %}", "Unexpected end of template"),
    ("{{ messages[7]['content'] }}", "has no element 7"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{% include 'x' %}", "no loader"),
    ("{{ 'a' + 1 }}", "can only concatenate str"),
    ("{{ range(10 ** 9) }}", "Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ("{{ undefined_function() }}", "'undefined_function' is undefined"),
]
JSON = "expected: a JSON object"


def write_template(directory: Path, text: str) -> Path:
    (directory / "chat_template.jinja").write_text(text)
    return directory


def test_no_tokenizer(command, copy: Path):
    (copy / "tokenizer.json").unlink()
    command("generate", copy, "hello").refused(
        f"{copy} has no tokenizer.json", "expected: a fast tokenizer saved by transformers",
        "to fix:   download tokenizer.json, or pass token ids instead of text")
    command("chat", copy).refused(f"{copy} has no tokenizer.json")


def test_token_ids_do_without_a_tokenizer(command, copy: Path, tiny: Path):
    request = ("--prompt-ids", "5,6,7", "--max-tokens", 4, "--temperature", 0, "--json")
    whole = command("generate", tiny, *request).succeeded()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"): (copy / name).unlink()
    bare = command("generate", copy, *request).succeeded()
    assert '"text": ""' in bare.out
    assert bare.out.partition('"text"')[0] == whole.out.partition('"text"')[0]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": {"type": "BPE"', b"\xff\xfe"])
def test_a_damaged_tokenizer(command, copy: Path, content: bytes):
    (copy / "tokenizer.json").write_bytes(content)
    command("generate", copy, "hello").refused(
        f"{copy / 'tokenizer.json'} cannot be read: ", "expected: a tokenizer.json of the tokenizers library",
        "to fix:   download the file again")


@pytest.mark.parametrize(("content", "found"), [
    ("{", "is not JSON: Expecting"), ("[]", "holds a list"), ("[" * 200_000, "is not JSON: maximum rec")],
    ids=["cut", "list", "deep"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_companion_of_the_tokenizer(command, copy: Path, file: str, content: str, found: str):
    (copy / file).write_text(content)
    command("generate", copy, "hello").refused(f"{copy / file} {found}", JSON, "download the file again")


def test_a_tokenizer_of_a_larger_vocabulary(command, spoil, copy: Path):
    path = copy / "model.safetensors"
    tensors = load_file(path)
    rows = {"model.embed_tokens.weight": 290, "lm_head.weight": 290}
    save_file({name: tensor[:rows.get(name)] for name, tensor in tensors.items()}, path)
    command("generate", spoil(vocab_size=290), "Once upon a time").refused(
        " is out of vocabulary", "expected: 0 to 289", "to fix:   use ids of this model's tokenizer")


def test_chat_without_a_template(command, spoil):
    command("chat", spoil("tokenizer_config.json", chat_template=...)).refused(
        "the model has no chat template",
        "expected: chat_template.jinja, or chat_template in tokenizer_config.json",
        "to fix:   use `generate` with a plain prompt")


def test_a_template_that_is_not_text(command, copy: Path):
    (copy / "chat_template.jinja").write_bytes(b"\xff")
    command("chat", copy).refused(f"{copy / 'chat_template.jinja'} cannot be read: ",
                                  "expected: a readable UTF-8 text file", "to fix:   download the file again")


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(command, copy: Path, text: str):
    command("chat", write_template(copy, text)).refused(
        "the chat template tried to leave its sandbox: ", "unsafe",
        "expected: a template that only formats messages", "treat its files as hostile")


@pytest.mark.parametrize(("text", "found"), FAILURES)
def test_a_template_that_fails(command, copy: Path, text: str, found: str,
                               monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "60")     # each ends by itself, also on a busy machine
    command("chat", write_template(copy, text)).refused(
        "the chat template failed: ", found, "expected: a template for messages with role and content",
        "to fix:   check chat_template.jinja or tokenizer_config.json")


def test_a_template_that_writes_nothing(command, copy: Path):
    command("chat", write_template(copy, "{# nothing #}")).refused(
        "the prompt has no tokens", "expected: at least one token id")


def test_a_template_writes_only_into_the_prompt(command, copy: Path, tmp_path: Path):
    """The helpers of transformers' templates are there, and no way to a file."""
    template = ("{{ messages | tojson }}{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}"
                "{{ cycler is defined and (open is not defined) and (os is not defined) }}")
    command("chat", write_template(copy, template), "--max-tokens", 1).succeeded()


# **** vocabulary files without tokenizer.json ****

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


# **** tokenizer.json that grows texts, matches for hours or ends the process ****

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
    ({"pre_tokenizer": split("((a{100}){100}){100}{100}b")}, r"'\(\(a\{100.* s for \d+ characters of 'a'"),
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
