"""vLLM's endpoints for serving in parts: fields, statuses and parameters are those that a server of vLLM 0.32
with --enable-scale-out answered (SmolLM2).
"""
from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import LENGTH, NAME, FakeEngine, FakeModel, Live, fake_service, live

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
USER = [{"role": "user", "content": "a fox"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
IDS = [5, 6, 7]
# vLLM's answer, with its fields that are null
ANSWER = {"request_id", "model", "created", "usage", "prompt_logprobs", "prompt_token_id_logprobs",
          "prompt_token_ids", "mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params",
          "output_mode", "choices"}
CHOICE = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [5, 6],
          "routed_experts": None, "sampling_mask": None,
          "weight_versions": [{"version": "default", "start": 0, "end": 2}], "logprobs": None}
# what vLLM renders from a prompt alone
PARAMS = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
          "top_p": 1.0, "min_p": 0.0, "stop": [], "stop_token_ids": [], "output_kind": 2, "skip_clone": True,
          "bad_words": [], "skip_reading_prefix_cache": False}
GREEDY = {**{name: value for name, value in PARAMS.items() if name not in ("top_p", "min_p")},
          "temperature": 0.0}
REQUEST = {"token_offsets": None, "features": None, "content_parts": None, "reasoning_ended": None,
           "reasoning_parser_kwargs": None, "return_token_ids": None, "output_mode": "tokens",
           "stream": False, "stream_options": None, "cache_salt": None, "priority": 0,
           "kv_transfer_params": None, "ec_transfer_params": None}


def engine() -> FakeEngine: return FakeEngine(FakeModel(TEMPLATE))


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    made = fake_service(engine(), strict=False)
    made.scale_out = True
    with live(made) as running: yield running


def generate(server: Live, sampling: Any = None, **fields: Any) -> Any:
    body = {"token_ids": IDS, **fields,
            "sampling_params": {"max_tokens": 2, "temperature": 0, **(sampling or {})}}
    answer = server.post(body, GENERATE)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"): return answer.json()
    events = [line[6:] for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(each) for each in events]


def test_tokens_in_and_out(server: Live):
    made = generate(server)
    assert set(made) == ANSWER
    assert made["choices"] == [CHOICE]
    assert (made["model"], made["output_mode"]) == (NAME, "tokens")
    assert made["usage"] == {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2,
                             "prompt_tokens_details": None, "completion_tokens_details": None}
    assert made["request_id"].startswith("generate-tokens-")
    assert generate(server, request_id="mine")["request_id"] == "generate-tokens-mine"
    assert generate(server, return_token_ids=True)["prompt_token_ids"] == IDS
    assert [name for name in ANSWER if made[name] is None] == [
        name for name in ANSWER if name.endswith("_params") or name in (
            "prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")]


def test_texts_and_log_probabilities(server: Live):
    text = server.service.require_tokenizer().decode([5, 6])
    assert generate(server, output_mode="text")["choices"] == [{**CHOICE, "text": text}]
    [choice] = generate(server, {"logprobs": 1, "max_tokens": 1})["choices"]
    [found] = choice["logprobs"]["content"]
    assert set(found) == {"token_id", "logprob", "rank", "top_logprobs"}
    assert found["token_id"] == 5
    # the sampled token is the first one of these, too
    assert found["top_logprobs"][0] == {name: found[name] for name in ("token_id", "logprob", "rank")}
    [choice] = generate(server, {"logprobs": 1, "max_tokens": 1}, output_mode="text")["choices"]
    assert set(choice["logprobs"]["content"][0]) == {"token", "logprob", "bytes", "top_logprobs"}
    told = generate(server, {"prompt_logprobs": 1})["prompt_logprobs"]
    assert (len(told), told[0], set(told[1]["6"])) == (3, None, {"logprob", "rank", "decoded_token"})


