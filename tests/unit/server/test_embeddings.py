"""/v1/embeddings over a model whose vectors say what it was given."""
from __future__ import annotations

import base64
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live, until
from tinygrad_nv.engine.embedding.batching import EmbeddingEngine
from tinygrad_nv.engine.embedding.embedder import Embedder
from tinygrad_nv.models.pooling import Pooling
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.service import EmbeddingEngineClient, Service

openai = lazy("openai")

WIDTH = 4


class FakeRunner:
    """Vectors of sum, number, first and last token. `gate` holds steps back; `batches` are their sizes."""
    max_seqs, max_tokens = 3, 64

    def __init__(self) -> None:
        self.gate, self.batches = threading.Event(), list[int]()
        self.gate.set()

    def run(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        assert self.gate.wait(20)
        self.batches.append(len(texts))
        if [7, 7] in texts: raise RuntimeError("a device that fails")
        return np.array([vector(text) for text in texts], np.float32)


def vector(ids: Sequence[int]) -> list[float]: return [sum(ids), len(ids), ids[0], ids[-1]]


class FakeEmbedder(Embedder):
    """`Embedder` without a model."""

    def __init__(self, queue_limit: int = 100) -> None:
        self.tokenizer, self.tokenizer_error = FakeModel().tokenizer, None
        network: Any = SimpleNamespace(vocab_size=300, hidden_size=WIDTH, max_positions=64)
        self.config: Any = SimpleNamespace(network=network, pooling=Pooling("cls", False), width=WIDTH,
                                          classifier=None)
        self.length, self.device = 64, FakeRunner()
        self.engine = EmbeddingEngine(self.device, queue_limit)


def embedding_service(embedder: FakeEmbedder) -> Service:
    made = fake_service(FakeEngine(FakeModel()), embedder=embedder, strict=True)
    made.engine = EmbeddingEngineClient(embedder.engine)
    made.metrics = Metrics(NAME, embedder.length, made.engine.stats)
    return made


@pytest.fixture
def embedder() -> FakeEmbedder: return FakeEmbedder()


@pytest.fixture
def server(embedder: FakeEmbedder) -> Iterator[Live]:
    with live(embedding_service(embedder)) as running: yield running


def ask(server: Live, given: Any, **more: Any) -> Any:
    answer = server.post({"model": NAME, "input": given, **more}, "/v1/embeddings")
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_kind_of_input(server: Live, embedder: FakeEmbedder):
    words = [embedder.encode(text) for text in ("a fox", "a small bear")]
    for given, ids in (("a fox", words[:1]), (["a fox", "a small bear"], words), ([5, 6], [[5, 6]]),
                       ([[5, 6], [8]], [[5, 6], [8]])):
        made = ask(server, given)
        assert [each["embedding"] for each in made["data"]] == [vector(each) for each in ids]
        assert [each["index"] for each in made["data"]] == list(range(len(ids)))
        assert (made["object"], made["model"], made["data"][0]["object"]) == ("list", NAME, "embedding")
        assert made["id"].startswith("embd-")
        count = sum(map(len, ids))
        assert [*made["usage"].items()] == [("prompt_tokens", count), ("total_tokens", count), (
            "completion_tokens", 0), ("prompt_tokens_details", None), ("completion_tokens_details", None)]
        assert [*made["data"][0]] == ["index", "object", "embedding"]   # vLLM's fields, in its order


def test_forms_of_vectors(server: Live):
    coded = ask(server, [3, 4], encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == vector([3, 4])
    assert ask(server, [3, 4], dimensions=2)["data"][0]["embedding"] == [7, 2]
    long = ask(server, [3, 4], normalize=True)["data"][0]["embedding"]
    assert np.allclose(long, np.array(vector([3, 4])) / np.linalg.norm(vector([3, 4])))
    assert ask(server, [3, 4, 5], truncate_prompt_tokens=2)["data"][0]["embedding"] == vector([3, 4])
    assert ask(server, [3] * 99, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 64


def test_the_openai_client(server: Live):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:    # it asks for base64
        made = client.embeddings.create(model=NAME, input=["a fox"], user="me")
        assert made.data[0].embedding[1] == made.usage.prompt_tokens


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("fields", "param", "words"), [
    ({}, "input", "input is missing"), ({"input": []}, "input", "input is an empty list"),
    ({"input": [1, "a"]}, "input", "a list of mixed types"),
    ({"input": [[]]}, None, "the prompt has no tokens"), ({"input": [400]}, None, "token id 400 is out"),
    ({"input": ["a"] * 2049}, "input", "2049 texts, expected at most 2048"),
    ({"input": [3] * 65}, None, "the prompt has 65 tokens, the context holds 64"),
    ({"input": "a", "dimensions": 5}, "dimensions", "dimensions is 5; expected: 1 to 4"),
    ({"input": "a", "dimensions": 0}, "dimensions", "expected at least 1"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "expected one of float, base64"),
    ({"input": "a", "truncate_prompt_tokens": 65}, None, "truncate_prompt_tokens is 65"),
    ({"input": "a", "truncate_prompt_tokens": 0}, None, "truncate_prompt_tokens is 0"),
    ({"input": "a", "dimension": 2}, "dimension", "did you mean dimensions?"),
    ({"input": "a", "model": "other"}, "model", "the model 'other' is not served here")])
def test_fields_out_of_range(server: Live, fields: dict[str, Any], param: str | None, words: str):
    answer = server.post(fields, "/v1/embeddings")
    assert answer.status_code == (404 if "other" in words else 400)
    error = answer.json()["error"]
    assert words in error["message"], error
    assert error["param"] == param


def test_each_kind_of_model_refuses_what_the_other_serves(server: Live):
    for path, more in (("completions", {"prompt": "a"}), ("chat/completions",
                                                          {"messages": [{"role": "user", "content": "a"}]})):
        answer = server.post(more, f"/v1/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["reason"] == "unsupported_task"
        assert f"{NAME} makes embeddings, and generates no text; to fix: POST /v1/embeddings" in answer.text
    with live(fake_service()) as other:
        answer = other.post({"input": "a"}, "/v1/embeddings")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "unsupported_task")
        assert f"{NAME} generates text; expected: an embedding model" in answer.text


def test_batches_of_many_callers(server: Live, embedder: FakeEmbedder):
    """Texts that wait while a step runs are the next: at most 3, in order. A step that fails fails alone."""
    embedder.device.gate.clear()
    first = embedder.submit([[3]])
    until(lambda: embedder.engine.stats().running == 1)
    futures = embedder.submit([[4], [5], [6], [7], [8], [3] * 40, [4] * 40])
    futures[1].cancel()
    assert embedder.engine.stats().waiting == 7
    embedder.device.gate.set()
    assert [each.result(20).tolist() for each in (*first, futures[0], futures[2])] == [
        vector([3]), vector([4]), vector([6])]
    assert [futures[i].result(20)[1] for i in (5, 6)] == [40, 40]
    assert embedder.device.batches == [1, 3, 2, 1]
    with pytest.raises(RuntimeError, match="a device that fails"): embedder.submit([[7, 7]])[0].result(20)
    answer = server.post({"input": [7, 7]}, "/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "internal_error")
    assert ask(server, [8])["data"][0]["embedding"] == vector([8])


def test_a_full_queue():
    embedder = FakeEmbedder(queue_limit=2)
    embedder.device.gate.clear()
    with live(embedding_service(embedder)) as server:
        embedder.submit([[3]])
        until(lambda: embedder.engine.stats().running == 1)
        embedder.submit([[3], [4]])
        answer = server.post({"input": [5]}, "/v1/embeddings")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (429, "queue_full")
        embedder.device.gate.set()
        until(lambda: not embedder.engine.stats().waiting)
        assert ask(server, [5])["data"][0]["embedding"] == vector([5])
        counted = b'tinygrad_nv:prompt_tokens_total{model_name="tales"} 4.0'
        assert counted in server.http.get("/metrics").content
    embedder.engine.close()
