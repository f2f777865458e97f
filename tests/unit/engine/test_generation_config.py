"""Sampling defaults are vLLM's: its `get_diff_sampling_param` takes these fields of generation_config.json,
and not do_sample."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinygrad_nv import cli
from tinygrad_nv.cli import vllm_options
from tinygrad_nv.engine.generation_config import GenerationConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.vllm_arguments import from_vllm
from tinygrad_nv.errors import ConfigError, ModelError
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.protocol import completion

MODEL: Any = SimpleNamespace(eos_token_ids=(7,))
FIELDS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


def read(directory: Path, source: Any = None, changes: Any = None, **file: Any) -> GenerationConfig:
    if file: (directory / "generation_config.json").write_text(json.dumps(file))
    return GenerationConfig.read(directory, MODEL, source, changes)


def test_defaults(tmp_path: Path):
    plain = GenerationConfig(SamplingParams(max_tokens=256), (7,))
    assert plain.defaults.temperature == 1.0
    assert read(tmp_path) == read(tmp_path / "model.gguf") == plain
    for do_sample in ({}, {"do_sample": False}, {"do_sample": None}):
        assert read(tmp_path, bos_token_id=1, **do_sample) == plain
    own = GenerationConfig(SamplingParams(max_tokens=50, **FIELDS), (1, 2), 50)
    assert read(tmp_path, **FIELDS, eos_token_id=[1, 2], max_new_tokens=50, do_sample=False) == own
    assert read(tmp_path, "auto") == own
    # the end tokens are the model's
    assert read(tmp_path, "vllm") == GenerationConfig(plain.defaults, (1, 2))


def test_another_file_and_changes(tmp_path: Path):
    (other := tmp_path / "other").mkdir()
    read(other, temperature=0.5, top_k=3)
    read(tmp_path, **FIELDS)
    assert read(tmp_path, str(other)).defaults == SamplingParams(max_tokens=256, temperature=0.5, top_k=3)
    changed = {"temperature": 0.0, "max_new_tokens": 9, "do_sample": False}
    assert read(tmp_path, other, changed) == GenerationConfig(
        SamplingParams(max_tokens=9, temperature=0.0, top_k=3), (7,), 9)
    assert read(tmp_path, "vllm", changed).defaults == SamplingParams(max_tokens=9, temperature=0.0)


@pytest.mark.parametrize(("source", "changes", "words"), [
    ("nowhere", None, "generation_config is 'nowhere'"),
    (5, None, "generation_config is '5'"), (None, "x", "override_generation_config is 'x'"),
    (None, {"temprature": 1}, "override_generation_config has 'temprature'"),
    (None, {"temperature": -1}, "override_generation_config: temperature is -1"),
    (None, {"max_new_tokens": 0}, "override_generation_config: max_new_tokens is 0"),
    (None, {"top_k": "5"}, "override_generation_config: top_k is '5'")])
def test_arguments_that_are_wrong(tmp_path: Path, source: Any, changes: Any, words: str):
    with pytest.raises((ConfigError, ModelError)) as error: read(tmp_path, source, changes)
    assert words in str(error.value)


def test_options_of_serve_are_arguments_of_llm():
    words = ["serve", "--generation-config", "vllm", "--override_generation_config", '{"temperature": 0.5}']
    given = cli.parser().parse_args(vllm_options.normal(words)).vllm
    assert given == {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}}
    assert from_vllm(given, frozenset()) == given


def test_the_limit_is_of_all_answers():
    limits = RequestLimits(output_tokens=9)
    for asked, wanted in ({}, 9), ({"max_tokens": 5}, 5), ({"max_tokens": 50}, 9):
        made = completion({"prompt": "a", **asked}, SamplingParams(), limits)
        assert made.params.max_tokens == wanted
