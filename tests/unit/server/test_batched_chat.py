"""Several conversations in one request, requests as SageMaker sends them, and scores of tokens."""
from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import LENGTH, NAME, FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.server import batched_chat
from tinygrad_nv.server.generative_scoring import ScoringRequest, compute_score
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.workers import INLINE_BYTES

BATCH, CHAT, SCORING, INVOCATIONS = ("/v1/chat/completions/batch", "/v1/chat/completions",
                                     "/generative_scoring", "/invocations")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXTS = ["a fox", "the big dog", "once upon a time"]


def said(*texts: str, role: str = "user") -> list[list[dict[str, Any]]]:
    return [[{"role": role, "content": text}] for text in texts]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)), limits=RequestLimits(context=LENGTH),
                           strict=False)) as running: yield running


def ask(server: Live, path: str, status: int = 200, **fields: Any) -> Any:
    answer = server.post(fields, path)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_choice_i_answers_conversation_i(server: Live):
    fields = {"max_tokens": 4, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    made = ask(server, BATCH, messages=said(*TEXTS), **fields, request_id="mine")
    alone = [ask(server, CHAT, messages=each, **fields) for each in said(*TEXTS)]
    assert made["choices"] == [{**each["choices"][0], "index": at} for at, each in enumerate(alone)]
    sums = {name: sum(each["usage"][name] for each in alone)
            for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert made["usage"] == alone[0]["usage"] | sums
    assert (made["id"], made["object"], made["model"]) == ("chatcmpl-mine", "chat.completion", NAME)
    assert made.keys() == alone[0].keys()


def test_fields_of_a_batch(server: Live):
    """An echo, a stream that is none, and what an answer has no place for."""
    told = said("a b", "c", role="assistant")
    plain, echoed = (ask(server, BATCH, messages=told, max_tokens=2, echo=echo) for echo in (False, True))
    for at, text in enumerate(("a b", "c")):
        front, after = (each["choices"][at]["message"]["content"] for each in (echoed, plain))
        assert front == text + after
    asked = {"messages": said("a"), "max_tokens": 2, "stream": True, "prompt_logprobs": 1}
    answer = server.post(asked, BATCH)
    assert answer.headers["x-ignored-fields"] == "prompt_logprobs, stream"
    assert answer.json()["prompt_logprobs"] is None


def test_the_event_loop_reads_small_batches_alone(server: Live, monkeypatch: pytest.MonkeyPatch):
    """The fields are read once for each conversation: what counts is the body's size times their number."""
    read, in_loop = batched_chat._read_requests, list[bool]()

    def note_loop(*args: Any) -> Any:
        try: asyncio.get_running_loop()
        except RuntimeError: in_loop.append(False)
        else: in_loop.append(True)
        return read(*args)
    monkeypatch.setattr(batched_chat, "_read_requests", note_loop)
    for texts in ("ab", "a" * 64):
        body = {"messages": said(*texts), "max_tokens": 1, "stop": ["x" * 1000]}
        assert len(str(body)) < INLINE_BYTES, "by itself small"
        ask(server, BATCH, **body)
    assert in_loop == [True, False]


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"messages": []}, "messages", "at least one conversation"), ({}, "messages", "a list of conversations"),
    ({"messages": said("a")[0]}, "messages[0]", "a list of messages"),
    ({"messages": [*said("a"), []]}, "messages[1]", "at least one message"),
    ({"messages": [*said("a"), [{"role": "user", "content": 5}]]}, "messages[1][0].content", "a string"),
    ({"messages": "a"}, "messages", "a list of conversations"),
    ({"messages": said(*"a" * 129)}, "messages", "at most 128"),
    ({"messages": said(*"a" * 128), "allowed_token_ids": [5] * 8193}, "messages", "at most 1048576 entries"),
    ({"messages": [*said("a"), [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]]}, "messages[1]", "images"),
    ({"messages": said("a"), "n": 2}, "n", "say 1"),
    ({"messages": said("a"), "use_beam_search": True}, "use_beam_search", "say false"),
    ({"messages": said("a"), "temperature": 3}, "temperature", "0 to 2")])
