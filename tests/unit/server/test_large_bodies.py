"""Large bodies: what is refused before it is parsed, and that others are served while one is read."""
from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live, until
from tinygrad_nv.engine.embedding.embedder import Embedder
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.models.pooling import Pooling
from tinygrad_nv.server import body, json_answer, response_store, workers
from tinygrad_nv.server.body import MAX_CONTAINERS, MAX_DEPTH, MAX_NAMES, MAX_VALUES, Counted, count
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.json_answer import pieces
from tinygrad_nv.server.limits import RequestLimits, read_body
from tinygrad_nv.server.response_store import ResponseStore, Stored
from tinygrad_nv.server.service import SLOW_S
from tinygrad_nv.server.workers import Abandoned, Worker, aside, checkpoint

SAYS = [{"role": "user", "content": "A fox."}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    model = FakeModel()
    model.tokenizer = Tokenizer(model.tokenizer.backend, model.tokenizer.special, model.tokenizer.template,
                                most=1 << 20)
    with live(fake_service(FakeEngine(model))) as running: yield running


def refused(server: Live, path: str, body: Any, *words: str) -> None:
    answer = server.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body),
                              headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text[:300]
    assert [word for word in words if word not in answer.text] == [], answer.text[:300]


def test_the_limit_itself_is_not_too_large():
    async def read(sent: bytes) -> bytes:
        async def receive() -> dict[str, Any]: return {"type": "http.request", "body": sent}
        scope = {"type": "http", "headers": []}     # in chunks: no length
        return await read_body(Request(scope, receive), RequestLimits(body_bytes=9), lambda count: None)
    assert asyncio.run(read(b"x" * 9)) == b"x" * 9
    with pytest.raises(APIError, match="more than 9 bytes"): asyncio.run(read(b"x" * 10))


# **** counting ****

def counted(value: Any, depth: int = 0) -> Counted:
    """Returns what `count` must find, from the parsed value. Values are what commas part, and containers."""
    if not isinstance(value, dict | list): return Counted(0, 0, 0, depth)
    parts = [counted(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    return Counted(1 + sum(each.containers for each in parts),
                   len(value) * isinstance(value, dict) + sum(each.names for each in parts),
                   max(len(value) - 1, 0) + 1 + sum(each.values for each in parts),
                   max((each.depth for each in parts), default=depth + 1))


def made(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(5 if depth else 2)
    if kind == 0: return draw.choice([0, -1.5, None, True])
    if kind == 1: return "".join(draw.choice('a{}[]",:\\é\n😀') for _ in range(draw.randrange(9)))
    if kind == 2: return {made(draw, 0).__str__(): made(draw, depth - 1) for _ in range(draw.randrange(4))}
    return [made(draw, depth - 1) for _ in range(draw.randrange(5))]


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_values_are_counted_as_a_parser_finds_them(monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(body, "SLICE", piece)
    draw = random.Random(piece)
    for at in range(300):
        value = [made(draw, 4)]
        for ascii_only in (True, False):
            assert count(json.dumps(value, ensure_ascii=ascii_only).encode()) == counted(value), (at, value)


@pytest.mark.parametrize(("body", "words"), [
    (b'{"x":[' + b"{}," * MAX_CONTAINERS + b"{}]}", "objects and lists, expected at most 32768"),
    (b'{"x":[' + b"[]," * MAX_CONTAINERS + b"[]]}", "objects and lists, expected at most 32768"),
    (json.dumps(dict.fromkeys(map(str, range(MAX_NAMES + 1)), 0)).encode(), "names, expected at most 65536"),
    (b'{"x":[' + b'1,' * MAX_VALUES + b'1]}', "values, expected at most 1048576"),
    (b'{"x":' * (MAX_DEPTH + 1) + b" " * (40 << 10), "nested too deeply, 513 levels, expected at most 512"),
    (b'{"seed":' + b"9" * (1 << 20) + b"}", "whole number of more than 4300 digits")])
def test_too_many_values_are_refused(server: Live, body: bytes, words: str):
    refused(server, "/v1/chat/completions", body, words)


def test_text_is_no_structure(server: Live):
    """Signs between quotes are not counted."""
    text = '[{"a": [' * 20_000
    refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "tokens")


# **** fields ****

def tools(many: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{at}"}} for at in range(many)]


@pytest.mark.parametrize(("path", "fields", "words"), [
    ("/v1/completions", {"prompt": "a" * (1 << 21)}, ("2097152 characters, 161320 or more tokens", "511")),
    ("/v1/completions", {"prompt": "a" * (1 << 21), "truncate_prompt_tokens": 4}, ("at most 1048576 bytes",)),
    ("/tokenize", {"prompt": "é" * (1 << 19)}, ("524288 characters, 80660 or more tokens",)),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "b" * (1 << 21)}]},
     ("or more tokens",)),
    ("/v1/chat/completions", {"messages": SAYS, "tools": tools(2049)}, ("tools has 2049 tools",)),
    ("/v1/chat/completions", {"messages": SAYS, "tools": tools(2000), "tool_choice": {
        "type": "function", "function": {"name": "look"}}}, ("f31, …",)),
    ("/v1/chat/completions", {"messages": SAYS, "logit_bias": dict.fromkeys(map(str, range(301)), 1)},
     ("logit_bias has 301 entries",)),
    ("/completion", {"prompt": "a", "logit_bias": [[1, 1]] * 301}, ("logit_bias has 301 entries",)),
    ("/v1/chat/completions", {"messages": SAYS, "bad_words": ["a" * 100] * 700}, ("70000 characters in",)),
    ("/v1/chat/completions", {"messages": SAYS, "stop": "a" * 1025}, ("stop has 1025 characters",)),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [5] * ((1 << 19) + 1)}, ("524289 token ids",)),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": '"'}},
        {"function": {"name": "f", "arguments": "[" + "{}," * MAX_CONTAINERS + "{}]"}}]}, *SAYS]},
     ("a tool call has 32770 objects and lists",))])
