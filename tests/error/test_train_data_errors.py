"""Training data that cannot be used: what was found, where, what is accepted, and what to do."""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, DataError, NVError, TokenizerError
from tinygrad_nv.models.tales.tokenizer import train_tokenizer
from tinygrad_nv.train.data import DataOptions, Loader, LoaderOptions, SamplerState, load, token_cache

VOCAB = 300
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
FIELDS = 'expected: "text"; "prompt" and "completion"; "messages"; or "chosen" and "rejected"'


def tokens(template: str | None = None, **special: str) -> Tokenizer:
    return Tokenizer(train_tokenizer(["a fox lived"] * 4, VOCAB), special, template)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path / "cache"))


def refused(paths: Any, *words: str, error: type[NVError] = DataError, tokenizer: Tokenizer | None = None,
            vocab: int = VOCAB, **options: Any) -> None:
    """Loading, and reading of all rows, is refused with these words."""
    tokenizer = tokenizer or tokens(eos_token="<|eos|>")
    with pytest.raises(error) as raised:
        read(paths if isinstance(paths, list) else [paths], tokenizer, vocab, DataOptions(**options))
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def read(paths: Any, tokenizer: Tokenizer, vocab: int, options: DataOptions) -> None:
    data = load(paths, tokenizer, vocab, options)
    for index in range(len(data)): data.rows(index)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# **** files ****

def test_no_file(tmp_path: Path):
    refused([], "no training data was named",
            "expected: files (.txt, .jsonl, .parquet, .npy, .bin), directories or globs")
    refused(tmp_path / "none.txt", f"{tmp_path / 'none.txt'} does not exist",
            "expected: a file, a directory or a glob", "to fix:   check the path")
    refused(tmp_path / "*.txt", f"{tmp_path / '*.txt'} matches no training data", "check the pattern")
    (tmp_path / "a.csv").write_text("a")
    refused(tmp_path / "a.csv", f"{tmp_path / 'a.csv'} is of no known kind",
            "expected: .txt, .jsonl, .parquet, .npy, .bin")
    refused(tmp_path, f"{tmp_path} has no training data", "files with the suffixes .txt, .jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.npy", "a.bin"])
