"""/api/…, as Ollama's clients read it: the shapes are those of Ollama's documentation."""
from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live
from tests.unit.server.test_messages import SAID, TEMPLATE
from tinygrad_nv.server.limits import RequestLimits

LOOK = {"type": "function", "function": {"name": "look", "description": "sees", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}}}}
USER = [{"role": "user", "content": "how?"}]
PNG = base64.b64encode(b"\x89PNG").decode()
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@contextlib.contextmanager
def serving(said: str | Sequence[str] = "yes", **more: Any) -> Iterator[tuple[FakeEngine, Live]]:
    engine = FakeEngine(FakeModel(TEMPLATE), pieces=tuple(said))
    with live(fake_service(engine, **more)) as server: yield engine, server


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def prompt(engine: FakeEngine) -> str:
    return engine.model.tokenizer.decode(engine.asked[-1][0].ids or [], skip_special_tokens=False)


def test_a_conversation_is_a_stream_of_lines_unless_it_is_not():
    with serving(SAID) as (engine, server):
        asked = {"model": f"{NAME}:latest", "messages": [{"role": "system", "content": "Brief."}, *USER],
                 "tools": [LOOK], "options": {"num_predict": 200, "temperature": 0, "num_ctx": 8192,
                                              "seed": 3, "stop": ["zz"],
                                              "repeat_penalty": 1.2}, "keep_alive": "5m"}
        answer = server.post(asked, "/api/chat")
        *parts, end = lines(answer)
        assert answer.headers["x-ignored-fields"] == "options.num_ctx, keep_alive"
        assert [each["done"] for each in parts] == [False] * len(parts)
        assert {each["model"] for each in (*parts, end)} == {NAME}
        assert "".join(each["message"].get("thinking", "") for each in parts) == "so"
        assert "".join(each["message"]["content"] for each in parts) == "see "
        (called,) = [each["message"]["tool_calls"] for each in parts if "tool_calls" in each["message"]]
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in called] == [
            ("look", {"at": "a fox"})]
        assert (end["done"], end["done_reason"], end["message"]) == (True, "stop", {"role": "assistant",
                                                                                    "content": ""})
        counts = end["prompt_eval_count"], end["eval_count"]
        assert counts == (len(engine.asked[-1][0].ids or []), len(SAID))
        assert all(isinstance(end[name], int) for name in DURATIONS)
        assert 0 < end["eval_duration"] <= end["total_duration"] < 60e9
        params = engine.asked[-1][1]
        assert (params.max_tokens, params.temperature, params.seed) == (200, 0, 3)
        assert (params.repetition_penalty, params.stop) == (1.2, ["zz"])
        assert prompt(engine).startswith("system: Brief.\nuser: how?")
        whole = server.post({**asked, "stream": False, "options": {"num_predict": 3}}, "/api/chat").json()
        assert (whole["done_reason"], whole["eval_count"]) == ("length", 3)
        whole = server.post({**asked, "stream": False, "think": False}, "/api/chat").json()
        assert whole["message"]["content"] == "see "
        assert "thinking" not in whole["message"]
        assert "(False)" in prompt(engine)
        assert whole["message"]["tool_calls"][0]["function"] == called[0]["function"]
        history = [*USER, {"role": "assistant", "content": "", "thinking": "so", "tool_calls": [
            {"function": {"name": "look", "arguments": {"at": "a fox"}}}]},
            {"role": "tool", "tool_name": "look", "content": "red"}]
        assert server.post({"model": NAME, "messages": history}, "/api/chat").status_code == 200
        assert "tool: red" in prompt(engine)


def test_a_prompt_is_generated_for():
    with serving("yes") as (engine, server):
        asked = {"model": NAME, "prompt": "how?"}
        *parts, end = lines(server.post({**asked, "system": "Brief."}, "/api/generate"))
        assert "".join(each["response"] for each in parts) == "yes"
        assert prompt(engine).startswith("system: Brief.\nuser: how?")
        assert (end["response"], end["done_reason"]) == ("", "stop")
        assert end["context"][:-3] == engine.asked[-1][0].ids
        before = engine.asked[-1][0].ids
        whole = server.post({**asked, "raw": True, "stream": False}, "/api/generate")
        assert whole.json()["response"] == "yes"
        assert engine.asked[-1][0].ids == engine.model.tokenize("how?") != before
        server.post({**asked, "context": [5, 6]}, "/api/generate")
        assert (engine.asked[-1][0].ids or [])[:2] == [5, 6]
        # as `curl -d` sends it
        curl = server.http.post("/api/generate", content=json.dumps({**asked, "stream": False}),
                                headers={"Content-Type": "application/x-www-form-urlencoded"})
        assert curl.json()["response"] == "yes"
        for body, path, reason in (({"model": NAME}, "generate", "load"),
                                   ({"model": NAME, "keep_alive": 0}, "generate", "unload"),
                                   ({"model": NAME, "messages": []}, "chat", "load")):
            made = server.post(body, f"/api/{path}").json()
            assert (made["done"], made["done_reason"]) == (True, reason)


