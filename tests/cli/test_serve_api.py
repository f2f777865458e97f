"""The endpoints, driven by the openai client, over an engine that repeats its prompt."""
from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import (
    LENGTH,
    NAME,
    FakeEngine,
    FakeModel,
    Live,
    fake_service,
    live,
    until,
)
from tinygrad_nv.errors import TokenizerError

openai = lazy("openai")

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service()) as running: yield running


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with connected(server) as made: yield made


def connected(server: Live, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def words(text: str) -> list[int]: return FakeModel().tokenizer.encode(text)


def test_a_text_is_completed(client: openai.OpenAI):
    done = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3)
    count = len(words(PROMPT))
    assert (done.object, done.model, done.choices[0].finish_reason) == ("text_completion", NAME, "length")
    assert done.choices[0].text == "".join(FakeModel().tokenizer.decode([i]) for i in words(PROMPT)[:3])
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (count, 3)
    assert done.usage.total_tokens == count + 3


def test_max_tokens_is_16_unless_given(client: openai.OpenAI):
    done = client.completions.create(model=NAME, prompt=PROMPT)
    assert done.usage is not None
    assert done.usage.completion_tokens == 16


@pytest.mark.parametrize(("prompt", "count"), [(PROMPT, 1), ([PROMPT, "The end"], 2), ([5, 6, 7], 1),
                                               ([[5, 6], [7, 8], [9]], 3)])
def test_prompts_of_every_kind(client: openai.OpenAI, prompt: object, count: int):
    done = client.completions.create(model=NAME, prompt=prompt, max_tokens=2, n=2)
    assert [choice.index for choice in done.choices] == list(range(2 * count))
    assert all(choice.text for choice in done.choices)
    # both choices of a prompt say the same, those of different prompts do not
    texts = [choice.text for choice in done.choices]
    assert texts[0::2] == texts[1::2]
    assert len(set(texts)) == count


def test_echo_comes_first_and_once(client: openai.OpenAI):
    plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4).choices[0].text
    assert client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, echo=True).choices[0].text \
        == PROMPT + plain
    parts = [chunk.choices[0].text for chunk in
             client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, echo=True, stream=True)]
    assert "".join(parts) == PROMPT + plain


def test_a_completion_streams(client: openai.OpenAI):
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, n=2)
    chunks = list(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, n=2, stream=True,
                                            stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    for at in range(2):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == at]
        assert "".join(c.text for c in mine) == whole.choices[at].text
        assert [c.finish_reason for c in mine] == [None] * 5 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_what_happens_anyway_may_be_asked_for(client: openai.OpenAI):
    asked = {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1, "max_token": None}
    client.completions.create(model=NAME, prompt="Once", extra_body={"add_special_tokens": True, **asked})
    client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Once"}], max_tokens=2,
                                   modalities=["text"], extra_body=asked)


def test_every_chunk_tells_the_usage_so_far(client: openai.OpenAI):
    options = {"include_usage": True, "continuous_usage_stats": True}
    texts = client.completions.create(model=NAME, prompt="Once upon", max_tokens=3, stream=True,
                                      stream_options=options)
    assert [chunk.usage.completion_tokens for chunk in texts] == [1, 2, 3, 3]
    turns = client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "Once"}],
                                           max_tokens=3, stream=True, stream_options=options)
    # the prompt's first token, which is said again, has no text
    assert [chunk.usage.completion_tokens for chunk in turns if chunk.usage] == [0, 2, 3, 3]


def test_token_ids_are_told_to_who_asks(client: openai.OpenAI):
    asked = {"model": NAME, "prompt": [[5, 6], [7]], "max_tokens": 3,
             "extra_body": {"return_token_ids": True}}
    whole = [choice.model_extra for choice in client.completions.create(**asked).choices]
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in whole] == [([5, 6], [5, 6, 5]),
                                                                                 ([7], [7, 7, 7])]
    parts = [choice for chunk in client.completions.create(**asked, stream=True) for choice in chunk.choices]
    assert [part.model_extra["token_ids"] for part in parts if part.index == 0] == [[5], [6], [5]]
    assert sum(part.model_extra["prompt_token_ids"] is not None for part in parts) == 2


def test_echo_without_a_tokenizer_is_refused():
    model = FakeModel()

    def none() -> None: raise TokenizerError("m has no tokenizer.json", "one", "add it")
    model.require_tokenizer = none      # type: ignore[method-assign, assignment]
    with (live(fake_service(FakeEngine(model))) as server, connected(server) as client,
          pytest.raises(openai.BadRequestError, match=r"no tokenizer\.json")):
        client.completions.create(model=NAME, prompt=[5, 6], echo=True)