def test_an_empty_file(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    refused(tmp_path / name, f"{tmp_path / name} is empty", "remove the file, or name another")


def test_files_without_records(tmp_path: Path):
    (tmp_path / "a.txt").write_text(" \n\n")
    refused(tmp_path / "a.txt", "a.txt has only white space")
    refused(lines(tmp_path / "b.jsonl", "", "  "), "the training data has no records", FIELDS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy", "a.bin"])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str):
    (tmp_path / name).write_text("x" * 300)
    (tmp_path / name).chmod(0)
    refused(tmp_path / name, f"{tmp_path / name} cannot be read: Permission denied", "check its permissions")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.npy", "a.bin"])
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    (tmp_path / name).write_text("x" * 300)
    def fail(*ignored: Any, **options: Any) -> None: raise OSError(5, "Input/output error")
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(np, "load", fail)
    refused(tmp_path / name, f"{tmp_path / name} cannot be read: Input/output error",
            "check its permissions and the disk")


def test_text_beside_token_ids(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    np.save(tmp_path / "b.npy", np.arange(9, dtype=np.uint16))
    refused(tmp_path, f"{tmp_path / 'a.txt'} is text and {tmp_path / 'b.npy'} is token ids",
            "expected: files of one kind")


def test_text_that_is_not_utf8(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    refused(tmp_path / "a.txt", f"{tmp_path / 'a.txt'} is not UTF-8, at byte 2", "convert the file to UTF-8")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    refused(tmp_path / "a.jsonl", "a.jsonl, line 2 is not UTF-8, at byte 10")


# **** lines ****

@pytest.mark.parametrize(("line", "words"), [
    ("{'text': 1}", "is not JSON: Expecting property name"), ('{"text": "a"', "is not JSON"),
    ("[" * 99_999, "is not JSON"), ("[1]", "holds a list"), ("7", "holds a number"), ("{}", "has no fields"),
    ('{"txt": "a", "n": 1}', "has 'txt', 'n'"),
    ('{"prompt": "a"}', "has 'prompt'"), ('{"prompt": "a", "chosen": "b"}', "has 'prompt', 'chosen'")])
def test_a_line_that_is_no_record(tmp_path: Path, line: str, words: str):
    path = lines(tmp_path / "a.jsonl", {"text": "a"}, "", line)
    refused(path, f"{path}, line 3 {words}", "expected: ")


@pytest.mark.parametrize(("row", "words"), [
    ({"text": 5}, '"text" holds a number'), ({"text": None}, '"text" holds null'),
    ({"messages": "hello"}, '"messages" holds a string'), ({"messages": []}, '"messages" has no messages'),
    ({"messages": [USER, {"content": "a"}]}, '"messages"[1] is no message'),
    ({"messages": ["a"]}, '"messages"[0] is no message'),
    ({"prompt": "a", "completion": 7}, '"completion" holds a number'),
    ({"prompt": "a", "completion": [ANSWER]}, "texts beside lists of messages"),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": "b"}, "texts beside lists of messages"),
    ({"chosen": "a", "rejected": [ANSWER]}, '"chosen" holds a string, "rejected" a list'),
    ({"chosen": "a b", "rejected": "a b"}, "chosen and rejected are equal"),
    ({"chosen": [USER], "rejected": [USER, ANSWER]}, '"chosen" has no messages'),
    ({"text": "\ud800"}, '"text" has half of a surrogate pair'),
    ({"messages": [{"role": "user", "content": "\ud800"}, ANSWER]},
     '"messages" has half of a surrogate pair')])
def test_fields_of_another_type(tmp_path: Path, row: Any, words: str):
    path = lines(tmp_path / "a.jsonl", row)
    refused(path, f"{path}, line 1: {words}", "expected: ", "to fix: ")


def test_records_of_two_kinds(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "a"}, {"messages": [USER, ANSWER]})
    refused(path, f"{path}, line 2: the record is messages, and {path}, line 1 is text",
            "expected: records of one kind")
    path = lines(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"},
                 {"prompt": [USER], "completion": [ANSWER]})
    refused(path, "line 2: the record is prompt-completion of messages, and "
            f"{path}, line 1 is prompt-completion")


def test_nothing_is_kept_of_data_that_is_refused(tmp_path: Path):
    refused(lines(tmp_path / "a.jsonl", *[{"text": "a"}] * 600, "no"), "line 601 is not JSON")
    assert [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()] == []


# **** Parquet ****

def test_pyarrow_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_text("PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(tmp_path / "a.parquet", f"{tmp_path / 'a.parquet'} is Parquet, and pyarrow is not installed",
            "expected: the package pyarrow", "pip install 'tinygrad-nv[train]'")


def test_a_damaged_parquet_file(tmp_path: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    refused(path, f"{path} is not Parquet: ", "download or write the file again")
    parquet.write_table(arrow.table({"body": ["a"]}), path)
    refused(path, f"{path}, row 1 has 'body'", FIELDS)


# **** token ids ****

@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
def test_an_id_beyond_the_vocabulary(tmp_path: Path, name: str):
    ids = np.arange(40, dtype=np.uint16)
    ids[25] = 300
    if name == "a.npy": np.save(tmp_path / name, ids)
    else: ids.tofile(tmp_path / name)
    refused(tmp_path / name, f"{tmp_path / name} has id 300 as token 25",
            "expected: 0 to 299, the vocabulary of the model",
            "use the tokenizer of the model, or set --shard-dtype", max_length=10)


def test_an_id_beyond_the_vocabulary_reaches_the_loop(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.full(40, -1, np.int32))
    data = load([tmp_path / "a.npy"], None, VOCAB, DataOptions(max_length=10))
    with Loader(data, LoaderOptions(rows=2)) as loader, pytest.raises(DataError, match="has id -1 as token"):
        next(loader)


@pytest.mark.parametrize(("array", "words"), [
    (np.zeros((4, 5), np.uint16), "holds uint16 [4, 5]"), (np.zeros(9, np.float32), "holds float32 [9]"),
    (np.array(3), "holds int64 []")])
def test_an_array_that_holds_no_token_ids(tmp_path: Path, array: np.ndarray, words: str):
    np.save(tmp_path / "a.npy", array)
    refused(tmp_path / "a.npy", f"{tmp_path / 'a.npy'} {words}",
            "expected: token ids, uint16 or uint32, of one dimension")


def test_damaged_files_of_token_ids(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(90, np.uint16))
    os.truncate(tmp_path / "a.npy", 150)
    refused(tmp_path / "a.npy", f"{tmp_path / 'a.npy'} is not an array of numpy: ", "write the file again")
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    refused(tmp_path / "a.npy", "is not an array of numpy: Array can't be memory-mapped")
    (tmp_path / "a.bin").write_bytes(bytes(101))
    refused(tmp_path / "a.bin", f"{tmp_path / 'a.bin'} has 101 bytes", "a multiple of 2: ids are uint16",
            "or set --shard-dtype")
    refused(tmp_path / "a.bin", "a multiple of 4: ids are uint32", vocab=70_000)
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 9
    (tmp_path / "a.bin").write_bytes(head.tobytes() + bytes(16))
    refused(tmp_path / "a.bin", "has 1040 bytes", "expected: 1042 bytes, for the 9 tokens of its header")


def test_files_shorter_than_a_window(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(9, np.uint16))
    refused(tmp_path / "a.npy", f"{tmp_path / 'a.npy'} has 9 tokens",
            "expected: 10 or more, the length of a window", "lower --max-length", max_length=10)
    np.save(tmp_path / "b.npy", np.zeros(5, np.uint16))
    refused(tmp_path, "the longest of 2 files has 9 tokens", max_length=10)


# **** tokenizers and templates ****

def test_no_tokenizer(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    with pytest.raises(DataError, match="is text, and there is no tokenizer"): load([path], None, VOCAB)
    np.save(tmp_path / "a.npy", np.zeros(99, np.uint16))
    with pytest.raises(DataError, match="--packing of token ids, and there is no tokenizer"):
        load([tmp_path / "a.npy"], None, VOCAB, DataOptions(packing=True, max_length=9))


def test_a_tokenizer_without_eos(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    refused(path, "the tokenizer has no eos_token", "expected: the token that ends a document",
            "set eos_token in tokenizer_config.json, or pass --eos-token", error=TokenizerError,
            tokenizer=tokens())
    refused(path, "the tokenizer has no token '<end>'", error=TokenizerError, eos_token="<end>")


def test_a_tokenizer_of_a_larger_vocabulary(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": "zz"})
    refused(path, f"{path}, line 1: the tokenizer gives id ", "expected: 0 to 9, the vocabulary of the model",
            vocab=10)


def test_no_template(tmp_path: Path):
    path = lines(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    refused(path, f"{path}, line 1: the model has no chat template")


FAILING = "{% if messages | length > 2 %}{{ raise_exception('roles must alternate') }}{% endif %}"
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.mark.parametrize(("template", "messages", "words"), [
    (FAILING + PLAIN, [USER, ANSWER, USER], "the chat template failed: roles must alternate"),
    (PLAIN, [USER, USER], "the conversation has no text of the assistant"),
    ("{% generation %}{% endgeneration %}" + PLAIN, [USER, ANSWER],
     "the conversation has no text of the assistant"),
    # the number of messages is written first: no beginning agrees
    ("{{ messages | length }}" + PLAIN, [USER, ANSWER],
     "the chat template renders the messages before message 2 otherwise alone than in the conversation"),
    # the last message is written otherwise than the ones before
    (PLAIN.replace("m['content'] +", "(m['content'] if loop.last else m['content'] | upper) +"),
     [ANSWER, ANSWER],
     "the chat template renders the messages up to message 1 otherwise alone than in the conversation"),
    # so it is here, and the end-of-turn token that comes first is the user's
    ("{% for m in messages %}{{ m['content'] | upper if not loop.last else m['content'] }}"
     "{{ eos_token if loop.last or m['role'] == 'user' }}{% endfor %}", [ANSWER, USER, ANSWER],
     "the chat template renders the messages up to message 1 otherwise alone than in the conversation")])
def test_a_template_whose_answers_cannot_be_found(tmp_path: Path, template: str, messages: Any, words: str):
    path = lines(tmp_path / "a.jsonl", {"messages": messages})
    refused(path, f"{path}, line 1: ", words, "expected: ", "to fix: ",
            tokenizer=tokens(template, eos_token="<|eos|>"))


def test_the_way_out_of_a_template_whose_beginnings_differ(tmp_path: Path):
    refused(lines(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]}),
            "a template with {% generation %} marks, or one whose prefixes agree",
            "add {% generation %} and {% endgeneration %} to the template",
            tokenizer=tokens("{{ messages | length }}" + PLAIN, eos_token="<|eos|>"))


def test_tools_that_are_not_json(tmp_path: Path):
    refused(lines(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], "tools": "{"}),
            'line 1: "tools" is not JSON', tokenizer=tokens(PLAIN, eos_token="<|eos|>"))


# **** options, room, resuming ****

@pytest.mark.parametrize(("options", "words"), [
    ({"max_length": 1}, "--max-length 1"),
    ({"packing_strategy": "ffd"}, "--packing-strategy ffd\n  expected: bfd, bfd_split, wrapped"),
    ({"overflow": "drop"}, "--overflow drop\n  expected: auto, truncate, split"),
    ({"sample_by": "page"}, "--sample-by page\n  expected: document, paragraph, line"),
    ({"shard_dtype": "int8"}, "--shard-dtype int8\n  expected: auto, uint16, uint32")])
def test_options(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as raised: DataOptions(**options)
    assert words in str(raised.value)


def test_options_of_the_loader():
    with pytest.raises(ConfigError, match="rows of batches is 0"): LoaderOptions(rows=0)
    with pytest.raises(ConfigError, match="rank 2 of 2"): LoaderOptions(rows=1, rank=2, world=2)
    with pytest.raises(ConfigError, match="--seed -1"): LoaderOptions(rows=1, seed=-1)


def test_answers_beyond_the_length(tmp_path: Path):
    refused(lines(tmp_path / "a.jsonl", {"prompt": "a fox " * 50, "completion": "b"}),
            "no document has a token with loss in its first 16 tokens", "raise --max-length", max_length=16)
    refused(lines(tmp_path / "a.jsonl", {"prompt": "a fox " * 50, "chosen": "b", "rejected": "c"}),
            "no pair has answers in its first 16 tokens", "prompts shorter than --max-length", max_length=16)


def test_no_room_for_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(self: Any, document: Any) -> None: raise OSError(28, "No space left on device")
    monkeypatch.setattr(token_cache.Writer, "add", full)
    refused(lines(tmp_path / "a.jsonl", {"text": "a"}),
            f"tokens cannot be kept in {tmp_path / 'cache' / 'tokens'}: No space left on device",
            "make room, or set NV_CACHE_DIR to another directory")
    assert not list((tmp_path / "cache" / "tokens").glob("*.*[!k]"))


@pytest.mark.parametrize("state", [
    None, [], {}, {"epoch": 0, "offset": 0, "seed": 1}, {"epoch": 0, "offset": -1, "seed": 1, "rows": 9},
    {"epoch": "0", "offset": 0, "seed": 1, "rows": 9}, {"epoch": True, "offset": 0, "seed": 1, "rows": 9}])
def test_a_state_that_is_none(state: Any):
    with pytest.raises(DataError) as raised: SamplerState.from_json(state)
    assert "the sampler's state is " in str(raised.value)
    assert "integers from 0 on: epoch, offset, seed, rows" in str(raised.value)


@pytest.mark.parametrize(("state", "words"), [
    (SamplerState(0, 0, 42, 5), "the checkpoint is of 5 rows, this run of 4 rows"),
    (SamplerState(0, 0, 7, 4), "the checkpoint is of seed 7, this run of seed 42"),
    (SamplerState(0, 4, 42, 4), "the checkpoint is at row 4 of 4")])
def test_a_state_of_other_data(tmp_path: Path, state: SamplerState, words: str):
    np.save(tmp_path / "a.npy", np.zeros(40, np.uint16))
    data = load([tmp_path / "a.npy"], None, VOCAB, DataOptions(max_length=10))
    with pytest.raises(DataError) as raised: Loader(data, LoaderOptions(rows=1), state)
    assert words in str(raised.value)


def test_fewer_rows_than_a_batch(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros(40, np.uint16))
    data = load([tmp_path / "a.npy"], None, VOCAB, DataOptions(max_length=10))
    with pytest.raises(DataError) as raised: Loader(data, LoaderOptions(rows=5, drop_last=True))
    assert "4 rows, and 5 in a batch" in str(raised.value)
    assert "leave --dataloader-drop-last out" in str(raised.value)
