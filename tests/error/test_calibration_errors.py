"""Text to calibrate with that cannot be used, and options that do not go together."""
from __future__ import annotations

from pathlib import Path

import pytest

WORDS = "--scheme", "gptq", "--group-size", "32"


@pytest.mark.parametrize(("name", "content", "found"), [
    ("a.txt", b"", "a.txt is empty"), ("a.txt", b" \n\n", "a.txt is empty"),
    ("a.txt", b"fox \xff", "a.txt is not UTF-8, at byte 4"), ("a.jsonl", b"\n", "a.jsonl is empty"),
    ("a.jsonl", b'{"text": "fox"}\nfox', "a.jsonl, line 2: no JSON"),
    ("a.jsonl", b'{"prompt": "fox"}', 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("a.jsonl", b'{"text": ""}', 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("a.jsonl", b"[1]", 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("none.txt", None, "none.txt cannot be read: No such file or directory")])
def test_text_that_cannot_be_used(command, tiny: Path, tmp_path: Path, name: str, content: bytes | None,
                                  found: str):
    path = tmp_path / name
    if content is not None: path.write_bytes(content)
    command("quantize", tiny, "--out", tmp_path / "made", *WORDS, "--calibration", path).refused(
        found, 'expected: text, or JSONL with "text" or "messages" in each line',
        "to fix:   name another file")
    assert not list(tmp_path.glob("made*"))


def test_a_model_without_a_tokenizer(command, copy: Path, tmp_path: Path):
    (copy / "tokenizer.json").unlink()
    command("quantize", copy, "--out", tmp_path / "made", *WORDS).refused("has no tokenizer.json")


@pytest.mark.parametrize(("words", "found", "fix"), [
    (("--scheme", "w4a16", "--method", "obq"), "method 'obq'", "change --method"),
    (("--scheme", "fp8", "--method", "gptq"), "method gptq of scheme fp8", "change --method or --scheme"),
    (("--scheme", "w4a16", "--method", "smoothquant"), "method smoothquant of scheme w4a16",
     "change --method or --scheme"),
    (("--scheme", "awq", "--act-order", "group"), "an order of columns in method awq",
     "leave --act-order out"),
    (("--scheme", "gptq", "--act-order", "size"), "act-order 'size'", "change --act-order"),
    (("--scheme", "w4a16", "--method", "gptq", "--act-order", "group"),
     "act-order group in format compressed-tensors", "change --act-order to weight, or --format to gptq"),
    (("--scheme", "gptq", "--smoothing", "0.5"), "smoothing in method gptq", "leave --smoothing out"),
    (("--scheme", "w8a8", "--method", "smoothquant", "--smoothing", "1.5"), "smoothing 1.5",
     "change --smoothing"),
    (("--scheme", "w4a16", "--static"), "static scales of inputs in scheme w4a16", "leave --static out"),
    (("--scheme", "gptq", "--group-size", "48"), "columns, in groups of 48", "choose another --group-size"),
    (("--scheme", "gptq", "--samples", "0"), "0 sequences of 512 tokens", "change --samples or --length"),
    (("--scheme", "gptq", "--length", "1"), "sequences of 1 tokens", "change --samples or --length")])
def test_what_does_not_go_together(command, tiny: Path, tmp_path: Path, words: tuple[str, ...], found: str,
                                   fix: str):
    command("quantize", tiny, "--out", tmp_path / "made", *words).refused(found, f"to fix:   {fix}")
    assert not list(tmp_path.glob("made*/config.json"))