def test_what_is_too_long_is_refused(server: Live, path: str, fields: dict[str, Any], words: tuple[str, ...]):
    refused(server, path, fields, *words)


def test_thousands_of_blocks_are_one_message(server: Live):
    """Their texts are joined once: each addition to a text of 2 MB copied it, 32 GB in all."""
    block = {"type": "text", "text": "x"}
    blocks = [{"type": "text", "text": "y" * (1 << 21)}, *[block] * 16_000]
    refused(server, "/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]},
            f"{(1 << 21) + 32_000 + 7} characters")     # 7 of the template


def test_each_text_of_a_score_is_tokenized_once():
    embedder, seen = Embedder.__new__(Embedder), list[str]()
    embedder.tokenizer, embedder.length = FakeModel().tokenizer, 64
    embedder.config = SimpleNamespace(pooling=Pooling("cls", False))  # type: ignore[assignment]
    encode = Tokenizer.encode

    class Counting(Tokenizer):
        def encode(self, text: str, special: bool = True) -> list[int]:
            seen.append(text)
            return encode(self, text, special)
    embedder.tokenizer = Counting(embedder.tokenizer.backend, embedder.tokenizer.special, None)
    query, texts = "a fox " * 100, [f"tale {at}" for at in range(50)]
    pairs = embedder.encode_pairs([query] * 50, texts, -1)
    assert seen == [query, *texts]
    assert [len(each) for each in pairs] == [64] * 50
    assert pairs == [embedder.encode_pair(query, text, -1) for text in texts]


# **** responses that are kept ****

def test_kept_responses_have_few_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(response_store, "MOST_VALUES", 2 * 64)
    store = ResponseStore()
    for at in range(3):
        response = {"id": f"r{at}", "output": [{"id": f"o{at}"}]}
        store.put(Stored(response, [{"id": f"i{at}"}], [{"n": [0] * 20}]))
    assert [*store.kept] == ["r1", "r2"]
    assert store.item("o0") is store.item("i0") is None
    assert (store.item("o2"), store.item("i1")) == ({"id": "o2"}, {"id": "i1"})
    store.drop("r1")
    assert [*store.by_id] == ["i2", "o2"]