def test_logprobs_are_of_each_token():
    with serving("yes") as (_, server):
        asked = {"model": NAME, "logprobs": True, "top_logprobs": 2}
        for path, body in (("chat", {"messages": USER}), ("generate", {"prompt": "how?"}),
                           ("generate", {"prompt": "how?", "raw": True})):
            *parts, _ = lines(server.post({**asked, **body}, f"/api/{path}"))
            whole = server.post({**asked, **body, "stream": False}, f"/api/{path}").json()["logprobs"]
            assert [entry for part in parts for entry in part["logprobs"]] == whole
            assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in whole] == [
                (sign, -0.5, [ord(sign)]) for sign in "yes"]
            assert [len(entry["top_logprobs"]) for entry in whole] == [2, 2, 2]
            whole = server.post({"model": NAME, **body, "stream": False}, f"/api/{path}").json()
            assert "logprobs" not in whole


def test_the_servers_limit_of_tokens_holds():
    with serving("yes", limits=RequestLimits(output_tokens=2)) as (engine, server):
        for raw in (False, True):
            for options, most in (({}, 2), ({"num_predict": -1}, 2), ({"num_predict": 9}, 2),
                                  ({"num_predict": 1}, 1)):
                server.post({"model": NAME, "prompt": "a", "raw": raw, "options": options}, "/api/generate")
                assert engine.asked[-1][1].max_tokens == most


def test_formats_constrain_the_answer():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with serving("{}") as (engine, server):
        for form, kind, value in (("json", "json_object", True), (schema, "json", schema)):
            server.post({"model": NAME, "messages": USER, "format": form}, "/api/chat")
            assert getattr(engine.asked[-1][1].structured_outputs, kind) == value


def test_what_is_served_is_listed():
    with serving(keys=frozenset({"k"})) as (_, server):
        refused = server.http.get("/api/tags")
        assert refused.status_code == 401
        assert refused.json()["error"].startswith("the API key is missing")
        server.http.headers["Authorization"] = "Bearer k"
        models = server.http.get("/api/tags").json()["models"]
        assert [each["name"] for each in models] == [NAME, "alias"]
        assert {"model", "modified_at", "size", "digest", "details"} <= set(models[0])
        assert server.http.get("/api/ps").json()["models"][0]["context_length"] == 512
        assert server.http.get("/api/version").json()["version"]
        shown = server.post({"model": NAME}, "/api/show").json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["template"] == TEMPLATE


@pytest.mark.parametrize(("path", "body", "status", "words"), [
    ("chat", {"messages": USER}, 400, "model is missing"),
    ("chat", {"model": "other", "messages": USER}, 404, "'other' is not served here"),
    ("chat", {"model": NAME, "messages": USER, "options": {"top_p": 7}}, 400, "options.top_p"),
    ("chat", {"model": NAME, "messages": USER, "options": {"mirostat": 2}}, 400, "options.mirostat"),
    ("chat", {"model": NAME, "messages": USER, "format": "yaml"}, 400, "format is 'yaml'"),
    ("chat", {"model": NAME, "messages": USER, "think": 3}, 400, "think is '3'"),
    ("chat", {"model": NAME, "messages": [{**USER[0], "images": ["!"]}]}, 400, "images[0] is not base64"),
    ("chat", {"model": NAME, "messages": [{**USER[0], "images": [PNG]}]}, 400, "reads nothing else"),
    ("generate", {"model": NAME, "prompt": "a", "suffix": "b"}, 400, "suffix is not served"),
    ("generate", {"model": NAME, "prompt": 5}, 400, "prompt is a whole number"),
    ("embed", {"model": NAME, "input": "a"}, 404, "generates text"),
    ("pull", {"model": NAME}, 404, "/v1/models is the nearest")])
def test_errors_are_texts(path: str, body: dict[str, Any], status: int, words: str):
    with serving() as (_, server):
        answer = server.post(body, f"/api/{path}")
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]


@pytest.mark.parametrize(("path", "nearest"), [
    ("/chat/completions", "/v1/chat/completions"), ("/embeddings", "/v1/embeddings"),
    ("/infill", "/completion"),
    ("/generate", "/v1/completions"), ("/v1/chat/completion", "/v1/chat/completions"), ("/slots", "/load"),
    ("/v1/completion", "/v1/completions"), ("/v1/chat", "/v1/chat/completions")])
def test_other_paths_name_the_nearest(path: str, nearest: str):
    with serving() as (_, server):
        answer = server.post({}, path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == (f"there is nothing at {path}; to fix: {nearest} is the "
                                                     "nearest that is served")