def test_streams(server: Live):
    first, last = generate(server, stream=True)
    assert list(first["choices"][0]) == list(CHOICE)
    assert first["choices"] == [{**CHOICE, "finish_reason": None, "token_ids": [5], "weight_versions": None}]
    assert last["choices"] == [{**CHOICE, "token_ids": [6]}]
    assert set(first) == {"request_id", "usage", "output_mode", "choices"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    first, last, whole = generate(server, stream=True, return_token_ids=True, stream_options=options)
    assert (first["prompt_token_ids"], "prompt_token_ids" in last) == (IDS, False)
    assert [each["usage"]["completion_tokens"] for each in (first, last, whole)] == [1, 2, 2]
    assert whole["choices"] == []
    assert whole["usage"] == {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
    # prompt_logprobs are left out of streams
    assert len(generate(server, {"prompt_logprobs": 1}, stream=True)) == 2


def test_several_answers_and_defaults(server: Live):
    made = generate(server, {"n": 2, "temperature": 1, "seed": 5})
    assert [each["index"] for each in made["choices"]] == [0, 1]
    assert made["usage"]["completion_tokens"] == 4
    fake: Any = server.service.engine
    server.post({"token_ids": IDS, "sampling_params": {}}, GENERATE)
    assert (fake.asked[-1][1].max_tokens, fake.asked[-1][1].temperature) == (None, 1.0)


@pytest.mark.parametrize(("fields", "kind"), [
    ({"token_ids": None}, "Bad Request"), ({"token_ids": []}, "Bad Request"),
    ({"token_ids": [-1]}, "Bad Request"),
    ({"token_ids": "x"}, "Bad Request"), ({"token_ids": [99999]}, "BadRequestError"),
    ({"token_ids": [5] * LENGTH}, "BadRequestError"), ({"sampling_params": None}, "Bad Request"),
    ({"sampling_params": 5}, "Bad Request"), ({"sampling_params": {"max_tokens": -1}}, "BadRequestError"),
    ({"sampling_params": {"temperature": -1}}, "BadRequestError"), ({"stream": "x"}, "Bad Request"),
    ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "Bad Request"),
    ({"request_id": 5}, "Bad Request"),
    # refused here: what other servers computed is not read
    ({"features": {"mm_hashes": {"image": ["a"]}}}, "BadRequestError"),
    ({"content_parts": [{"type": "image_url"}]}, "BadRequestError"),
    ({"kv_transfer_params": {"a": 1}}, "BadRequestError"),
    ({"ec_transfer_params": {"a": 1}}, "BadRequestError")])
def test_what_is_refused(server: Live, fields: dict[str, Any], kind: str):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 2}, **fields}
    answer = server.post(body, GENERATE)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, kind), answer.text


def test_unknown_fields_are_ignored(server: Live):
    asked = {"token_ids": IDS, "sampling_params": {"max_tokens": 1, "other": 1}, "more": 1}
    answer = server.post(asked, GENERATE)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "more, other")
    assert server.post({"token_ids": IDS, "sampling_params": {}, "model": "x"}, GENERATE).status_code == 404
    assert server.http.get(GENERATE).status_code == 405


