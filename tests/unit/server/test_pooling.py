"""/score, /rerank, /classify and /pooling over a model whose hidden states say what it was given."""
from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.server.serve_case import NAME, Live, fake_service, live
from tests.unit.server.test_embeddings import FakeEmbedder, FakeRunner, embedding_service, vector
from tinygrad_nv.models.classifier import Classifier, label_names, sigmoid, softmax
from tinygrad_nv.server import pooling

TEXTS = ["a fox", "a small bear", "zoo"]
WEIGHT = np.array([[1, -1, 0, 0], [0, 0, 1, 0], [0, 0, 0, -1]], np.float32) / 64


class TokenRunner(FakeRunner):
    """A vector of each token, too."""

    def run_tokens(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.array([vector([token]) for token in text], np.float32) for text in texts]


def model(labels: int = 0) -> FakeEmbedder:
    """One that embeds, or classifies into so many labels."""
    made = FakeEmbedder()
    made.engine.runner = TokenRunner()
    made.config.classifier = None if not labels else Classifier(
        WEIGHT[:labels], None, None, "sigmoid" if labels == 1 else "softmax", labels, ("dull", "fine"))
    made.config.has_types = False
    return made


@pytest.fixture(scope="module")
def served() -> Iterator[dict[int, tuple[FakeEmbedder, Live]]]:
    models = {labels: model(labels) for labels in (0, 1, 3)}
    with live(embedding_service(models[0])) as a, live(embedding_service(models[1])) as b, \
            live(embedding_service(models[3])) as c:
        yield {0: (models[0], a), 1: (models[1], b), 3: (models[3], c)}


Served = dict[int, tuple[FakeEmbedder, Live]]


def ask(server: Live, path: str, **fields: Any) -> Any:
    answer = server.post({"model": NAME, **fields}, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reranked(embedder: FakeEmbedder, first: str, second: str) -> float:
    return float(sigmoid(np.array(vector(embedder.encode_pair(first, second))) @ WEIGHT[0]))


def cosine(embedder: FakeEmbedder, first: str, second: str) -> float:
    one, two = (np.array(vector(embedder.encode(text))) for text in (first, second))
    return float(one @ two / np.linalg.norm(one) / np.linalg.norm(two))


@pytest.mark.parametrize(("labels", "expected"), [(1, reranked), (0, cosine)])
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(served: Served, labels: int, expected: Any, path: str):
    embedder, server = served[labels]
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        made = ask(server, path, **{names[0]: "a wood", names[1]: TEXTS})
        assert (made["object"], made["model"], made["id"][:6]) == ("list", NAME, "score-")
        assert [(each["index"], each["object"]) for each in made["data"]] == [(i, "score") for i in range(3)]
        assert np.allclose([each["score"] for each in made["data"]],
                           [expected(embedder, "a wood", text) for text in TEXTS], atol=1e-6)
    made = ask(server, path, text_1=TEXTS, text_2=TEXTS[::-1])
    pairs = [*zip(TEXTS, TEXTS[::-1], strict=True)]
    assert np.allclose([each["score"] for each in made["data"]],
                       [expected(embedder, *pair) for pair in pairs], atol=1e-6)
    if labels:
        assert made["usage"]["prompt_tokens"] == sum(len(embedder.encode_pair(*pair)) for pair in pairs)


@pytest.mark.parametrize(("labels", "expected"), [(1, reranked), (0, cosine)])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_reranked(served: Served, labels: int, expected: Any, path: str):
    embedder, server = served[labels]
    scores = [expected(embedder, "a wood", text) for text in TEXTS]
    order = sorted(range(3), key=lambda at: -scores[at])
    made = ask(server, path, query="a wood", documents=[TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]])
    assert [each["index"] for each in made["results"]] == order
    assert [each["document"]["text"] for each in made["results"]] == [TEXTS[at] for at in order]
    for each in made["results"]:    # vLLM's fields, in its order
        assert ([*each], [*each["document"]]) == (["index", "document", "relevance_score"],
                                                  ["text", "multi_modal"])
    assert [*made["usage"]] == ["prompt_tokens", "total_tokens"]
    assert np.allclose([each["relevance_score"] for each in made["results"]], [scores[at] for at in order])
    made = ask(server, path, query="a wood", documents=TEXTS, top_n=2, return_documents=False)
    assert [[*each] for each in made["results"]] == [["index", "relevance_score"]] * 2
    assert [each["index"] for each in made["results"]] == order[:2]


def test_texts_are_classified(served: Served):
    embedder, server = served[3]
    logits = np.array([vector(embedder.encode(text)) for text in TEXTS]) @ WEIGHT.T
    for activate, wanted in ((True, softmax(logits)), (False, logits)):
        made = ask(server, "/classify", input=TEXTS, use_activation=activate)
        assert np.allclose([each["probs"] for each in made["data"]], wanted)
        assert [each["label"] for each in made["data"]] == [
            ("dull", "fine", "LABEL_2")[int(at)] for at in wanted.argmax(1)]
        assert {each["num_classes"] for each in made["data"]} == {3}
    assert ask(server, "/classify", input=[[5, 6], [7]])["usage"]["prompt_tokens"] == 3


