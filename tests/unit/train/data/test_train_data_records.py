"""Records of files: kinds, texts, prompts that pairs share, files of paths."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.train.data.files import find
from tinygrad_nv.train.data.records import record, records

USER, ONE, TWO = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"),
                                                                      ("assistant", "b")))


@pytest.mark.parametrize(("row", "kind", "chat"), [
    ({"text": "a", "more": 1}, "text", False), ({"messages": [USER, ONE]}, "messages", True),
    ({"prompt": "a", "completion": "b"}, "prompt-completion", False),
    ({"prompt": [USER], "completion": [ONE]}, "prompt-completion", True),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False),
    ({"prompt": [USER], "chosen": [ONE], "rejected": [TWO]}, "preference", True),
    ({"messages": [USER], "prompt": "a", "completion": "b", "text": "c"}, "prompt-completion", False)])
def test_what_a_record_is(row: dict[str, Any], kind: str, chat: bool):
    made = record(row, "here")
    assert (made.kind, made.is_chat) == (kind, chat)


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), [
    ("The sky is blue.", "The sky is green.", "The sky is"), ("ab", "ac", "a"), ("x", "y", ""),
    ("The sky", "The sky is", "The sky"), ([USER, ONE], [USER, TWO], [USER])])
def test_the_prompt_that_a_pair_shares(chosen: Any, rejected: Any, prompt: Any):
    fields = record({"chosen": chosen, "rejected": rejected}, "here").fields
    assert fields["prompt"] == prompt
    assert (prompt + fields["chosen"], prompt + fields["rejected"]) == (chosen, rejected)


@pytest.mark.parametrize(("sample_by", "texts"), [
    ("document", ["one\ntwo\n\nthree\n"]), ("paragraph", ["one\ntwo", "three"]),
    ("line", ["one", "two", "three"])])
def test_documents_of_a_text_file(tmp_path: Path, sample_by: Any, texts: list[str]):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    found = list(records([tmp_path / "a.txt"], sample_by))
    assert [each.fields["text"] for each in found] == texts
    lines = {"document": [""], "paragraph": [", line 1", ", line 4"],
             "line": [", line 1", ", line 2", ", line 4"]}
    assert [each.place.removeprefix(str(tmp_path / "a.txt")) for each in found] == lines[sample_by]


def test_empty_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    found, read = list(records([tmp_path / "a.jsonl"])), []
    assert [(each.fields["text"], each.place[-6:]) for each in found] == [("a", "line 1"), ("b", "line 4")]
    list(records([tmp_path / "a.jsonl"], read=read.append))
    assert sum(read) == (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize("rows", [
    [{"text": "a"}, {"text": "é😀"}], [{"messages": [USER, ONE], "tools": [{"type": "function"}]},
                                       {"messages": [{**USER, "name": "x"}, TWO]}]])
def test_parquet_has_the_records_of_json_lines(tmp_path: Path, rows: list[dict[str, Any]]):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = rows * 1500
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read: list[int] = []
    assert [each.fields for each in records([tmp_path / "a.parquet"], read=read.append)] == rows
    size = (tmp_path / "a.parquet").stat().st_size
    assert size - 3 <= sum(read) <= size


def test_files_of_paths(tmp_path: Path):
    for name in ("b.txt", "a.jsonl", "in/c.txt", "in/d.md", ".hidden/e.txt", "in/.f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    def names(*paths: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in find([tmp_path / path for path in paths])]
    assert names(".") == ["a.jsonl", "b.txt", "in/c.txt"]
    assert names("*.txt", ".") == ["b.txt", "a.jsonl", "in/c.txt"]
    assert names("**/*.txt") == ["b.txt", "in/c.txt"]
    assert names("in/c.txt", "a.jsonl") == ["in/c.txt", "a.jsonl"]
    (tmp_path / "odd[1].txt").write_text("a")
    assert names("odd[1].txt") == ["odd[1].txt"]


def test_a_long_file_is_read_line_by_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(9)) + "not JSON\n")
    found = records([path])
    assert [next(found).fields["text"] for _ in range(9)] == list("012345678")
