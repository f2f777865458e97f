"""Models for sequence classification, in all that LLM computes with them, against transformers."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.models.embedding_case import (
    DECODER,
    ENCODERS,
    add_modules,
    add_vocabulary,
    hidden_states,
    ragged,
    save,
)
from tinygrad_nv import LLM, PoolingParams
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.classifier import gelu, sigmoid, softmax
from tinygrad_nv.models.embedding_model import read_embedding_config

TEXTS = ragged((7, 1, 20))
# EuroBERT-like heads are not there; NomicBERT, GTE and Jina have BERT's and RoBERTa's
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}ForSequenceClassification": fields for name, fields in ENCODERS.items()},
    "Qwen3ForSequenceClassification": {**DECODER, "pad_token_id": 0},
    "LlamaForSequenceClassification": {**DECODER, "pad_token_id": 0, "tie_word_embeddings": True}}
CASES["ModernBertForSequenceClassification"] = {
    **CASES["ModernBertForSequenceClassification"], "classifier_pooling": "mean"}


def logits(model: torch.nn.Module, ids: list[int], **more: Any) -> np.ndarray:
    with torch.no_grad(): return model(torch.tensor([ids]), **more).logits[0].double().numpy()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", CASES)
def test_classes_are_transformers(tmp_path: Path, cls: str):
    """Probabilities and logits; of three labels, and with a single one."""
    for labels in (3, 1):
        theirs = save(tmp_path, cls, {**CASES[cls], "num_labels": labels})
        expected = np.stack([logits(theirs, ids) for ids in TEXTS])
        with LLM(tmp_path, device="CPU", max_num_batched_tokens=32, task="classify") as llm:
            raw = [each.outputs.probs for each in llm.classify(
                TEXTS, pooling_params=PoolingParams(use_activation=False))]
            made = llm.classify(TEXTS)
            assert np.abs(np.array(raw) - expected).max() <= 2e-4 * max(1, np.abs(expected).max())
            wanted = softmax(expected) if labels > 1 else sigmoid(expected)
            assert np.allclose([each.outputs.probs for each in made], wanted, atol=2e-4)
            assert [each.outputs.num_classes for each in made] == [labels] * 3
            assert [list(each.prompt_token_ids) for each in made] == TEXTS
            encoded = llm.encode(TEXTS, pooling_task="classify")
            assert [each.outputs.data.tolist() for each in encoded] == [each.outputs.probs for each in made]


@pytest.fixture(scope="module", params=["Bert", pytest.param("Roberta", marks=pytest.mark.slow)])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
             ) -> Iterator[tuple[LLM, torch.nn.Module, Any]]:
    """A cross-encoder with a vocabulary, of one label: BERT's tokens have types."""
    directory = tmp_path_factory.mktemp("reranker")
    theirs = save(directory, f"{request.param}ForSequenceClassification",
                  {**ENCODERS[request.param], "num_labels": 1,
                   "type_vocab_size": 1 + (request.param == "Bert")})
    add_vocabulary(directory)
    with LLM(directory, device="CPU", max_num_batched_tokens=64) as llm:
        yield llm, theirs, transformers.BertTokenizer.from_pretrained(directory)


def test_scores_are_transformers(reranker: tuple[LLM, torch.nn.Module, Any]):
    """One text with many, and one by one; cut off; types of the second text's tokens."""
    llm, theirs, tokenizer = reranker
    texts = ["a bear", "zoo", "the fox and a bear " * 2]

    def expected(first: str, second: str, **more: Any) -> tuple[list[int], float]:
        made = tokenizer(first, second, **more)
        types = {"token_type_ids": torch.tensor([made["token_type_ids"]])}
        given = types if llm.embedder.config.has_types else {}
        return made["input_ids"], float(sigmoid(logits(theirs, made["input_ids"], **given))[0])
    assert llm.embedder.config.has_types == (theirs.config.model_type == "bert")
    for made, second in zip(llm.score("fox", texts), texts, strict=True):
        ids, score = expected("fox", second)
        assert list(made.prompt_token_ids) == ids
        assert made.outputs.score == pytest.approx(score, abs=1e-5)
    for made, first in zip(llm.score(texts, texts[::-1]), zip(texts, texts[::-1], strict=True), strict=True):
        assert made.outputs.score == pytest.approx(expected(*first)[1], abs=1e-5)
    for most in (7, 12, 20):
        ids, score = expected("fox", texts[2], truncation="longest_first", max_length=most)
        [made] = llm.score("fox", texts[2], truncate_prompt_tokens=most)
        assert list(made.prompt_token_ids) == ids
        assert made.outputs.score == pytest.approx(score, abs=1e-5)
    with pytest.raises(RequestError, match="2 texts to score with 3"): llm.score(texts[:2], texts)
    with pytest.raises(RequestError, match="the prompt has"): llm.score("a " * 70, "b")
    with pytest.raises(RequestError, match="score of what is not texts"): llm.score([[1, 2]], ["a"])
    with pytest.raises(RequestError, match="classifies, and makes no embeddings"): llm.embed("fox")


