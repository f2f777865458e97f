"""`--config FILE` of commands that load a model: as `vllm serve --config`, the command line wins."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinygrad_nv import cli
from tinygrad_nv.engine.command_line import llm_arguments
from tinygrad_nv.errors import ConfigError

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
