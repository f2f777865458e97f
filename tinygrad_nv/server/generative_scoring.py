"""POST /generative_scoring: how probable a model holds a token after each of several texts.

Protocol: vLLM's fields. A prompt is the `query` and one of `items` (before it with `item_first`), texts or
token ids. Its score is the probability that the first of `label_token_ids` comes next, among these labels or,
without `apply_softmax`, among all tokens. A prompt that the context cannot hold is refused; vLLM cuts it.
"""
from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.engine.prompts import TextOrTokens
from tinygrad_nv.engine.sampling import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.protocol import prompts
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import until_disconnect
from tinygrad_nv.server.workers import checkpoint

PREFIX = "generative-scoring-"


@dataclass(frozen=True)
class ScoringRequest:
    """Request of /generative_scoring. `special`: a query gets the tokenizer's special tokens."""
    model: str | None
    query: TextOrTokens
    items: tuple[TextOrTokens, ...]
    labels: tuple[int, ...]
    among_labels: bool
    item_first: bool
    special: bool
    salt: str
    priority: int


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    asked = await service.read(record, lambda: _read_request(data, service.limits))
    name = record.model = service.require_name(asked.model)
    tokenizer = service.require_tokenizer()
    if bad := [each for each in asked.labels if each >= 1 << 31 or tokenizer.unknown(each)]:
        raise invalid(f"label_token_ids has the id {str(bad[0])[:20]}, which is out of vocabulary; to "
                      "fix: send ids of this model's tokenizer", "label_token_ids")
    prompts = await service.aside(record.size, lambda: _make_prompts(service, tokenizer, asked))
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=[*asked.labels])

    async def score() -> list[float]:
        scores = [0.0] * len(prompts)
        async for at, delta in service.run(prompts, params, asked.priority, record, asked.salt):
            for each in delta.logprobs: scores[at] = compute_score(each, asked)
        return scores
    scores = await until_disconnect(request, score())
    return JSONAnswer({"id": record.answer_id(PREFIX, data.get("request_id")), "object": "list",
                       "created": int(time.time()), "model": name,
                       "data": [{"index": at, "object": "score", "score": each}
                                for at, each in enumerate(scores)],
                       "usage": service.usage(record).fields()})


def _read_request(data: dict[str, Any], limits: RequestLimits) -> ScoringRequest:
    fields = Fields(data)
    queries, labels = prompts(fields, "query"), fields.wholes("label_token_ids")
    if len(queries) != 1: raise invalid("query is a list of prompts, expected one", "query")
    items = fields.left.get("items")
    if not isinstance(items, list) or isinstance(next(iter(items), ""), int):
        raise fields.wrong("items", items, "a list of texts, or of lists of token ids")
    texts = prompts(fields, "items")
    if len(texts) > limits.choices:
        raise invalid(f"items has {len(texts)} entries, expected at most {limits.choices}", "items")
    if not labels or len(labels) > MAX_LOGPROB_TOKEN_IDS:
        raise invalid(f"label_token_ids has {len(labels or ())} token ids, expected 1 to "
                      f"{MAX_LOGPROB_TOKEN_IDS}", "label_token_ids")
    made = ScoringRequest(fields.text("model"), queries[0], texts, labels, fields.flag("apply_softmax", True),
                          fields.flag("item_first"), fields.flag("add_special_tokens", True),
                          fields.text("cache_salt") or "", fields.whole("priority", -(1 << 31), 1 << 31) or 0)
    fields.text("request_id")
    fields.finish()
    return made


def _make_prompts(service: Service, tokenizer: Tokenizer, asked: ScoringRequest) -> list[list[int]]:
    """The tokens of each prompt. Items get no special tokens, as vLLM's."""
    def encode(given: TextOrTokens, special: bool) -> Sequence[int]:
        checkpoint()
        if not isinstance(given, str): return given
        tokenizer.require_fitting(given, service.model.length - 1)
        return tokenizer.encode(given, special=special)
    query = encode(asked.query, asked.special)
    made = []
    for item in asked.items:
        both = (encode(item, False), query) if asked.item_first else (query, encode(item, False))
        made.append(service.model.tokenize([*both[0], *both[1]]))
    return made


def compute_score(found: TokenLogprobs, asked: ScoringRequest) -> float:
    """Returns the probability of the first label; 0 where none of them can come."""
    values = {token: value for token, _, value in found.top}
    first = values[asked.labels[0]]
    if not asked.among_labels: return math.exp(first)
    most = max(values.values())
    if most == -math.inf: return 0.0
    return math.exp(first - most) / sum(math.exp(each - most) for each in values.values())