def test_a_conversation_without_a_tokenizer_is_refused():
    model = FakeModel()

    def none() -> None: raise TokenizerError("m has no tokenizer.json", "one", "add it")
    model.require_tokenizer = none      # type: ignore[method-assign, assignment]
    with live(fake_service(FakeEngine(model))) as server:
        for path, asked in (("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
                            ("responses", {"input": "a", "truncation": "auto"}),
                            ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})):
            answer = server.post(asked, "/v1/" + path)
            assert (answer.status_code, "no tokenizer.json" in answer.text) == (400, True)


def test_logprobs_of_a_completion(client: openai.OpenAI):
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, logprobs=2).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == [-0.5] * 3
    assert found.tokens is not None
    assert found.text_offset == [0, len(found.tokens[0]), len(found.tokens[0] + found.tokens[1])]
    assert found.top_logprobs is not None
    assert [set(each) for each in found.top_logprobs] == [{token} for token in found.tokens]


def test_a_conversation_is_answered(client: openai.OpenAI):
    parts = [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]
    done = client.chat.completions.create(model="alias", max_completion_tokens=4, messages=[
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}])  # type: ignore[typeddict-item]
    assert (done.object, done.model) == ("chat.completion", "alias")
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content
    assert done.usage is not None
    assert done.usage.completion_tokens == 4


def test_parts_of_a_content_are_joined_by_new_lines(client: openai.OpenAI):
    """As in `LLM.chat`; the engine here repeats its prompt."""
    def said(content: object) -> str | None:
        return client.chat.completions.create(model=NAME, max_tokens=40, messages=[
            {"role": "user", "content": content}]).choices[0].message.content  # type: ignore[typeddict-item]
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    assert said(parts) == said("Once upon\na time") != said("Once upona time")


def test_a_conversation_streams_with_logprobs(client: openai.OpenAI):
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": NAME, "messages": messages, "max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"
    assert [each.logprob for each in whole.logprobs.content] == [-0.5] * 5
    assert whole.logprobs.content[0].top_logprobs[0].token == whole.logprobs.content[0].token
    found = [each for c in chunks if c.choices[0].logprobs for each in c.choices[0].logprobs.content]
    assert found == whole.logprobs.content


def test_a_stream_ends_with_done(server: Live):
    asked = {"prompt": PROMPT, "max_tokens": 2, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [line[:6] for line in lines] == ["data: "] * 3
    assert lines[-1] == "data: [DONE]"


def test_no_separator_of_lines_cuts_an_event():
    """httpx splits texts into lines at more than the ends of lines."""
    said = ["a\u2028b", "\x85", "\u2029é☃", "\x0b\x0c\x1c", "\r\n"]
    with live(fake_service(FakeEngine(FakeModel(), pieces=said))) as server, connected(server) as client:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
        assert texts == said
        chunks = client.completions.create(model=NAME, prompt="x", stream=True)
        assert [chunk.choices[0].text for chunk in chunks] == said


def test_models_are_listed(client: openai.OpenAI, server: Live):
    assert [model.id for model in client.models.list()] == [NAME, "alias"]
    assert client.models.retrieve("alias").owned_by == "tinygrad-nv"
    assert server.http.get("/v1/models/" + NAME).json()["max_model_len"] == LENGTH
    with pytest.raises(openai.NotFoundError): client.models.retrieve("other")


def test_health_and_metrics(client: openai.OpenAI, server: Live):
    assert server.http.get("/health").json() == {"status": "ok"}
    client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2)
    text = server.http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
                 "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
                 "prefix_cache_hits_total", "request_success_total", "time_to_first_token_seconds_bucket",
                 "e2e_request_latency_seconds_sum", "inter_token_latency_seconds_count",
                 "request_prompt_tokens_bucket"):
        assert f'tinygrad_nv:{name}{{' in text, name
    assert 'tinygrad_nv:kv_cache_usage_perc{model_name="tales"} 0.25' in text
    assert 'path="/v1/completions",status="200"' in text


def test_a_request_has_an_id(server: Live):
    answer = server.post({"prompt": PROMPT})
    assert answer.headers["x-request-id"] == answer.json()["id"]
    assert answer.json()["id"].startswith("cmpl-")


def test_a_client_that_goes_away_ends_its_request():
    engine = FakeEngine(FakeModel(), pause_s=0.01)
    with live(fake_service(engine)) as server:
        asked = {"prompt": PROMPT, "max_tokens": 10_000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert len(engine.running) == 1
        until(lambda: not engine.running)
        assert engine.generated < 1000
        # one that does not stream, too
        with pytest.raises(httpx.ReadTimeout):
            server.post({**asked, "stream": False}, timeout=0.2)
        until(lambda: not engine.running)
        assert len(engine.closed) == 2
        until(lambda: server.service.active == 0)


def test_one_of_several_prompts_left_alone_ends_all():
    engine = FakeEngine(FakeModel(), pause_s=0.01)
    with live(fake_service(engine)) as server:
        asked = {"prompt": [PROMPT] * 3, "max_tokens": 10_000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: len(engine.running) == 3)
        until(lambda: not engine.running)


HERMES = ("{% for m in messages %}{{ m.content }}{% endfor %}"
          "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string"}}}}}


