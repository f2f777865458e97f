"""`run-batch`: a file of requests, answered as one batch, with errors a line."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.cli.run_batch import BODY_BYTES
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def line(name: Any, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_answers_are_in_order_and_errors_are_of_their_lines(command, tmp_path: Path):
    prompts = ("Once upon a time", "One day", "A fox")
    asked = [line("a", "/v1/completions", prompt=prompts[0], model="tales", **GREEDY), "nonsense",
             line("b", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], **GREEDY),
             line("c", "/v1/completions", prompt=prompts[1], **{**GREEDY, "max_tokens": 20}), "",
             line("d", "/v1/completions", prompt="x", model="another"), line(7, "/v1/completions",
                                                                             prompt="x"),
             line("e", "/v1/tokens", prompt="x"), line("f", "/v1/completions", prompt="x", stream=True),
             line("g", "/v1/completions", prompt=prompts[2], n=2, **GREEDY), line("h", "/v1/embeddings",
                                                                                  input="x")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(asked))
    done = command("run-batch", "-i", source, "-o", target).succeeded()
    assert done.err == "[10 requests · 6 failed]\n"
    found = [json.loads(text) for text in target.read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["a", None, "b", "c", "d", None, "e", "f", "g", "h"]
    assert [each["response"]["status_code"] for each in found] == [200, 400, 200, 200, 404, 400, 400, 400,
                                                                   200, 400]
    for each in found: assert (each["error"] is None) == (each["response"]["body"] is not None)
    texts = [found[at]["response"]["body"]["choices"][0]["text"] for at in (0, 3, 8)]
    llm = LLM(DEFAULT_MODEL)
    for prompt, text, most in zip(prompts, texts, (6, 20, 6), strict=True):
        assert text == llm.complete(prompt, SamplingParams(temperature=0, max_tokens=most,
                                                           ignore_eos=True)).text
    assert len(found[8]["response"]["body"]["choices"]) == 2
    assert found[2]["response"]["body"]["object"] == "chat.completion"
    for at, words in ((1, "line 2: the line is not JSON"), (4, "'another' is not served"), (5,
                                                                                            "custom_id is 7"),
                      (6, "url is '/v1/tokens'"), (7, "stream is true"), (9, "generates text")):
        assert words in found[at]["error"]["message"]


def test_lines_that_are_hostile_fail_alone(command, tmp_path: Path):
    def asked(name: str, **body: Any) -> bytes:
        return line(name, "/v1/completions", **{"prompt": "x", "max_tokens": 1, **body}).encode()
    lines = [b"\xef\xbb\xbf" + asked("first") + b"\r", b'{"custom_id": "deep", "body": ' + b"[" * 10**5,
             asked("\ud800"), asked("half", prompt="\ud800"), b'{"custom_id": "raw", "body": "\xff"}',
             asked("nan").replace(b": 1", b": NaN"), asked("digits").replace(b": 1", b": " + b"9" * 5000),
             asked("twice"), asked("twice"), asked("long", prompt="x" * (BODY_BYTES + 1)), asked("last")]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    command("run-batch", "-i", source, "-o", target).succeeded()
    found = [json.loads(text) for text in target.read_text().splitlines()]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in found] == [
        ("first", 200), ("deep", 400), ("\ud800", 200), ("half", 400), ("raw", 400), ("nan", 400),
        ("digits", 400), ("twice", 200), ("twice", 400), ("long", 400), ("last", 200)]
    for at, words in ((5, "NaN, which JSON has not"), (8, "is that of a line before"),
                      (9, "longer than is read")):
        assert words in found[at]["error"]["message"]


def test_embeddings_and_standard_streams(command, tiny: Path):
    asked = "\n".join([*(line(name, "/v1/embeddings", input=name) for name in ("a fox", "a bear")),
                       line("score", "/v1/score", text_1="a fox", text_2=["a fox", "a bear"]),
                       line("rerank", "/v1/rerank", query="a fox", documents=["a bear", "a fox"])])
    done = command("run-batch", "--model", tiny, "-i", "-", "-o", "-", "--task", "embed",
                   stdin=asked).succeeded()
    found = [json.loads(text) for text in done.out.splitlines()]
    assert [each["custom_id"] for each in found] == ["a fox", "a bear", "score", "rerank"]
    answers = [each["response"]["body"] for each in found]
    assert all(len(each["data"][0]["embedding"]) == 64 for each in answers[:2])
    scores = [each["score"] for each in answers[2]["data"]]
    assert scores[0] == pytest.approx(1)
    assert scores[1] < 0.99
    assert [each["index"] for each in answers[3]["results"]] == [1, 0]


def test_files_that_cannot_be_used(command, tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for each in (tmp_path / "none", tmp_path / "fifo", "/dev/zero", tmp_path):
        command("run-batch", "-i", each, "-o", "-").refused("cannot be read", "--input-file")
    (tmp_path / "in").write_text("{}")
    command("run-batch", "-i", tmp_path / "in", "-o", tmp_path / "no" / "out").refused("the system refused")
