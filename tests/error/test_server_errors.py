"""Bad requests: the right status, an error of OpenAI's shape that helps, and a server that goes on."""
from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live, until
from tinygrad_nv.errors import EngineError
from tinygrad_nv.server.limits import RequestLimits

openai = lazy("openai")

LIMITS = RequestLimits(body_bytes=1 << 20, schema_bytes=4096, header_s=0.3, body_s=0.3, choices=64)
JSON = {"Content-Type": "application/json"}
# vLLM 0.32's; a body or a field of another form is "Bad Request" instead, and other statuses are named so
TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError",
         503: "ServiceUnavailableError"}
FORMS = {"invalid_json", "invalid_utf8", "wrong_type", "missing_field", "unsupported_media_type"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(limits=LIMITS, strict=True)) as running: yield running


def explained(answer: httpx.Response, status: int, *words: str, code: str | None = None,
              param: str | None = None) -> None:
    """An error of OpenAI's shape with this status, all of `words` in its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    data = answer.json()
    assert set(data) == {"error"}
    error = data["error"]
    assert set(error) - {"reason"} == {"message", "type", "param", "code"}
    named = TYPES.get(status, HTTPStatus(status).phrase)
    kind = "Bad Request" if error.get("reason") in FORMS else named
    assert (error["type"], error["code"]) == (kind, status)
    assert [word for word in words if word not in error["message"]] == [], error["message"]
    if code is not None: assert error["reason"] == code
    if param is not None: assert error["param"] == param


def serves(server: Live) -> None:
    """It goes on."""
    done = server.post({"prompt": "Once", "max_tokens": 1})
    assert done.status_code == 200


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth): schema = {"type": "object", "properties": {"a": schema}}
    return schema


BODIES = [
    (b"", "not JSON"), (b"{", "not JSON"), (b'{"prompt": "a",}', "not JSON"), (b'"text"', "a string, not"),
    (b"[]", "a list, not"), (b"null", "null, not"), (b'{"prompt": "\xff\xfe"}', "not UTF-8: byte 0xff"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN is not"),
    (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity is not"),
    (b'{"prompt": "a", "temperature": 1e999}', "1e999 is beyond"),
    (b'{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
    (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    (b'{"prompt": "a", "\\ud800": 1}', "unknown field '\\ud800'"),
    (b'{"prompt": "a", "stream_options": {"\\ud800": 1}}', "stream_options"),
    (b'{"prompt": "a", "' + b"x" * 900_000 + b'": 1}', "unknown field 'xxx"),
]


@pytest.mark.parametrize(("body", "words"), BODIES, ids=[words for _, words in BODIES])
def test_bodies_that_are_no_request(server: Live, body: bytes, words: str):
    explained(server.http.post("/v1/completions", content=body, headers=JSON), 400, words)
    serves(server)


FIELDS = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": []}, "prompt", "empty list"), ({"prompt": 7}, "prompt", "a whole number, expected a string"),
    ({"prompt": ["a", 1]}, "prompt", "mixed"), ({"prompt": [-1]}, None, "-1"),
    ({"prompt": [[1], []]}, None, "no tokens"), ({"prompt": [10 ** 9]}, None, "1000000000"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens is -1, expected at least 1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"), ({"max_tokens": "x"}, "max_tokens", "a string"),
    ({"max_tokens": 1.5}, "max_tokens", "a whole number"), ({"max_tokens": [5]}, "max_tokens", "a list"),
    ({"temperature": -0.1}, "temperature", "0 to 2"),
    ({"temperature": 2.1}, "temperature", "0 to 2"), ({"temperature": "hot"}, "temperature", "a string"),
    ({"temperature": 10 ** 400}, "temperature", "beyond"), ({"temperature": 1e300}, "temperature", "1e+300"),
    ({"top_p": 0}, "top_p", "(0, 1]"), ({"top_p": 1.1}, "top_p", "0 to 1"), ({"top_k": -2}, "top_k", "-1"),
    ({"min_p": 2}, "min_p", "0 to 1"), ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"seed": 1 << 65}, "seed", "expected -9223372036854775808 to"),
    ({"n": 0}, "n", "at least 1"), ({"n": 10 ** 9}, "n", "at most 64"),
    ({"prompt": ["a"] * 33, "n": 2}, "n", "66 choices"),
    ({"best_of": 4, "temperature": 1}, "best_of", "more than n, 1"),
    ({"suffix": "end"}, "suffix", "not served"), ({"logprobs": 21}, "logprobs", "0 to 20"),
 ({"stop": ""}, "stop", "non-empty"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"), ({"stop": [1]}, "stop", "list of strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids", "whole numbers"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "a number"),
    ({"stream": "maybe"}, "stream", "true or false"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"model": "other"}, "model", "not served"),
    ({"use_beam_search": True, "stream": True}, "stream", "stream and use_beam_search are both given"),
    ({"use_beam_search": True, "stop": "a"}, "stop", "stop and use_beam_search are both given"),
    ({"use_beam_search": True, "n": 11}, "n", "beam_width is 11; expected: a whole number from 1 to 10"),
    ({"use_beam_search": True, "max_tokens": 512}, "max_tokens", "expected at most 512 together"),
    ({"length_penalty": 2.0}, "length_penalty", "leave it out, or say 1.0"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "without logprobs"),
    ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids", "at most 128"),
    ({"repetition_detection": {"max_pattern_size": 2}}, "repetition_detection", "min_count ≥ 2"),
    ({"repetition_detection": 5}, "repetition_detection", "an object"),
    ({"stream_interval": 0}, "stream_interval", "at least 1"),
    ({"truncation_side": "up"}, "truncation_side", "one of left, right"),
    ({"prompt_embeds": "AA=="}, "prompt_embeds", "is not served"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "expected: a whole number ≥ 1, or -1"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "leave it out, or say true"),
    ({"skip_special_tokens": 2}, "skip_special_tokens", "true or false"),
    ({"store": True}, "store", "POST /v1/responses"),
    ({"service_tier": "flex"}, "service_tier", 'or say "auto" or "default"'),
    ({"user": 5}, "user", "expected a string"),
    ({"cache_salt": ""}, "cache_salt", "at least one character"),
    ({"bad_words": [""]}, "bad_words", "non-empty"), ({"bad_words": "a"}, "bad_words", "a list of strings"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
    ({"structured_outputs": {}}, "structured_outputs", "no constraint"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "no constraint"),
    ({"priority": 1 << 40}, "priority", "priority"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, None, "schema is missing"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "expected one"),
    ({"guided_json": "{"}, "guided_json", "not JSON"), ({"guided_choice": []}, "guided_choice", "none empty"),
    ({"guided_regex": 5}, "guided_regex", "expected: a text"),
    ({"guided_json": {"enum": ["x" * 5000]}}, "guided_json", "more than 4096 bytes"),
    ({"guided_json": nested(500)}, "guided_json", "bytes"),
]


@pytest.mark.parametrize(("fields", "param", "words"), FIELDS, ids=[str(each[0])[:40] for each in FIELDS])
def test_fields_out_of_range(server: Live, fields: dict[str, Any], param: str | None, words: str):
    body = json.dumps({"model": NAME, "prompt": "Once", **fields})
    status = 404 if fields.get("model") else 400
    answer = server.http.post("/v1/completions", content=body, headers=JSON)
    explained(answer, status, words, param=param)
    serves(server)


def test_many_names_with_a_duplicate_do_not_block_others(server: Live):
    body = "{" + ",".join(f'"{i}":1' for i in range(60_000)) + ',"59999":1}'
    begun = time.monotonic()
    explained(server.http.post("/v1/completions", content=body, headers=JSON), 400, "'59999' is given twice")
    assert time.monotonic() - begun < 5     # looked for by pairs, it takes a minute
    serves(server)


TOOL = {"type": "function", "function": {"name": "look"}}
CHATS = [
    ({"messages": None}, "messages is missing"), ({"messages": []}, "messages is empty"),
    ({"messages": "hi"}, "list of objects"), ({"messages": ["hi"]}, "messages[0] is a string"),
    ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role is missing"),
    ({"messages": [{"content": "a"}]}, "messages[0].role is missing"),
    ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role is a whole number"),
    ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "content is a whole number"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads nothing else"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text is missing"),
    ({"messages": [{"role": "user", "content": "a", "colour": "red"}]}, "unknown field 'messages[0].colour'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.name is missing"),
    ({"top_logprobs": 3}, "needs logprobs"), ({"logprobs": 2}, "true or false"),
    ({"max_completion_tokens": 0}, "at least 1"),
    ({"tools": [{"type": "function"}]}, "no function"),
    ({"tools": [{"type": "code"}]}, "type is 'code', expected 'function'"),
    ({"tools": [{"type": "function", "function": {}}]}, "name is missing"),
    ({"tool_choice": "required"}, "without tools"), ({"tool_choice": "auto"}, "without tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "hear"}}}, "'hear'"),
    ({"tools": [TOOL], "tool_choice": "perhaps"}, "not understood"),
    ({"chat_template": "{{ 1 }}"}, "not run"),
    ({"chat_template_kwargs": {"messages": []}}, "has messages, which the server sets"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "has add_generation_prompt"),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "half a surrogate pair"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "both true"),
    ({"reasoning_effort": "much"}, "expected one of none, minimal, low"),
    ({"reasoning_effort": "high"}, "reasoning has no switch"), ({"verbosity": "low"}, "no such variable"),
    ({"verbosity": 3}, "verbosity is a whole number"), ({"prediction": "x"}, "prediction is a string"),
    ({"prediction": {"type": "x"}}, "expected 'content'"),
    ({"prediction": {"type": "content"}}, "content is missing"),
    ({"store": True}, "only responses are kept"), ({"include_reasoning": "maybe"}, "true or false"),
    ({"functions": [{}]}, "name is missing"), ({"functions": [{"name": "f"}], "tools": [TOOL]}, "both given"),
    ({"functions": [{"name": "f"}], "function_call": "g"}, "expected 'none', 'auto'"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "'g'"),
    ({"prompt": "a"}, "unknown field 'prompt'"),
]


@pytest.mark.parametrize(("fields", "words"), CHATS, ids=[each[1] for each in CHATS])
def test_conversations_out_of_range(server: Live, fields: dict[str, Any], words: str):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    sent = json.dumps(body)
    explained(server.http.post("/v1/chat/completions", content=sent, headers=JSON), 400, words)
    serves(server)


def test_a_prompt_longer_than_the_context(server: Live):
    explained(server.post({"prompt": "Once " * 5000}), 400, "tokens", "at most 511")


def test_a_prompt_far_longer_than_the_context_is_not_tokenised(server: Live):
    begun = time.monotonic()
    explained(server.post({"prompt": "a" * 900_000}), 400, "900000 characters", "at most 511 tokens")
    assert time.monotonic() - begun < 1     # its tokens take 3 s, and 200 MB
    serves(server)


def test_a_prompt_of_ten_megabytes(server: Live):
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    begun = time.monotonic()
    explained(server.http.post("/v1/completions", content=body, headers=JSON), 413, "1048576 bytes")
    # and one that does not say how large it is
    parts = iter([body[at:at + 100_000] for at in range(0, len(body), 100_000)])
    explained(server.http.post("/v1/completions", content=parts, headers=JSON), 413, "1048576 bytes",
              code="body_too_large")
    assert time.monotonic() - begun < 5
    serves(server)


def test_wrong_paths_methods_and_types(server: Live):
    explained(server.http.get("/v2/completions"), 404, "/v2/completions", code="not_found")
    answer = server.http.get("/v1/completions")
    explained(answer, 405, "POST", code="method_not_allowed")
    assert answer.headers["allow"] == "POST"
    explained(server.http.post("/v1/completions", content=b"prompt=a"), 400, "application/json")
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    explained(server.http.post("/v1/completions", content=b"{}", headers=form), 400, "urlencoded")
    serves(server)


def test_keys():
    with live(fake_service(keys=frozenset({"secret"}))) as server:
        explained(server.post({"prompt": "a"}), 401, "is missing", "Bearer KEY", code="invalid_api_key")
        for wrong in (b"Bearer b", b"secret", b"Bearer \xe9", b"Basic secret"):
            answer = server.post({"prompt": "a"}, headers={"Authorization": wrong})
            explained(answer, 401, "is wrong", code="invalid_api_key")
        right = server.post({"prompt": "a"}, headers={"Authorization": "Bearer secret"})
        assert right.status_code == 200


def talk(server: Live, *parts: bytes, pause_s: float = 0.05) -> bytes:
    """What comes back for bytes sent one part after another, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        for part in parts:
            try: line.sendall(part)
            except OSError: break
            time.sleep(pause_s)
        out = b""
        try:
            while got := line.recv(65536): out += got
        except ConnectionResetError: pass
    return out


