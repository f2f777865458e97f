"""POST /pooling, /classify, /score (/v1/score) and /rerank (/v1/rerank, /v2/rerank), with vLLM's fields.

Protocol: models are those of `LLM`'s encode, classify and score. /rerank has the fields of Jina's and
Cohere's APIs: the documents of a query in the order of their scores. All texts of a request are queued at
once and computed in the engine's batches.
"""
from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.llm_pooling import POOLING_TASKS
from tinygrad_nv.errors import NVError
from tinygrad_nv.server.embeddings import ENCODINGS, MOST_INPUTS, encode_texts, pool
from tinygrad_nv.server.errors import api_error, invalid
from tinygrad_nv.server.fields import Fields, unicode
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.protocol import labels, prompts
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import EmbeddingClient, Service
from tinygrad_nv.server.sse import until_disconnect
from tinygrad_nv.server.usage import Usage
from tinygrad_nv.server.workers import checkpoint

MAX_ANSWER_NUMBERS = 8 << 20    # limit: numbers of a /pooling answer, 40 bytes each: 2048 embeddings of 4096
# names of two sides of a score, newest first
SIDES = (("queries", "documents"), ("data_1", "data_2"), ("text_1", "text_2"))


@dataclass(frozen=True)
class Shared:
    """Fields of all of these endpoints. `activate`: probabilities, instead of logits."""
    model: str | None
    truncate: int | None
    activate: bool


def _finish(fields: Fields) -> Shared:
    """Reads the fields of all of these endpoints. Raises `APIError` for others."""
    flags = [fields.flag(name, True) for name in ("use_activation", "activation", "softmax")]
    made = Shared(fields.text("model"), fields.whole("truncate_prompt_tokens", -1), all(flags))
    fields.as_usual({"add_special_tokens": True, "priority": 0})
    labels(fields)
    fields.finish()
    return made


def _inputs(fields: Fields) -> Any:
    if len(found := prompts(fields, "input")) <= MOST_INPUTS: return found
    raise invalid(f"input has {len(found)} texts, expected at most {MOST_INPUTS}", "input")


