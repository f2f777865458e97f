"""The requests of `vllm bench serve`, and how it reads the answers: its backends openai and openai-chat.

It takes the served model from /v1/models, sends a request to see that the server is ready, and then all of
them at once. It counts a chunk with choices as a token, so that times between chunks are those between
tokens, and takes the number of tokens from the chunk without choices, whose usage comes last.
"""
from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live

KEY = {"Authorization": "Bearer secret"}


@dataclass
class Measured:
    """A request's figures, as the client has them."""
    text: str = ""
    ttft_s: float | None = None
    between_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    request_id: str = ""


@pytest.fixture(scope="module")
def engine() -> FakeEngine: return FakeEngine(FakeModel(), pause_s=0.002)


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine, keys=frozenset({"secret"}))) as running: yield running


def messages(pieces: Iterator[bytes]) -> Iterator[str]:
    """The messages of a stream, as the client finds them: each piece that arrives loses the white space
    around it, so that a message whose end came with it counts when it is JSON."""
    held = ""
    for piece in pieces:
        held += piece.decode().strip()
        while "\n\n" in held:
            message, _, held = held.partition("\n\n")
            yield message
        if held.startswith("data: "):
            try:
                if held != "data: [DONE]": json.loads(held.removeprefix("data: "))
            except ValueError: continue
            yield held
            held = ""
    assert held == ""


def measure(server: Live, path: str, payload: dict[str, Any], number: int = 0) -> Measured:
    """One request."""
    made, begun, last, done = Measured(), time.perf_counter(), 0.0, False
    headers = {**KEY, "x-request-id": f"bench-{number}", "Content-Type": "application/json"}
    body = json.dumps(payload).encode()
    with server.http.stream("POST", path, content=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        made.request_id = answer.headers["x-request-id"]
        for message in messages(answer.iter_raw()):
            assert not done, "nothing comes after [DONE]"
            chunk, now = message.removeprefix("data: "), time.perf_counter()
            if done := chunk == "[DONE]": continue
            data = json.loads(chunk)
            if choices := data["choices"]:
                assert made.output_tokens == 0, "the usage comes last"
                if made.ttft_s is None: made.ttft_s = now - begun
                else: made.between_s.append(now - last)
                last = now
                made.text += (choices[0]["text"] if path.endswith("/v1/completions")
                              else choices[0]["delta"].get("content")) or ""
            else:
                made.output_tokens, made.prompt_tokens = (data["usage"][f"{kind}_tokens"]
                                                          for kind in ("completion", "prompt"))
    assert done
    return made


def completion(prompt: Any, tokens: int, **more: Any) -> dict[str, Any]:
    """The payload of backend openai."""
    return {"model": NAME, "prompt": prompt, "repetition_penalty": 1.0, "max_tokens": tokens,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, **more}


def conversation(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Returns the body of openai-chat."""
    return {"model": NAME, "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
            "max_completion_tokens": tokens, "stream": True, "stream_options": {"include_usage": True},
            **more}


def test_the_model_is_found(server: Live):
    [first, *_] = server.http.get("/v1/models", headers=KEY).json()["data"]
    assert (first["id"], first["root"]) == (NAME, NAME)


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7, 8]])
def test_a_completion_is_measured(server: Live, engine: FakeEngine, prompt: Any):
    made = measure(server, "/v1/completions", completion(prompt, 9, ignore_eos=True, temperature=0.0,
                                                         top_p=0.9, top_k=5, min_p=0.0))
    params = engine.asked[-1][1]
    assert (params.ignore_eos, params.max_tokens, params.temperature, params.top_k) == (True, 9, 0.0, 5)
    assert params.logprobs is None
    assert (made.output_tokens, made.prompt_tokens) == (9, len(engine.asked[-1][0].ids or ()))
    assert len(made.between_s) == 8         # a chunk is a token
    assert made.request_id == "bench-0"
    assert made.text


def test_log_probabilities_are_asked_for(server: Live, engine: FakeEngine):
    assert measure(server, "/v1/completions", completion("Once", 3, logprobs=2)).output_tokens == 3
    assert engine.asked[-1][1].logprobs == 2


def test_a_conversation_is_measured(server: Live, engine: FakeEngine):
    made = measure(server, "/v1/chat/completions", conversation("Once upon a time", 9, ignore_eos=True,
                                                                temperature=0.0, repetition_penalty=1.1))
    assert engine.asked[-1][1].repetition_penalty == 1.1
    ids = engine.asked[-1][0].ids or []
    spoken = [token for token in (ids * 9)[:9] if FakeModel().tokenizer.decode([token])]
    # the first chunk has the role alone, and a token without text has none
    assert (made.output_tokens, len(made.between_s)) == (9, len(spoken))
    assert made.text.strip().startswith("Once upon a time")


def test_all_requests_at_once(server: Live):
    """Each gets its own tokens and its own id, as with --request-rate inf."""
    def one(number: int) -> Measured:
        path, payload = (("/v1/completions", completion) if number % 2 else
                         ("/v1/chat/completions", conversation))
        return measure(server, path, payload(f"number {number}", 6, ignore_eos=True), number)  # type: ignore[operator]
    with ThreadPoolExecutor(16) as threads: made = list(threads.map(one, range(32)))
    assert [each.output_tokens for each in made] == [6] * 32
    assert [each.request_id for each in made] == [f"bench-{number}" for number in range(32)]
    assert sum(each.prompt_tokens for each in made) > 0


def test_a_reason_is_told(server: Live):
    """A status other than 200 is an error of the request, whose phrase the client shows."""
    answer = server.http.post("/v1/completions", json=completion("a", 0), headers=KEY)
    assert (answer.status_code, answer.reason_phrase) == (400, "Bad Request")