def test_an_item_that_is_referred_to_counts_each_time(server: Live):
    item = {"role": "user", "id": "item_large", "content": "z" * 400}
    first = server.post({"model": NAME, "input": [item], "max_output_tokens": 1}, "/v1/responses")
    assert first.status_code == 200, first.text
    refused(server, "/v1/responses", {"input": [{"type": "item_reference", "id": "item_large"}] * 30_000},
            "expected at most 4194304; to fix: begin a new conversation")


# **** threads ****

def test_others_are_answered_while_a_text_is_tokenized(server: Live):
    """Each of these took the event loop for its whole time: no health check was answered before its end."""
    done, between = threading.Event(), 0
    text = "one two\n" * (40 << 10)

    def ask() -> None:
        answers.append(server.http.post("/v1/completions", json={
            "prompt": text, "truncate_prompt_tokens": 4, "max_tokens": 1}))
        done.set()
    answers: list[Any] = []
    thread = threading.Thread(target=ask)
    thread.start()
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        while not done.is_set():
            line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while b"}" not in answer: answer += line.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            between += not done.is_set()
    thread.join()
    assert answers[0].status_code == 200, answers[0].text
    ids = server.service.model.require_tokenizer().backend.encode(text).ids
    assert answers[0].json()["usage"]["prompt_tokens"] == len(ids[-4:])
    assert between > 20


def require_health(server: Live, body: Any, path: str) -> None:
    """Asks for /health while a request uses up its template's second: it is never half of the time away."""
    attack = threading.Thread(target=lambda: answers.append(server.post(body, path)))
    answers, slowest, before = list[Any](), 0.0, time.perf_counter()
    attack.start()
    while attack.is_alive():
        began = time.perf_counter()
        assert server.http.get("/health").status_code == 200
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < (time.perf_counter() - before) / 2
    assert answers[0].status_code == 400, answers[0].text
    assert "at most 1 seconds of processor time" in answers[0].text


def test_others_are_answered_while_a_template_runs(monkeypatch: pytest.MonkeyPatch):
    """A short body was rendered in the event loop: one of some hundred bytes stopped all."""
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "1")
    loop = "{% set l = range(9999)|list %}{% for i in range(99999) %}{{ -1 in l }}{% endfor %}"
    service = fake_service(FakeEngine(FakeModel()))
    service.parsers = replace(service.parsers, trust_request_template=True)
    with live(service) as server:
        server.post({"prompt": "a", "max_tokens": 1})
        require_health(server, {"messages": SAYS, "chat_template": loop}, "/v1/chat/completions")


def test_searching_what_fits_renders_within_one_budget(monkeypatch: pytest.MonkeyPatch):
    """Some renderings of nearly a second each, in the event loop: none was more than its own budget."""
    monkeypatch.setenv("NV_TEMPLATE_SECONDS", "1")
    slow = ("{% set l = range(9999)|list %}{% for i in range(3000) %}{{ '' if -1 in l }}{% endfor %}"
            "{% for m in messages %}{{ m.content }}{% endfor %}")
    items = [{"role": "user", "content": "A tale of a fox. " * 3} for _ in range(60)]
    with live(fake_service(FakeEngine(FakeModel(slow)))) as server:
        require_health(server, {"input": items, "truncation": "auto"}, "/v1/responses")


def test_a_model_s_template_that_is_slow_leaves_the_event_loop():
    service, threads = fake_service(FakeEngine(FakeModel())), list[str]()

    def slow() -> None:
        threads.append(threading.current_thread().name)
        end = time.thread_time() + 2 * SLOW_S
        while time.thread_time() < end: pass

    def quick() -> None: threads.append(threading.current_thread().name)

    async def main() -> None:
        for task in (quick, slow, slow, quick, quick): await service.render(9, task, by_client=False)
        await service.render(9, quick, by_client=True)
    asyncio.run(main())
    assert threads == ["MainThread"] * 2 + ["templates"] * 2 + ["MainThread", "templates"]