async def pooling(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """Arrays of each text: what the model's head or its pooling gives, of the text or of each token."""
    fields, model = Fields(data), service.require_embedder()
    inputs = await service.read(record, lambda: _inputs(fields))
    kind = fields.one_of("encoding_format", ENCODINGS)
    head = model.classifier
    task = fields.one_of("task", POOLING_TASKS) or ("token_embed" if head is None else "token_classify")
    dimensions = fields.whole("dimensions", 1)
    normalize = fields.flag("normalize", True) if "normalize" in fields.left else None
    shared = _finish(fields)
    name, classifies = service.require_name(shared.model), task.endswith("classify")
    if classifies and head is None: raise service.no_classifier()
    if not classifies: _require_embeddings(model, dimensions)
    ids = await encode_texts(service, record, model, inputs, shared.truncate)
    if task.startswith("token"): _require_bounded(record.prompt_tokens, model.width, kind == "base64")
    found = await until_disconnect(request, pool(service, model, ids, task.startswith("token")))

    def finish(x: np.ndarray) -> np.ndarray:
        if classifies and head is not None: return head.scores(np.atleast_2d(x), shared.activate).reshape(
            *x.shape[:-1], -1)
        return model.finish([*np.atleast_2d(x)], normalize, dimensions).reshape(*x.shape[:-1], -1)

    def answer() -> Response:
        shown = [base64.b64encode(finish(x).astype("<f4").tobytes()).decode() if kind == "base64" else
                 finish(x).tolist() for x in found]
        return _list_answer(record, name, [{"object": "pooling", "data": each} for each in shown])
    return await service.aside(sum(x.size for x in found), answer)


async def classify(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The probabilities of labels for each text, and the likeliest label."""
    fields, model = Fields(data), service.require_embedder()
    if (head := model.classifier) is None: raise service.no_classifier()
    inputs, shared = await service.read(record, lambda: (_inputs(fields), _finish(fields)))
    name = service.require_name(shared.model)
    ids = await encode_texts(service, record, model, inputs, shared.truncate)
    found = await until_disconnect(request, pool(service, model, ids))
    scores = head.scores(np.stack(found), shared.activate)
    return _list_answer(record, name, [{"label": head.label(int(each.argmax())), "probs": each.tolist(),
                                   "num_classes": head.labels} for each in scores])


async def score(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """Scores of pairs of texts: of one with each of a list, or of two lists' texts one by one."""
    fields, model = Fields(data), service.require_embedder()
    first, second, shared = await service.read(record, lambda: _sides(fields))
    name = service.require_name(shared.model)
    scores = await _scores(request, service, record, model, first, second, shared)
    return _list_answer(record, name, [{"object": "score", "score": each} for each in scores])


def _sides(fields: Fields) -> tuple[Sequence[str], Sequence[str], Shared]:
    """The two texts of each score."""
    if len(given := [pair for pair in SIDES if set(pair) & set(fields.left)]) != 1:
        raise invalid(f"texts to score are in {len(given)} pairs of fields, expected one of "
                      f"{', '.join(map(' and '.join, SIDES))}", SIDES[0][0], "missing_field")
    [names] = given
    first, second = (fields.texts(side, MOST_INPUTS) for side in names)
    shared = _finish(fields)
    for side, texts in zip(names, (first, second), strict=True):
        if not texts:
            raise invalid(f"{side} is missing or empty, expected a text, or texts", side, "missing_field")
    if len(first) == 1: first *= len(second)
    if len(first) != len(second):
        raise invalid(f"{names[0]} has {len(first)} texts, and {names[1]} {len(second)}, expected one text "
                      "with any number, or equally many", names[0])
    return first, second, shared


async def rerank(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """Documents in the order of their scores for a query, the best ones first."""
    fields, model = Fields(data), service.require_embedder()
    query, documents = await service.read(record, lambda: (fields.text("query"), _documents(fields)))
    if query is None: raise invalid("query is missing, expected a text", "query", "missing_field")
    top, shown = fields.whole("top_n", 0), fields.flag("return_documents", True)
    shared = _finish(fields)
    name = service.require_name(shared.model)
    scores = await _scores(request, service, record, model, (query,) * len(documents), documents, shared)
    order = sorted(range(len(documents)), key=lambda at: -scores[at])[:top or None]
    results = [{"index": at,
                **({"document": {"text": documents[at], "multi_modal": None}} if shown else {}),
                "relevance_score": scores[at]} for at in order]
    used = dict.fromkeys(("prompt_tokens", "total_tokens"), record.prompt_tokens)
    return JSONAnswer({"id": record.id, "model": name, "usage": used, "results": results})


def _documents(fields: Fields) -> tuple[str, ...]:
    """Texts, or objects with a text."""
    found, expected = fields.take("documents"), "a list of texts, or of objects with a text"
    if not found: raise invalid(f"documents is missing or empty, expected {expected}", "documents",
                                "missing_field")
    if not isinstance(found, list): raise fields.wrong("documents", found, expected)
    if len(found) > MOST_INPUTS:
        raise invalid(f"documents has {len(found)} texts, expected at most {MOST_INPUTS}", "documents")
    given = [_document(each, at) if isinstance(each, dict) else each for at, each in enumerate(found)]
    texts = [unicode(each, "documents") for each in given if isinstance(each, str)]
    if len(texts) < len(given): raise fields.wrong("documents", found, expected)
    return tuple(texts)


def _document(found: dict[str, Any], at: int) -> str | None:
    fields = Fields(found, f"documents[{at}]")
    text = fields.text("text")
    if text is not None: fields.finish()
    return text


async def _scores(request: Request, service: Service, record: Record, model: EmbeddingClient,
                  first: Sequence[str], second: Sequence[str], shared: Shared) -> list[float]:
    """Returns the scores that a cross-encoder gives pairs of texts, or the cosines of their embeddings."""
    if (head := model.classifier) is None:
        unique = [*dict.fromkeys((*first, *second))]
        ids = await encode_texts(service, record, model, unique, shared.truncate)
        found = await until_disconnect(request, pool(service, model, ids))
        of = dict(zip(unique, model.finish(found, True), strict=True))
        return [float(np.dot(of[a], of[b])) for a, b in zip(first, second, strict=True)]
    if head.labels != 1:
        raise invalid(f"{service.names[0]} has {head.labels} labels, and scores are of one; to fix: POST "
                      "/classify, or serve a reranker", None, "unsupported_task")
    pairs = await service.aside(record.size, lambda: model.encode_pairs(first, second, shared.truncate,
                                                                        checkpoint))
    record.prompt_tokens = sum(map(len, pairs))
    found = await until_disconnect(request, pool(service, model, pairs))
    return [float(each) for each in head.scores(np.stack(found), shared.activate)[:, 0]]


def _require_embeddings(model: EmbeddingClient, dimensions: int | None) -> None:
    try: model.require_dimensions(dimensions)
    except NVError as error: raise api_error(error) from error


def _require_bounded(tokens: int, width: int, coded: bool) -> None:
    """Raises `APIError` for more numbers of tokens than an answer may have, before they are computed."""
    most = MAX_ANSWER_NUMBERS * (4 if coded else 1) // width
    if tokens <= most: return
    raise invalid(f"input has {tokens:,} tokens, and each has {width:,} numbers; expected: at most {most:,} "
                  "tokens in all texts; to fix: send fewer texts in a request, or ask for encoding_format "
                  "base64, which may have four times as many", "input", "too_many_tokens")


def _list_answer(record: Record, model: str, data: Sequence[dict[str, Any]]) -> Response:
    return JSONAnswer({"id": record.id, "object": "list", "created": int(time.time()), "model": model,
                         "data": [{"index": at, **each} for at, each in enumerate(data)],
                         "usage": Usage(record.prompt_tokens, 0).fields()})