def test_batches_that_are_refused(server: Live, fields: dict[str, Any], param: str, words: str):
    error = ask(server, BATCH, 400, **fields)["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


def test_a_conversation_that_fails_ends_the_others():
    engine = FakeEngine(FakeModel(TEMPLATE), fails_after=2)
    with live(fake_service(engine)) as server:
        ask(server, BATCH, 500, messages=said(*TEXTS), max_tokens=50)
        assert not engine.running
        assert len(engine.closed) == 3


def test_invocations_are_those_of_the_endpoint_whose_fields_they_have(server: Live):
    for path, fields in (("/v1/completions", {"prompt": "a fox"}), (CHAT, {"messages": said("a fox")[0]})):
        made, wanted = (ask(server, each, **fields, max_tokens=3) for each in (INVOCATIONS, path))
        for name in ("choices", "object", "usage"): assert made[name] == wanted[name]
        assert made["id"].partition("-")[0] == wanted["id"].partition("-")[0]
    assert ask(server, INVOCATIONS, 400)["error"]["param"] == "prompt"


def test_scores_are_probabilities_of_the_first_label(server: Live):
    """The engine says that token t has the log probability −t / 10."""
    fields = {"query": "a", "items": ["b", "c d"], "label_token_ids": [5, 12, 30]}
    values = [math.exp(-each / 10) for each in (5, 12, 30)]
    for among, wanted in ((True, values[0] / sum(values)), (False, values[0])):
        made = ask(server, SCORING, **fields, apply_softmax=among, model=NAME)
        assert [(each["index"], each["object"]) for each in made["data"]] == [(0, "score"), (1, "score")]
        assert [each["score"] for each in made["data"]] == pytest.approx([wanted] * 2)
        assert made["usage"]["completion_tokens"] == 2
        assert (made["object"], made["id"].startswith("generative-scoring-")) == ("list", True)


@pytest.mark.parametrize(("values", "wanted"), [
    ((-1000.0, 0.0), 0.0), ((0.0, -1000.0), 1.0), ((-math.inf, -math.inf), 0.0), ((-800.0, -800.0), 0.5)])
def test_scores_of_extreme_log_probabilities(values: tuple[float, float], wanted: float):
    asked = ScoringRequest(None, "a", ("b",), (5, 6), True, False, True, "", 0)
    found = TokenLogprobs(5, "", values[0], 1, tuple((5 + at, "", value) for at, value in enumerate(values)))
    assert compute_score(found, asked) == wanted


def test_prompts_to_score_are_the_query_and_an_item(server: Live):
    engine: Any = server.service.engine
    encode = server.service.require_tokenizer().encode
    for given, wanted in (({}, [[*encode("a"), *encode(" b", special=False)]]),
                          ({"item_first": True}, [[*encode(" b", special=False), *encode("a")]]),
                          ({"add_special_tokens": False}, [encode("a", special=False)
                                                           + encode(" b", special=False)]),
                          ({"query": [5, 6], "items": [[7], [8, 9]]}, [[5, 6, 7], [5, 6, 8, 9]])):
        ask(server, SCORING, **{"query": "a", "items": [" b"], "label_token_ids": [5], **given})
        assert [each.ids for each, _ in engine.asked[-len(wanted):]] == wanted


@pytest.mark.parametrize(("fields", "param"), [
    ({"items": []}, "items"), ({"items": "a"}, "items"), ({"items": [5]}, "items"),
    ({"items": None}, "items"), ({"query": None}, "query"), ({"query": ["a", "b"]}, "query"),
    ({"label_token_ids": []}, "label_token_ids"), ({"label_token_ids": None}, "label_token_ids"),
    ({"label_token_ids": [99999]}, "label_token_ids"),
    ({"label_token_ids": [*range(129)]}, "label_token_ids"),
    ({"items": ["a"] * 129}, "items"), ({"priority": "x"}, "priority")])
def test_scores_that_are_refused(server: Live, fields: dict[str, Any], param: str):
    asked = {"query": "a", "items": ["b"], "label_token_ids": [5], **fields}
    error = ask(server, SCORING, 400, **asked)["error"]
    assert error["param"] == param, error


def test_named_tokens_have_log_probabilities(server: Live):
    named = {"logprob_token_ids": [7, 9], "max_tokens": 1}
    made = ask(server, "/v1/completions", prompt=[5, 6], logprobs=2, **named)["choices"][0]["logprobs"]
    assert made["top_logprobs"][0] == {made["tokens"][0]: -0.5, "<7>": -0.7, "<9>": -0.9}
    made = ask(server, CHAT, messages=said("a")[0], logprobs=True, **named)["choices"][0]["logprobs"]
    [entry] = made["content"]
    assert [each["logprob"] for each in entry["top_logprobs"]] == [-0.5, -0.7, -0.9]
    ask(server, CHAT, 400, messages=said("a")[0], **named)
