"""Records to ids: TRL's rules, written out with transformers' tokenizer."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.train.data.encode import EncodeOptions, Encoder, encode_long
from tinygrad_nv.train.data.records import record

TEXTS = ["", "a fox", "a fox<|eos|>", "Once upon a time, a b😀r.\n\n", " " * 5]


def encoded(tokenizer: Tokenizer, row: dict[str, Any], **options: Any) -> list[Any]:
    return Encoder(tokenizer, EncodeOptions(**options)).encode([record(row, "here")])[0]


def test_a_text_ends_with_one_eos(with_template):
    ours, theirs = with_template("")
    rows = [record({"text": text}, "here") for text in TEXTS]
    for text, (made,) in zip(TEXTS, Encoder(ours).encode(rows), strict=True):
        assert made.ids.tolist() == theirs(text.removesuffix("<|eos|>") + "<|eos|>")["input_ids"]
        assert made.loss is None
        assert made.ids[0] == 0
        assert made.ids.tolist().count(1) == 1


@pytest.mark.parametrize("completion", ["lived.", " lived.<|eos|>", ""])
def test_loss_on_the_completion(with_template, completion: str):
    ours, theirs = with_template("")
    (made,) = encoded(ours, {"prompt": "a fox", "completion": completion})
    whole = "a fox" + completion.removesuffix("<|eos|>") + "<|eos|>"
    before = len(theirs("a fox")["input_ids"])
    assert made.ids.tolist() == theirs(whole)["input_ids"]
    assert made.loss.tolist() == [number >= before for number in range(len(made.ids))]
    (made,) = encoded(ours, {"prompt": "a fox", "completion": completion}, completion_only_loss=False)
    assert made.loss.all()


def test_a_prompt_whose_tokens_differ_is_counted(tokenizer: Tokenizer):
    assert encoded(tokenizer, {"prompt": "Once", "completion": " upon"})[0].agrees
    assert not encoded(tokenizer, {"prompt": "Onc", "completion": "e upon"})[0].agrees


def test_a_pair_is_two_completions(tokenizer: Tokenizer):
    chosen, rejected = encoded(tokenizer, {"prompt": "a fox", "chosen": " ran", "rejected": " sat"},
                               completion_only_loss=False)     # has no say
    for made, text in ((chosen, " ran"), (rejected, " sat")):
        (expected,) = encoded(tokenizer, {"prompt": "a fox", "completion": text})
        assert np.array_equal(made.ids, expected.ids)
        assert np.array_equal(made.loss, expected.loss)


def test_another_token_ends_documents(tokenizer: Tokenizer):
    (made,) = encoded(tokenizer, {"text": "a fox"}, eos_token="<|end|>")
    assert tokenizer.decode(made.ids, False) == "<|bos|>a fox<|end|>"


@pytest.mark.parametrize("text", ["a fox lived in a wood.\nThe end, \t he said.\n\n\n" * 40, "x" * 3000,
                                  "\n" * 500, "a\r\n  b\n c\n" * 300, "😀é\n" * 500, "no lines at all " * 90])
def test_a_long_text_has_the_ids_of_one_call(tokenizer: Tokenizer, text: str):
    assert encode_long(tokenizer, text, 100) == tokenizer.encode(text)


def test_a_long_text_that_cannot_be_cut_is_encoded_at_once():
    """SentencePiece's prefix stands before every text: pieces would have one each."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator(["a fox lived\nin a wood " * 9], trainers.BpeTrainer(vocab_size=60,
                                                                                   show_progress=False))
    own, text = Tokenizer(backend, {}, None), "a fox lived\nin a wood\n" * 100
    assert encode_long(own, text, 100) == own.encode(text)
    pieces = [own.encode(line + "\n") for line in text.splitlines()]
    assert own.encode(text) != [token for piece in pieces for token in piece]
