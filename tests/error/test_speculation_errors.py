"""What cannot be a draft, and the words."""
from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.speculation.draft_model import require_same_vocabulary
from tinygrad_nv.engine.speculation.ngram import parse_speculative
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, ModelError


@pytest.mark.parametrize("text", ["", "ngram", "ngram:0", "ngram:8", "ngram:x", "ngram:a:3", "draft:3",
                                  "draft::3", "draft:/a", "draft:/a:9", "medusa:3", "ngram:-1", "ngram:²"])
def test_words_that_name_no_drafts(text: str) -> None:
    with pytest.raises(ConfigError) as caught: parse_speculative(text)
    assert str(caught.value) == (
        f"--speculative {text}\n  expected: ngram:K, or draft:DIR:K with a model's directory, and K from 1 "
        "to 7 tokens\n  to fix:   change --speculative, or leave it out")


def words(vocabulary: dict[str, int]) -> Tokenizer:
    return Tokenizer(Backend(models.WordLevel(vocabulary, unk_token="a")), {}, None)


def test_a_draft_model_with_another_vocabulary() -> None:
    with pytest.raises(ModelError) as caught:
        require_same_vocabulary(Tokenizer.load(DEFAULT_MODEL), words({"a": 69, "b": 1, "c": 2}), (2048, 2048))
    assert str(caught.value) == (
        "the draft model has another vocabulary: 2 of its 3 tokens differ\n"
        "  expected: a smaller model of the same family\n"
        "  to fix:   choose another model for --speculative draft:DIR:K, or use ngram:K")
    with pytest.raises(ModelError, match="it has 7 tokens, the model 8"):
        require_same_vocabulary(None, None, (8, 7))


def test_the_same_vocabulary_with_other_padding() -> None:
    require_same_vocabulary(words({"a": 0, "b": 1}), words({"b": 1, "a": 0}), (32, 64))
    require_same_vocabulary(None, words({"a": 0}), (8, 8))