def shaped(raw: bytes, status: bytes, word: str) -> None:
    """An error as above, of raw bytes."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status), raw
    assert word in json.loads(body)["error"]["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_headers_that_do_not_come_are_not_waited_for(server: Live):
    slow = [HEAD[at:at + 4] for at in range(0, 80, 4)]
    shaped(talk(server, *slow), b"408 ", "headers did not arrive within 0.3 s")
    assert talk(server, b"").startswith(b"HTTP/1.1 408")  # nothing at all
    # the second request of a connection has no more time than the first
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answers = talk(server, first, b"GET /hea")
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answers
    serves(server)


def test_a_body_that_does_not_come_is_not_waited_for(server: Live):
    body = b'{"prompt": "' + b"a" * 100
    parts = [HEAD + b"Content-Length: 1000\r\n\r\n", *[body[at:at + 8] for at in range(0, 100, 8)]]
    shaped(talk(server, *parts), b"408 ", "body did not arrive within 0.3 s")
    serves(server)


def test_what_is_not_http(server: Live):
    shaped(talk(server, b"\x16\x03\x01\x02\x00 hello\r\n\r\n"), b"400 ", "HTTP")
    shaped(talk(server, b"GET / HTTP/1.1\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n"), b"431 ", "64 KiB")
    serves(server)


def test_a_client_that_leaves_before_its_body_is_complete(server: Live):
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.05)
    until(lambda: server.service.active == 0)
    serves(server)


def test_a_full_queue():
    engine = FakeEngine(FakeModel(), pause_s=0.02, limit=2)
    with live(fake_service(engine)) as server:
        asked = {"prompt": "Once", "max_tokens": 1000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as one, \
                server.http.stream("POST", "/v1/completions", json=asked) as two:
            kept = one.iter_lines(), two.iter_lines()
            for lines in kept: next(lines)
            answer = server.post(asked)
            explained(answer, 429, "waits", code="queue_full")
            assert answer.headers["retry-after"] == "1"
            with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client, \
                    pytest.raises(openai.RateLimitError): client.completions.create(model=NAME, prompt="a")
        until(lambda: not engine.running)
        serves(server)


def test_an_answer_that_takes_too_long():
    engine = FakeEngine(FakeModel(), pause_s=0.05)
    with live(fake_service(engine, limits=RequestLimits(request_s=0.3))) as server:
        asked = {"prompt": "Once", "max_tokens": 1000}
        explained(server.post(asked), 504, "0.3 s", code="request_timeout")
        events = streamed_events(server, {**asked, "stream": True})
        assert "request_timeout" in events[-2]
        assert events[-1] == "data: [DONE]"
        until(lambda: not engine.running)


def streamed_events(server: Live, asked: dict[str, Any]) -> list[str]:
    with server.http.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def test_an_answer_that_breaks_off():
    engine = FakeEngine(FakeModel(), fails_after=2)
    with live(fake_service(engine)) as server:
        asked = {"prompt": "Once upon a time", "max_tokens": 5}
        explained(server.post(asked), 500, "NaN", "other weights",
                  code="engine_error")
        events = streamed_events(server, {**asked, "stream": True})
        assert len(events) == 4
        assert json.loads(events[2][6:])["error"]["reason"] == "engine_error"
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client, \
                pytest.raises(openai.APIError, match="NaN"):
            list(client.completions.create(model=NAME, prompt="a", stream=True))
        # its first token is as far as this one goes
        assert server.post({**asked, "max_tokens": 1}).status_code == 200


def test_an_engine_that_has_stopped():
    engine = FakeEngine(FakeModel())
    with live(fake_service(engine)) as server:
        engine.failure = EngineError("the engine stopped", "", "load the model again")
        explained(server.http.get("/health"), 503, "stopped", code="engine_error")


def test_an_unexpected_failure(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with live(fake_service()) as server:
        def broken(*_: object, **__: object) -> None: raise KeyError("secret detail")
        monkeypatch.setattr(server.service.engine, "generate", broken)
        answer = server.post({"prompt": "a"})
        explained(answer, 500, "internal error", code="internal_error")
        assert "secret" not in answer.text
        monkeypatch.undo()
        serves(server)


def test_a_drain_that_lasts_too_long_ends_what_runs():
    engine = FakeEngine(FakeModel(), pause_s=0.02)
    with live(fake_service(engine, limits=RequestLimits(drain_s=0.2))) as server:
        asked = {"prompt": "Once", "max_tokens": 100_000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.drain()
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["reason"] == "aborted"
        assert rest[-1] == "data: [DONE]"


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_left():
    engine = FakeEngine(FakeModel())
    with live(fake_service(engine, LIMITS)) as server:
        body = json.dumps({"prompt": "Once " * 20, "max_tokens": 500, "n": 64, "logprobs": 20,
                           "stream": True})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body.encode()))
            until(lambda: engine.running)
            until(lambda: engine.closed)        # 32,000 chunks of 1 KB do not fit between us
            until(lambda: server.service.active == 0)
        assert not engine.running
        serves(server)


def test_a_body_behind_its_answer_is_not_waited_for():
    with live(fake_service(limits=LIMITS)) as server, \
            socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"): answer += client.recv(4096)
        assert b" 200 " in answer
        client.sendall(b"x")
        begun = time.monotonic()
        assert client.recv(4096) == b""
        assert time.monotonic() - begun < 5     # uvicorn would wait for ever


def test_a_body_of_two_lengths_is_refused(server: Live):
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall(HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
                       b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while data := client.recv(4096): answer += data
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1   # the rest is not a request
    serves(server)