def test_calls_of_tools_are_told_apart_from_text():
    said = 'let me see <tool_call>{"name": "weather", "arguments": {"place": "a wood"}}</tool_call>'
    engine = FakeEngine(FakeModel(HERMES), said)
    with live(fake_service(engine)) as server, connected(server) as client:
        asked = {"model": NAME, "messages": [{"role": "user", "content": "how is it?"}], "tools": [WEATHER]}
        done = client.chat.completions.create(**asked).choices[0]  # type: ignore[call-overload]
        assert done.finish_reason == "tool_calls"
        assert done.message.content.strip() == engine.model.tokenizer.decode(
            engine.model.tokenizer.encode("let me see", special=False)).strip()
        [call] = done.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["place"].strip() == "a wood"
        chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert "<" not in text
        calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
        assert [call.function.name for call in calls] == ["weather"] + [None] * (len(calls) - 1)
        assert {call.index for call in calls} == {0}
        assert len(calls) > 3
        assert "".join(call.function.arguments
                       for call in calls) == done.message.tool_calls[0].function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # without tools it is text like any other
        plain = client.chat.completions.create(model=NAME, messages=asked["messages"]).choices[0]  # type: ignore[arg-type]
        assert "<tool_call>" in (plain.message.content or "")


def test_half_a_surrogate_pair_in_a_call_stays_escaped():
    said = '<tool_call>{"name": "weather", "arguments": {"place": "\\ud800"}}</tool_call>'
    with live(fake_service(FakeEngine(FakeModel(HERMES), said))) as server:
        done = server.post({"messages": [{"role": "user", "content": "how?"}], "tools": [WEATHER]},
                           "/v1/chat/completions")
        assert done.status_code == 200
        [call] = done.json()["choices"][0]["message"]["tool_calls"]
        assert "\\ud800" in call["function"]["arguments"]


def test_metrics_are_those_of_sequences():
    engine = FakeEngine(FakeModel(), pause_s=0.02)
    with live(fake_service(engine)) as server:
        assert server.post({"prompt": ["one two", "three"], "n": 3, "max_tokens": 5}).status_code == 200
        engine.limit = 0
        assert server.post({"prompt": "full", "n": 2}).status_code == 429   # of which the engine had nothing
        engine.limit = 1000
        with pytest.raises(httpx.ReadTimeout):
            server.post({"prompt": "left", "n": 2, "max_tokens": 400}, timeout=0.2)
        until(lambda: not engine.running and server.service.active == 0)
        text = server.http.get("/metrics").text
        metrics = {name: float(value) for name, value in re.findall(r"^\w+:(\S+)[{,].*} (\S+)$", text, re.M)
                   if name.endswith(("_count", "_sum"))}
        ended = dict(re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (\S+)', text))
    assert ended == {"length": "6.0", "abort": "2.0"}
    assert metrics["request_params_n_count"] == 2
    assert metrics["request_generation_tokens_count"] == 8
    # 6 answers of 5 tokens, 20 ms apart whatever comes beside them
    assert metrics["time_per_output_token_seconds_count"] == 8
    assert metrics["time_per_output_token_seconds_sum"] / 8 >= 0.019
    assert metrics["inter_token_latency_seconds_sum"] / metrics["inter_token_latency_seconds_count"] >= 0.019


def test_keys_are_required_of_v1_alone():
    with live(fake_service(keys=frozenset({"one", "two"}))) as server:
        for path in ("/health", "/metrics", "/"): assert server.http.get(path).status_code == 200
        for key in ("one", "two"):
            with connected(server, key) as client: assert list(client.models.list())
        with connected(server, "three") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_a_drain_finishes_what_runs_and_refuses_the_rest():
    engine = FakeEngine(FakeModel(), pause_s=0.02)
    with live(fake_service(engine)) as server:
        asked = {"prompt": PROMPT, "max_tokens": 20, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.drain()
            until(lambda: server.service.draining)
            refused = server.post(asked)
            assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
            assert "retry-after" in refused.headers
            assert server.http.get("/health").status_code == 503
            rest = [line for line in lines if line]
        assert len(rest) == 20
        assert rest[-1] == "data: [DONE]"
        assert "error" not in "".join(rest)
        until(lambda: server.server.should_exit)