@pytest.mark.slow
def test_rows_of_tokens(tmp_path: Path):
    """Embeddings of each token with length 1, hidden states without; logits of each token: rewards."""
    theirs = save(tmp_path, "Qwen3Model", DECODER)
    with LLM(tmp_path, device="CPU", max_num_batched_tokens=32, runner="pooling") as llm:
        raw = llm.encode(TEXTS, PoolingParams(normalize=False))
        unit = llm.encode(TEXTS, pooling_task="token_embed")
        [whole] = llm.encode([TEXTS[0]], pooling_task="embed")
        for ids, one, other in zip(TEXTS, raw, unit, strict=True):
            expected = hidden_states(theirs, ids)
            assert np.abs(one.outputs.data - expected).max() <= 2e-4 * np.abs(expected).max()
            expected /= np.linalg.norm(expected, axis=1, keepdims=True)
            assert np.abs(other.outputs.data - expected).max() <= 2e-4
        assert np.abs(whole.outputs.data - unit[0].outputs.data[-1]).max() <= 1e-5
        with pytest.raises(RequestError, match="has no head for classification"): llm.classify(TEXTS)
        with pytest.raises(RequestError, match="pooling_task is 'plugin'"):
            llm.encode(TEXTS, pooling_task="plugin")
    theirs = save(tmp_path, "Qwen3ForSequenceClassification", {**DECODER, "pad_token_id": 0, "num_labels": 2})
    with LLM(tmp_path, device="CPU", max_num_batched_tokens=32) as llm:
        for ids, made in zip(TEXTS, llm.reward(TEXTS), strict=True):
            for count in range(1, len(ids) + 1, 3):
                assert np.allclose(made.outputs.data[count - 1], logits(theirs, ids[:count]), atol=2e-3)
        with pytest.raises(RequestError, match="has 2 labels"): llm.score("a", "b")


@pytest.mark.slow
def test_scores_of_embeddings_are_cosines(tmp_path: Path):
    save(tmp_path, "BertModel", ENCODERS["Bert"])
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, False)
    add_vocabulary(tmp_path)
    with LLM(tmp_path, device="CPU", max_num_batched_tokens=32) as llm:
        texts = ["a bear", "zoo", "fox"]
        one, *others = (np.array(each.outputs.embedding) for each in llm.embed(["fox", *texts]))
        expected = [one @ each / np.linalg.norm(one) / np.linalg.norm(each) for each in others]
        made = llm.score("fox", texts)
        assert [each.outputs.score for each in made] == pytest.approx(expected, abs=1e-5)
        assert made[2].outputs.score == pytest.approx(1, abs=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fields", "name"), [
    ({}, "softmax"), ({"problem_type": "regression"}, "identity"),
    ({"problem_type": "multi_label_classification"}, "sigmoid"),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid")], ids=str)
def test_activations_of_scores(tmp_path: Path, fields: dict[str, Any], name: str):
    theirs = save(tmp_path, "BertForSequenceClassification", {**ENCODERS["Bert"], "num_labels": 3})
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, **fields}))
    function = {"softmax": softmax, "identity": lambda x: x, "sigmoid": sigmoid}[name]
    expected = function(logits(theirs, TEXTS[0]))
    with LLM(tmp_path, device="CPU", max_num_batched_tokens=32) as llm:
        assert np.allclose(llm.classify([TEXTS[0]])[0].outputs.probs, expected, atol=1e-3)


def test_heads_that_are_refused(tmp_path: Path):
    save(tmp_path, "BertForSequenceClassification", {**ENCODERS["Bert"], "num_labels": 3})
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    unknown = {"sbert_ce_default_activation_function": "torch.nn.GELU"}
    for fields, words in (({"id2label": {"0": "a"}}, r"classifier.weight is \[3, 64\] of float32"),
                          ({"id2label": None, "num_labels": 0}, "num_labels is 0"),
                          (unknown, "activation of scores")):
        path.write_text(json.dumps({**data, **fields}))
        with pytest.raises(ModelError, match=words): LLM(tmp_path, device="CPU")
    save(tmp_path, "BertModel", ENCODERS["Bert"])
    for task in ("classify", "reward"):
        with pytest.raises(ModelError, match="has no head for classification"):
            LLM(tmp_path, device="CPU", task=task)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_16_bits(tmp_path: Path, dtype: torch.dtype):
    """Are read exactly, and applied in float64."""
    theirs = save(tmp_path, "BertForSequenceClassification", {**ENCODERS["Bert"], "num_labels": 3})
    theirs.to(dtype).save_pretrained(tmp_path)
    found = read_embedding_config(tmp_path).classifier
    assert np.array_equal(found.weight, theirs.classifier.weight.detach().float().numpy())
    assert np.array_equal(found.bias, theirs.classifier.bias.detach().float().numpy())
    assert np.array_equal(found.hidden.weight, theirs.bert.pooler.dense.weight.detach().float().numpy())


def test_functions():
    x = np.linspace(-800, 800, 41)
    t = torch.tensor(x)
    assert np.allclose(gelu(x), torch.nn.functional.gelu(t).numpy())
    assert np.allclose(sigmoid(x), t.sigmoid().numpy())
    assert np.allclose(softmax(x), t.softmax(-1).numpy())
