"""tokenizer_config.json beside tokenizer.json: ids and texts are transformers'."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.unit.engine.test_text import TOKENIZERS
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError

TEXTS = ("time", "Once <tool> upon<end>a time", " time", "<s>Once", "a <tool>")
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
        "special": True}


def directory(path: Path, name: str, special: list[str], **config: Any) -> Path:
    backend = type(TOKENIZERS[name]).from_str(TOKENIZERS[name].to_str())
    backend.add_special_tokens(special)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<s>",
        "eos_token": "<end>", **config}))
    return path


def same(path: Path) -> None:
    own, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert own.encode(text, special=False) == ids, text
        for skip in (True, False):
            assert own.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (text, skip)


@pytest.mark.parametrize("config", [
    {}, {"split_special_tokens": True}, {"additional_special_tokens": ["<tool>"]},
    {"extra_special_tokens": {"tool_token": "<tool>"}}, {"tool_token": "<tool>"}, {"pad_token": "<tool>"},
    {"added_tokens_decoder": {"400": TOOL}}, {"added_tokens_decoder": {"400": {**TOOL, "special": False}}},
    {"added_tokens_decoder": {"400": {**TOOL, "lstrip": True, "rstrip": True}}},
    {"added_tokens_decoder": {"1": {**TOOL, "content": "Once"}}},
    {"additional_special_tokens": ["<tool>"], "split_special_tokens": True},
    {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {"add_prefix_space": True}], ids=str)
def test_tokens_that_only_the_configuration_names(tmp_path: Path, config: dict[str, Any]):
    same(directory(tmp_path, "byte-level", ["<s>", "<end>"], **config))


def test_special_tokens_that_the_vocabulary_does_not_mark(tmp_path: Path):
    path = directory(tmp_path, "byte-level", [])
    same(path)
    assert Tokenizer.load(path).special_texts == ("<s>", "<end>")


@pytest.mark.parametrize(("name", "content"), [
    ("added_tokens.json", {"<tool>": 400}),
    ("special_tokens_map.json", {"additional_special_tokens": ["<tool>"]})])
def test_older_files(tmp_path: Path, name: str, content: Any):
    (directory(tmp_path, "byte-level", ["<s>", "<end>"]) / name).write_text(json.dumps(content))
    same(tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("legacy", [True, False])
def test_the_blank_in_front_of_a_text(tmp_path: Path, prefix: bool, legacy: bool):
    same(directory(tmp_path, "sentencepiece", ["<s>", "<end>"], tokenizer_class="LlamaTokenizerFast",
                   add_prefix_space=prefix, legacy=legacy))


@pytest.mark.parametrize(("config", "words"), [
    ({"added_tokens_decoder": {"x": TOOL}}, "added_tokens_decoder has 'x'"),
    ({"added_tokens_decoder": {"4": "<tool>"}}, "4 has '<tool>'"),
    ({"added_tokens_decoder": {"²": TOOL}}, "added_tokens_decoder has '²'"),
    ({"added_tokens_decoder": {"9" * 4400: TOOL}}, "added_tokens_decoder has '999"),
    ({"eos_token": "\ud800"}, "tokenizer_config.json is not JSON: it has .ud800, which is no character"),
    ({"additional_special_tokens": [4]}, "additional_special_tokens has '4'")])
def test_what_is_no_token_is_named(tmp_path: Path, config: dict[str, Any], words: str):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(directory(tmp_path, "byte-level", ["<s>"], **config))