def test_requests_are_aborted():
    fake = engine()
    fake.pause_s = 0.02
    made = fake_service(fake)
    made.scale_out = True
    with live(made) as server:
        found: list[Any] = []
        def ask() -> None: found.append(generate(server, {"max_tokens": 400}, request_id="mine"))
        asking = threading.Thread(target=ask)
        asking.start()
        while not fake.running: time.sleep(0.01)
        assert server.post({"request_ids": ["other"]}, ABORT).status_code == 200
        time.sleep(0.1)
        answer = server.post({"request_ids": ["generate-tokens-mine"]}, ABORT)
        assert (answer.status_code, answer.content) == (200, b"")
        asking.join(5)
        [choice] = found[0]["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 400
        assert (fake.running, made.generating) == (set(), {})
        assert server.post({}, ABORT).status_code == 400
        assert server.post({"request_ids": ["a"] * 65537}, ABORT).status_code == 400


def test_prompts_are_rendered(server: Live):
    tokenizer = server.service.require_tokenizer()
    [made] = server.post({"prompt": "a fox"}, "/v1/completions/render").json()
    assert made.pop("request_id").startswith("cmpl-")
    del made["sampling_params"]
    assert made == {**REQUEST, "model": None, "token_ids": tokenizer.encode("a fox")}
    [made] = server.post({"prompt": "a fox", "temperature": 1}, "/v1/completions/render").json()
    assert made["sampling_params"] == PARAMS
    [made] = server.post({"prompt": "a fox", "max_tokens": 5, "temperature": 0, "stop": "a", "model": NAME},
                         "/v1/completions/render").json()
    assert (made["sampling_params"], made["model"]) == ({**GREEDY, "max_tokens": 5, "stop": ["a"]}, NAME)
    several = server.post({"prompt": ["a", "b"], "request_id": "q"}, "/v1/completions/render").json()
    assert [each["request_id"] for each in several] == ["cmpl-q-0", "cmpl-q-1"]
    [made] = server.post({"prompt": "a fox", "return_token_offsets": True, "add_special_tokens": False},
                         "/v1/completions/render").json()
    assert made["token_offsets"] == [[*each] for each in
                                     tokenizer.backend.encode("a fox", add_special_tokens=False).offsets]


def test_other_parameters_are_rendered(server: Live):
    """The parameters are as vLLM rendered them, but for the constraint, which another request had."""
    asked = {"prompt": "a", "max_tokens": 3, "logprobs": 1, "n": 2, "seed": 5, "top_k": 4, "min_tokens": 1,
             "logit_bias": {"5": 1}, "stream": True, "stream_options": {"include_usage": True},
             "stop_token_ids": [5], "bad_words": ["x"], "ignore_eos": True,
             "include_stop_str_in_output": True, "skip_special_tokens": False, "presence_penalty": 1,
             "allowed_token_ids": [5, 6], "cache_salt": "s", "request_id": "q", "temperature": 1}
    [made] = server.post(asked, "/v1/completions/render").json()
    assert made["sampling_params"] == {
        "n": 2, "presence_penalty": 1.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_p": 1.0, "top_k": 4, "min_p": 0.0, "seed": 5, "stop": [],
        "stop_token_ids": [5], "ignore_eos": True, "max_tokens": 3, "min_tokens": 1, "logprobs": 1,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True, "output_kind": 1, "skip_clone": True, "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5, 6], "bad_words": ["x"], "skip_reading_prefix_cache": False}
    assert (made["stream"], made["cache_salt"]) == (True, "s")
    assert made["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}}
    [made] = server.post({"prompt": "a", "structured_outputs": {"json": schema}},
                         "/v1/completions/render").json()
    told = made["sampling_params"]["structured_outputs"]
    assert told["json"] == schema
    assert set(told) == {"json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace",
                         "disable_additional_properties", "whitespace_pattern", "structural_tag"}


@pytest.mark.parametrize(("path", "fields", "prefix"), [
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}, "chatcmpl-"),
    ("/v1/messages", {"messages": USER, "max_tokens": 3}, "chatcmpl-"),
    ("/v1/responses", {"input": "a fox", "max_output_tokens": 3}, "resp_")])
def test_conversations_are_rendered(server: Live, path: str, fields: dict[str, Any], prefix: str):
    ids = server.service.require_tokenizer().encode("a fox", special=False)
    made = server.post({**fields, "temperature": 0}, path + "/render").json()
    assert made["request_id"].startswith(prefix)
    assert (made["token_ids"], made["reasoning_ended"]) == (ids, False)
    assert made["sampling_params"] == {**GREEDY, "max_tokens": 3}
    # what is rendered runs, with the same answer
    run = server.post(made, GENERATE).json()
    assert run["choices"][0]["token_ids"] == [ids[at % len(ids)] for at in range(3)]
    assert server.post({**fields, "model": "x"}, path + "/render").status_code == 404


def test_an_answer_may_fill_the_context(server: Live):
    made = server.post({"messages": USER}, "/v1/chat/completions/render").json()
    assert made["sampling_params"]["max_tokens"] == LENGTH - len(made["token_ids"])


def test_what_is_not_rendered(server: Live):
    for path, fields in (("/v1/chat/completions", {"messages": USER, "use_beam_search": True}),
                         ("/v1/completions", {"prompt": "a", "use_beam_search": True}),
                         ("/v1/completions", {"prompt": {}}),
                         ("/v1/completions", {"prompt": "a", "max_tokens": -1}),
                         ("/v1/chat/completions", {"messages": 5}),
                         ("/v1/responses", {"input": "a", "previous_response_id": "resp_x"})):
        assert server.post(fields, path + "/render").status_code == 400


def test_it_is_off_unless_it_was_asked_for():
    with live(fake_service(engine())) as server:
        for path in (GENERATE, ABORT, "/v1/completions/render", "/v1/chat/completions/render"):
            answer = server.post({}, path)
            assert (answer.status_code, "--enable-scale-out" in answer.text) == (404, True)


def test_an_event_ends_a_stream_that_waits():
    from tinygrad_nv.engine.outputs import Delta
    from tinygrad_nv.server.scale_out.generating import until_aborted
    closed = []

    async def deltas():
        try:
            yield 0, Delta(0, "a", (5,))
            await asyncio.sleep(60)
        finally: closed.append(True)

    async def run() -> list[Any]:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, event.set)
        return [each async for each in until_aborted(deltas(), event, 2)]
    found = asyncio.run(run())
    assert [(at, each.finish_reason) for at, each in found] == [(0, None), (0, "abort"), (1, "abort")]
    assert closed == [True]