def test_answers_of_tokens_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Before they are computed; base64 takes less memory, and texts have one vector each."""
    monkeypatch.setattr(pooling, "MAX_ANSWER_NUMBERS", 12)     # 3 tokens of 4 numbers
    _, server = served[0]
    ask(server, "/pooling", input=[[5, 6], [7]])
    answer = server.post({"model": NAME, "input": [[5, 6], [7, 8]]}, "/pooling")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "too_many_tokens")
    assert "input has 4 tokens, and each has 4 numbers; expected: at most 3 tokens" in answer.text
    ask(server, "/pooling", input=[[5] * 12], encoding_format="base64")
    assert server.post({"model": NAME, "input": [[5] * 13], "encoding_format": "base64"},
                       "/pooling").status_code == 400
    ask(server, "/pooling", input=[[5, 6], [7, 8]], task="embed")


def test_arrays_of_texts_and_of_tokens(served: Served):
    embedder, server = served[0]
    ids = embedder.encode(TEXTS[1])
    each = np.array([vector([token]) for token in ids])
    made = ask(server, "/pooling", input=TEXTS[1])
    assert made["data"] == [{"index": 0, "object": "pooling", "data": each.tolist()}]
    made = ask(server, "/pooling", input=TEXTS[1], task="embed", dimensions=2)
    assert made["data"][0]["data"] == vector(ids)[:2]
    coded = ask(server, "/pooling", input=TEXTS[1], encoding_format="base64")["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == each.ravel().tolist()
    _, server = served[3]
    made = ask(server, "/pooling", input=TEXTS[1], use_activation=False)
    assert np.allclose(made["data"][0]["data"], each @ WEIGHT.T)
    made = ask(server, "/pooling", input=TEXTS[1], task="classify")
    assert np.allclose(made["data"][0]["data"], softmax(np.array(vector(ids)) @ WEIGHT.T))


@pytest.mark.parametrize(("labels", "path", "fields", "words"), [
    (0, "/classify", {"input": "a"}, "has no head for classification; to fix: POST /v1/embeddings or /score"),
    (0, "/pooling", {"input": "a", "task": "classify"}, "has no head for classification"),
    (0, "/pooling", {"input": "a", "task": "plugin"}, "task is 'plugin', expected one of embed, classify"),
    (0, "/pooling", {"input": "a", "dimensions": 9}, "dimensions is 9"),
    (3, "/pooling", {"input": "a", "task": "embed"}, "the model classifies, and makes no embeddings"),
    (3, "/v1/embeddings", {"input": "a"}, "the model classifies, and makes no embeddings"),
    (3, "/score", {"text_1": "a", "text_2": "b"}, "has 3 labels, and scores are of one; to fix: POST /"),
    (3, "/v1/completions", {"prompt": "a"}, "classifies texts, and generates no text; to fix: POST /"),
    (0, "/v1/completions", {"prompt": "a"}, "makes embeddings, and generates no text"),
    (1, "/score", {"text_1": "a"}, "text_2 is missing or empty"),
    (1, "/score", {"text_1": "a", "documents": "b"}, "are in 2 pairs of fields, expected one of queries and"),
    (1, "/score", {}, "are in 0 pairs of fields"),
    (1, "/score", {"text_1": ["a"] * 2, "text_2": ["b"] * 3}, "text_1 has 2 texts, and text_2 3"),
    (1, "/score", {"text_1": "a", "text_2": "b", "text_3": "c"}, "unknown field 'text_3'; did you mean"),
    (1, "/rerank", {"query": "a"}, "documents is missing or empty"),
    (1, "/rerank", {"documents": ["a"]}, "query is missing"),
    (1, "/rerank", {"query": "a", "documents": [3]}, "documents is a list, expected a list of texts"),
    (1, "/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents is a list, expected"),
    (1, "/rerank", {"query": "a", "documents": ["b"] * 2049}, "2049 texts, expected at most 2048"),
    (1, "/rerank", {"query": "a", "documents": ["b"], "top": 1}, "did you mean top_n?"),
    (1, "/rerank", {"query": "a" * 900, "documents": ["b"]}, "tokens, the context holds 64")])
def test_what_is_refused(served: Served, labels: int, path: str, fields: dict[str, Any], words: str):
    answer = served[labels][1].post(fields, path)
    # as vLLM, which has no such path then
    assert answer.status_code == (404 if "no head" in words
                                  or "generates no text" in words else 400)
    assert words in answer.json()["error"]["message"], answer.text


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("path", "fields"), [
    ("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/classify", {"input": "a"}), ("/pooling", {"input": "a"})])
def test_a_model_that_generates_refuses(path: str, fields: dict[str, Any]):
    with live(fake_service()) as server:
        answer = server.post(fields, path)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "unsupported_task")
        assert f"{NAME} generates text; expected: an embedding model" in answer.text


def test_labels_have_names():
    assert label_names({"id2label": {"0": "no", "1": "yes"}}, 2) == ("no", "yes")
    assert label_names({}, 2) == ()
