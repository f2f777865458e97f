"""A tokenizer with the special tokens of chat templates, by itself and as transformers' own."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.models.tales.tokenizer import train_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>"]
TEXTS = ("Once upon a time there was a little fox who lived in a wood. ", "and they played. 😀 ") * 8
VOCAB = 320
Made = tuple[Tokenizer, transformers.PreTrainedTokenizerFast]
WithTemplate = Callable[[str], Made]


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    made = train_tokenizer(TEXTS, 300)
    made.add_special_tokens(SPECIAL)
    return made


@pytest.fixture
def with_template(backend: tokenizers.Tokenizer) -> WithTemplate:
    """The tokenizer with a chat template: this package's, and transformers'."""
    def make(template: str) -> Made:
        special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template,
                                                      **special)
        return Tokenizer(backend, special, template), theirs
    return make


@pytest.fixture
def tokenizer(with_template: WithTemplate) -> Tokenizer: return with_template("")[0]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Iterable[Any]], Path]:
    """Writes JSON lines. Tokens are kept in this test's own directory."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path / "cache"))
    def lines(name: str, rows: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path
    return lines