@pytest.mark.parametrize("work", [
    "{% for i in range(999) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
    "{% set l = range(9999)|list %}{% for i in range(300) %}{{ '' if -1 in l }}{% endfor %}",
    # nothing here is a loop, or makes a text
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(17) }}"])
def test_a_model_s_template_that_is_slow_for_one_conversation(work: str, monkeypatch: pytest.MonkeyPatch):
    """The event loop waits for so little of it that /health answers; a thread renders all, which is right."""
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = "{% if messages[0].content == 'slow' %}" + work + "{% endif %}" + texts
    threads, whole = list[str](), FakeModel.encode_chat

    def encode_chat(self: FakeModel, *args: Any, **extra: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return whole(self, *args, **extra)
    monkeypatch.setattr(FakeModel, "encode_chat", encode_chat)
    engine = FakeEngine(FakeModel(template))
    with live(fake_service(engine)) as server:
        for said in ("quick", "quick", "slow", "quick", "quick"):
            threads.clear()
            answer = server.post({"messages": [{"role": "user", "content": said}], "max_tokens": 1},
                                 "/v1/chat/completions")
            assert answer.status_code == 200, answer.text
            if said == "slow":
                assert [each == "templates" for each in threads] == [False, True]
                ids = engine.asked[-1][0].ids
                assert ids is not None
                assert engine.model.tokenizer.decode(ids).strip().endswith("slow")
    assert "templates" not in threads
    assert len(threads) == 1


def test_a_client_that_leaves_ends_its_texts(server: Live, monkeypatch: pytest.MonkeyPatch):
    begun, tokenized, encode = threading.Event(), list[str](), Tokenizer.encode

    def slow(self: Tokenizer, text: str, special: bool = True) -> list[int]:
        if text.startswith("slow"):
            tokenized.append(text)
            begun.set()
            threading.Event().wait(0.05)
        return encode(self, text, special)
    monkeypatch.setattr(Tokenizer, "encode", slow)
    body = json.dumps({"prompt": ["slow " * 100] * 128, "add_special_tokens": False}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert begun.wait(20)
    until(lambda: not server.service.active)
    reached = len(tokenized)
    threading.Event().wait(0.2)
    assert reached < 100
    assert len(tokenized) <= reached + 1


def test_a_task_without_a_caller_does_not_begin():
    worker, gate, ran = Worker("test"), threading.Event(), list[str]()

    def first() -> None:
        assert gate.wait(20)
        try: checkpoint()
        except Abandoned: ran.append("abandoned")

    async def main() -> None:
        running = asyncio.ensure_future(worker.run(first))
        waiting = asyncio.ensure_future(worker.run(lambda: ran.append("second")))
        await asyncio.sleep(0.05)
        for task in (running, waiting): task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        gate.set()
        await worker.run(lambda: ran.append("third"))
    asyncio.run(main())
    assert ran == ["abandoned", "third"]
    assert worker.thread is not None
    assert worker.thread.daemon


def test_sizes_choose_the_thread():
    async def names() -> list[str]:
        return [await aside(size, lambda: threading.current_thread().name)
                for size in (1, workers.INLINE + 1, workers.LARGE)]
    assert asyncio.run(names()) == ["MainThread", "texts", "large texts"]


# **** answers ****

def test_long_answers_are_json_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_answer, "SLICE", 8)
    draw = random.Random(3)
    others = [[[0.5] * 9] * 3, [[*range(20)], 1, "a" * 900, {}, [[]]], {5: [*range(30)], "é\"": "x" * 999}]
    for value in [*(made(draw, 4) for _ in range(300)), *others]:
        parts = [*pieces(value)]
        assert "".join(parts) == json.dumps(value, ensure_ascii=False, separators=(",", ":")), value
    assert len([*pieces(list(range(100)))]) > 10


def test_a_server_that_stops_ends_what_it_reads():
    worker, gate, ran = Worker("test"), threading.Event(), list[str]()

    async def main() -> None:
        running = asyncio.ensure_future(worker.run(lambda: gate.wait(20)))
        waiting = asyncio.ensure_future(worker.run(lambda: ran.append("second")))
        await asyncio.sleep(0.05)
        worker.end(ValueError("stopped"))
        for task in (running, waiting):
            with pytest.raises(ValueError, match="stopped"): await task
        gate.set()
        await worker.run(lambda: ran.append("third"))
    asyncio.run(main())
    assert ran == ["third"]
    assert not worker.asked
