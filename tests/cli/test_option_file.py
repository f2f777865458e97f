"""`--config FILE` of commands that load a model, numbers and files that cannot be, and `run-batch`."""
from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv import cli
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.cli.run_batch import BODY_BYTES
from tinygrad_nv.engine.command_line import llm_arguments
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.numerics.replay import record

FILE = """
model: org/model
served-model-name: [a, b]
port: 1234
max_model_len: 4k
kv-cache-dtype: fp8
enable-prefix-caching: false
enable-sleep-mode: true
enable-expert-parallel: false
allowed-origins: ["https://x"]
speculative_config: {method: ngram, num_speculative_tokens: 3}
api-key: secret
quantization: null
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return path


def test_a_file_sets_options_of_every_kind(file: Path):
    made = cli.parse_arguments(["serve", "--config", str(file)])
    assert (made.named, made.model, made.port) == ("org/model", None, 1234)
    assert made.served_model_name == ["a", "b"]
    assert (made.api_key, made.allowed_origins, made.enable_sleep_mode) == (["secret"], ("https://x",), True)
    given = llm_arguments(made)
    assert (given["max_model_len"], given["kv_cache_dtype"]) == (4000, "fp8")
    assert (given["enable_prefix_caching"], given["enable_expert_parallel"]) == (False, False)
    assert given["speculative_config"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert "quantization" not in given


def test_the_command_line_wins(file: Path):
    made = cli.parse_arguments(["serve", "DIR", f"--config={file}", "--port", "5", "--max-model=7",
                                "--api-key", "my",
                       "--enable_prefix_caching"])
    assert (made.model, made.named, made.port, made.max_model_len) == ("DIR", None, 5, 7)
    assert (made.api_key, made.enable_prefix_caching) == (["my"], True)
    assert made.served_model_name == ["a", "b"]


def test_other_commands_take_engine_options_and_files(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text('{"model": "M", "kv_cache_dtype": "int8", "input_file": "in", "stop": ["a", "-b"]}')
    made = cli.parse_arguments(["run-batch", "-o", "out", "--config=" + _without(path, "stop")])
    assert (made.input_file, made.named, made.kv_cache_dtype) == ("in", "M", "int8")
    made = cli.parse_arguments(["generate", "--config=" + _without(path, "input_file"), "--", "-p"])
    assert (made.words, made.named, made.stop) == (["-p"], "M", ["a", "-b"])
    for words in (["generate", "x"], ["chat"], ["run-batch", "-i", "a", "-o", "b"], ["serve"],
                  *(["bench", kind] for kind in ("speed", "latency", "throughput", "serve"))):
        made = cli.parse_arguments([*words, "--kv_cache_dtype", "fp8", "--speculative-config",
                           '{"method": "ngram", "num_speculative_tokens": 2}', "--max-model-len", "1k",
                           "--max-num-seqs", "3", "--swap-space", "1", "--block-size", "32",
                           "--enforce-eager"])
        given = llm_arguments(made)
        assert (given["kv_cache_dtype"], given["max_model_len"], given["max_num_seqs"]) == ("fp8", 1000, 3)
        assert (given["block_size"], given["speculative_config"]["method"]) == (32, "ngram")


def _without(path: Path, name: str) -> str:
    made = path.with_name(f"without-{name}.json")
    found = json.loads(path.read_text())
    made.write_text(json.dumps({key: each for key, each in found.items() if key != name}))
    return str(made)


@pytest.mark.parametrize(("text", "words"), [
    ("portt: 1", "unknown option portt"), ("portt: 1", "did you mean --port?"),
    ("config: other.yaml", "unknown option config"), ("- port", "is a list"), ("port: [1", "YAML"),
    ("enable-sleep-mode: 3", "true or false"), (None, "cannot be read"),
    ("port: &a [*a]", "aliases written out"), ("port: 1\n" * 40_000, "at most 262144 are read"),
    ("".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)),
     "more than 65536 values"), ("port: " + "[" * 5000, "recursion")])
def test_a_file_that_is_refused(tmp_path: Path, text: str | None, words: str):
    path = tmp_path / "serve.yaml"
    if text is not None: path.write_text(text)
    with pytest.raises(ConfigError) as caught: cli.parse_arguments(["serve", "--config", str(path)])
    assert words in str(caught.value)


def test_a_value_that_is_refused_shows_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "serve.yaml"
    path.write_text("port: many")
    with pytest.raises(SystemExit): cli.parse_arguments(["serve", "--config", str(path)])
    assert "tinygrad-nv serve: error: argument --port: 'many' is not a port" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench", "serve"], ["serve"], ["ptx", "time"]])
def test_an_unknown_option_shows_its_usage(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit): cli.parse_arguments([*words, *["x.ptx"] * (words[0] == "ptx"),
                                                         "--nonsense"])
    assert capsys.readouterr().err.startswith(f"usage: tinygrad-nv {' '.join(words)} ")


LONG = "9" * 3000
HEAD = {"format": "tinygrad_nv run", "version": 1, "seed": 0, "versions": {}, "settings": {}, "inputs": "",
        "inputs_hash": ""}


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf", "1e308", LONG, "9" * 5000, "", "x",
                                   "\udcff\udcfe", "1.5", "0x10", "٣", str((1 << 63) - 1)])
def test_sizes_of_the_cache_that_cannot_be(command: Any, tiny: Path, value: str) -> None:
    for option in ("--block-size", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"):
        done = command("generate", tiny, "hi", "--max-tokens", "1", f"{option}={value}")
        assert done.code == 2, done
        assert len(done.err) < 1500
        assert "Traceback" not in done.err


def test_long_values_are_quoted_in_part(command: Any, tiny: Path) -> None:
    for words in (("generate", tiny, "hi", "--temperature", LONG * 3), ("generate", tiny, "hi", "--n", LONG),
                  ("generate", tiny, "hi", "--speculative", f"ngram:{LONG}"), ("serve", "--port", LONG * 2),
                  ("tune", LONG, "64", "64"), ("generate", "/" + "x" * 5000, "hi")):
        done = command(*words)
        assert done.code == 2, done
        assert max(map(len, done.err.split())) < 700, words


FILES: dict[str, bytes] = {"deep": b"[" * 100_000, "nan": b'{"format": NaN}', "digits": b"9" * 5000,
                           "utf8": b"\xff\xfe{}", "empty": b"", "list": b"[1]", "zeros": bytes(1000)}


@pytest.mark.parametrize("words", [("tune", "--merge"), ("tune", "--import"), ("replay",)])
def test_files_that_are_none(command: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """None is waited for or read without an end."""
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "sparse").open("wb") as sparse: sparse.truncate(1 << 40)
    for name, data in FILES.items(): (tmp_path / name).write_bytes(data)
    for path in ("/dev/zero", tmp_path, tmp_path / "fifo", tmp_path / "sparse", tmp_path / "none",
                 *(tmp_path / name for name in FILES)):
        done = command(*words, path)
        assert (done.code, done.out) == (2, ""), (path, done)
        assert "Traceback" not in done.err
        assert len(done.err) < 2000, path


@pytest.mark.parametrize(("what", "words"), [
    ({"function": "os:mkdir", "arguments": ["made"]}, "--run-function"),
    ({"function": 5}, "--run-function"), ({"command": 5}, "a list of words"),
    ({"command": ["generate", "hi", "--trace", "made"]}, "generate --trace, which would write files"),
    ({"command": ["generate", "hi", "--record=made"]}, "generate --record, which would write files"),
    ({"command": ["generate", "hi", "--unknown"]}, "words that generate takes"),
    ({"command": []}, "one of generate")])
def test_a_log_runs_no_function_and_writes_no_file(command: Any, tmp_path: Path, what: dict[str, Any],
                                                   words: str) -> None:
    lines = {**HEAD, "what": {"directory": str(tmp_path)} | what}, {"end": 0, "result": ""}
    (tmp_path / "x.log").write_text("\n".join(map(json.dumps, lines)))
    before = {*os.listdir(), *os.listdir(tmp_path)}
    command("replay", tmp_path / "x.log").refused(words)
    assert {*os.listdir(), *os.listdir(tmp_path)} == before


def test_a_function_that_is_trusted(command: Any, tmp_path: Path) -> None:
    record(tmp_path / "x.log", math.prod, [2, 3])
    command("replay", tmp_path / "x.log").refused("is of the function 'math:prod'", "--run-function")
    done = command("replay", tmp_path / "x.log", "--run-function").succeeded()
    assert done.out.startswith("repeated bit for bit")


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
                                                                   200, 404]
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
