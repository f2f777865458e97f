"""Tokens on disk: tokenized once, keyed by all that decides them, whole or not there at all."""
from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.train.data import DataOptions, dataset, load
from tinygrad_nv.train.data.encode import Encoded, Encoder
from tinygrad_nv.train.data.token_cache import Writer, hash_file, open_cached

TEXTS = [{"text": f"a fox {number}"} for number in range(5)]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each call of the encoder had."""
    counts, encode = list[int](), Encoder.encode
    def counted(self: Encoder, records: Any) -> Any:
        counts.append(len(records))
        return encode(self, records)
    monkeypatch.setattr(Encoder, "encode", counted)
    return counts


def rows(data: Any) -> list[list[int]]:
    return [row.ids.tolist() for index in range(len(data)) for row in data.rows(index)]


def test_tokenized_once(write, tokenizer, encoded: list[int]):
    path = write("a.jsonl", TEXTS)
    first = load([path], tokenizer, 320)
    path.rename(path.with_name("moved.jsonl"))      # content counts, not the name
    again = load([path.with_name("moved.jsonl")], tokenizer, 320, DataOptions(max_length=9, packing=True))
    assert encoded == [5]
    assert rows(first) == [tokenizer.encode(text["text"] + "<|eos|>") for text in TEXTS]
    assert sorted(token for row in rows(again) for token in row) == sorted(
        token for row in rows(first) for token in row[:9])


@pytest.mark.parametrize("change", ["content", "template", "special", "eos", "mask", "vocabulary"])
def test_what_decides_tokens_is_in_the_key(write, with_template, encoded: list[int], change: str):
    path, (tokenizer, _) = write("a.jsonl", TEXTS), with_template("")
    load([path], tokenizer, 320)
    options, vocab = DataOptions(), 320
    if change == "content": write("a.jsonl", [*TEXTS[:4], {"text": "a fix 4"}])
    if change == "template": tokenizer = with_template("x")[0]
    if change == "special": tokenizer = type(tokenizer)(tokenizer.backend, {"eos_token": "<|end|>"}, "")
    if change == "eos": options = DataOptions(eos_token="<|end|>")
    if change == "mask": options = DataOptions(completion_only_loss=False)
    if change == "vocabulary": vocab = 330
    load([path], tokenizer, vocab, options)
    assert encoded == [5, 5]


def test_names_of_files_that_end_in_two_ways_are_apart(tmp_path: Path):
    for name in ("a.txt", "a.jsonl"): (tmp_path / name).write_text('{"text": "a"}')
    assert hash_file([tmp_path / "a.txt"]) != hash_file([tmp_path / "a.jsonl"])
    assert hash_file([tmp_path / "a.txt"] * 2) != hash_file([tmp_path / "a.txt"])


def document(count: int, loss: bool = False) -> Encoded:
    mask = np.arange(count) % 2 == 0 if loss else None
    return Encoded(np.arange(count), mask)


@pytest.mark.parametrize("loss", [(False, False, False), (True, True, True), (False, True, False),
                                  (False, False, True)])
def test_documents_are_read_as_they_were_written(write, loss: tuple[bool, ...]):
    documents = [document(count, each) for count, each in zip((3, 0, 5), loss, strict=True)]
    def add(writer: Writer) -> None:
        for each in documents: writer.add(each)
    first = open_cached("k", 70_000, add)
    for tokens in (first, open_cached("k", 70_000, lambda writer: pytest.fail("written again"))):
        assert tokens.lengths.tolist() == [3, 0, 5]
        assert tokens.ids.dtype == np.uint32
        assert (tokens.loss is None) is not any(loss)
        for number, each in enumerate(documents):
            ids, mask = tokens.piece(number, 0, len(each.ids))
            assert ids.tolist() == each.ids.tolist()
            expected = np.ones(len(each.ids), bool) if each.loss is None else each.loss
            assert mask is None or mask.tolist() == expected.tolist()


def keys(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())


def test_what_fails_leaves_nothing(write, tmp_path: Path):
    def fail(writer: Writer) -> None:
        writer.add(document(3))
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): open_cached("k", 320, fail)
    assert keys(tmp_path) == []


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "facts.json"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_directory_is_written_again(write, tmp_path: Path, tokenizer, encoded: list[int], name: str,
                                              damage: str):
    path = write("a.jsonl", TEXTS)
    expected = rows(load([path], tokenizer, 320))
    (key,) = keys(tmp_path)
    file = tmp_path / "cache" / "tokens" / key / name
    if damage == "missing": file.unlink()
    else: os.truncate(file, file.stat().st_size // 2)
    assert rows(load([path], tokenizer, 320)) == expected
    assert encoded == [5, 5]
    assert keys(tmp_path) == [key]


def killed(directory: str) -> None:
    os.environ["NV_CACHE_DIR"] = directory
    def die(writer: Writer) -> None:
        writer.add(document(3))
        os._exit(9)
    open_cached("k", 320, die)


def counted(directory: str, written: Any, together: Any) -> None:
    os.environ["NV_CACHE_DIR"] = directory
    def add(writer: Writer) -> None:
        with written.get_lock(): written.value += 1
        time.sleep(0.2)     # the others are there by now
        for _ in range(500): writer.add(document(30))
    together.wait(20)
    assert len(open_cached("k", 320, add).ids) == 15_000


def test_processes_that_end_or_come_together(write, tmp_path: Path):
    """One that is killed while it writes leaves no tokens, and no lock; of several, one writes."""
    context = multiprocessing.get_context("fork")
    first = context.Process(target=killed, args=(str(tmp_path / "cache"),))
    first.start()
    first.join()
    assert first.exitcode == 9
    written, together = context.Value("i", 0), context.Barrier(3)
    several = [context.Process(target=counted, args=(str(tmp_path / "cache"), written, together))
               for _ in range(3)]
    for each in several: each.start()
    for each in several: each.join()
    assert ([each.exitcode for each in several], written.value) == ([0, 0, 0], 1)


def test_progress_is_told_in_bytes(write, tokenizer, monkeypatch: pytest.MonkeyPatch):
    path, seen = write("a.jsonl", TEXTS), list[tuple[int, int]]()
    import contextlib
    monkeypatch.setattr(dataset.progress, "bar", lambda words: contextlib.nullcontext(
        lambda done, count: seen.append((done, count))))
    load([path], tokenizer, 320)
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert len(seen) == 5
