"""Hosts that a server answers for, pages that may change its state, and what several keys share."""
from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.origins import Hosts, split_authority
from tinygrad_nv.server.service import CORS

JSON = {"Content-Type": "application/json"}


def raw(server: Live, *lines: str, body: str = "") -> tuple[int, str]:
    """Status and body of a request as it is written here; Connection: close is added."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall("\r\n".join([*lines, "Connection: close", "", body]).encode("latin-1"))
        answer = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    return int(answer.split(" ", 2)[1]), answer.partition("\r\n\r\n")[2]


@pytest.mark.parametrize(("text", "found"), [
    ("LocalHost", ("localhost", "")), ("a.org.:80", ("a.org", "80")), ("[::1]:1", ("::1", "1")),
    ("[0:0:0:0:0:0:0:1]", ("::1", "")), ("[fe80::1%25eth0]", ("fe80::1%eth0", "")), ("", None), ("a b", None),
    ("::1", None), ("[::1", None), ("[1.2.3.4.5]", None), ("a@b", None), ("a/b", None), ("a,b", None),
    ("a:b", None), ("a:999999", None), ("a:1:2", None), (".", None), ("é", None)])
def test_authorities(text: str, found: Any): assert split_authority(text) == found


def test_hosts_of_a_server():
    def allowed(hosts: Hosts, *given: str) -> list[str]: return [*filter(hosts.allow, given)]
    every = ("localhost", "127.0.0.1", "127.8.8.8", "::1", "10.0.0.1", "fd00::1", "a.org", "b.a.org",
             "xa.org", "localhost.a.com")
    local = every[:4]
    assert allowed(Hosts.of("127.0.0.1", ()), *every) == [*local]
    assert allowed(Hosts.of("10.0.0.1", ()), *every) == [*local, "10.0.0.1"]
    assert allowed(Hosts.of("0.0.0.0", ()), *every) == [*local, "10.0.0.1", "fd00::1"]
    assert allowed(Hosts.of("::", ()), socket.gethostname().lower()) == [socket.gethostname().lower()]
    assert allowed(Hosts.of("127.0.0.1", ("A.org.",)), *every) == [*local, "a.org"]
    assert allowed(Hosts.of("127.0.0.1", ("*.a.org", "[FD00::1]")), *every) == [*local, "fd00::1", "b.a.org"]
    assert allowed(Hosts.of("127.0.0.1", ("*",)), *every) == [*every]


def test_a_server_without_keys_answers_for_its_hosts_alone():
    with live(fake_service(hosts=Hosts.of("127.0.0.1", ("llm.example",)))) as server:
        for host, status in (("localhost:1", 200), ("LLM.example.", 200), ("evil.example", 403), ("a b", 400),
                             (f"evil.example:{server.port}", 403), ("10.0.0.1", 403), ("", 400)):
            for path in ("/v1/models", "/", "/metrics", "/health"):
                got, text = raw(server, f"GET {path} HTTP/1.1", f"Host: {host}",
                                "X-Forwarded-Host: localhost")
                assert got == status, (host, path, text)
        error = json.loads(raw(server, "GET /health HTTP/1.1", "Host: evil.example")[1])["error"]
        assert error["reason"] == "host_not_allowed"
        assert "--allowed-hosts" in error["message"]
        assert "llm.example" in error["message"]
        assert set(json.loads(raw(server, "GET /api/tags HTTP/1.1", "Host: evil.example")[1])) == {"error"}
        for line in ("GET http://localhost/health HTTP/1.1", "OPTIONS * HTTP/1.1"):
            assert "expected: a path" in raw(server, line, "Host: localhost")[1]
        assert raw(server, "GET /health HTTP/1.1")[0] == 400
        assert raw(server, "GET /health HTTP/1.1", "Host: localhost", "Host: localhost")[0] == 400
        assert raw(server, "GET /health HTTP/1.0")[0] == 200
        # no redirect to an address that the client made up
        assert raw(server, "GET //evil.example/ HTTP/1.1", "Host: localhost")[0] == 404
        for path in ("/health/", "/v1/completions/"):
            got = server.http.get(path)
            assert (got.status_code, "location" in got.headers) == (404, False)
    with live(fake_service(keys=frozenset({"a"}))) as server:
        assert raw(server, "GET /health HTTP/1.1", "Host: llm.example")[0] == 200
        server.service.hosts = Hosts.of("127.0.0.1", ("llm.example",))
        assert raw(server, "GET /health HTTP/1.1", "Host: evil.example")[0] == 403


PROMPT = '{"prompt": "a", "n_predict": 1}'


def test_pages_change_no_state_of_a_server_that_is_not_theirs():
    """A Host that is the page's own name is refused, too: DNS may say that it is this machine's."""
    state = [("POST", "/v1/responses/x/cancel"), ("DELETE", "/v1/responses/x"),
             ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")]
    with live(fake_service(cors=CORS(("*", "https://named.example")), keys=frozenset({"a"}))) as server:
        own, key = f"127.0.0.1:{server.port}", "Authorization: Bearer a"
        for host, origin, allowed in (
                (own, (), True), (own, (f"http://{own}",), True), (own, ("https://named.example",), True),
                (own, ("http://evil.example",), False), (own, ("null",), False),
                ("evil.example", ("http://evil.example",), False), (own, (f"http://{own}",) * 2, False),
                (own, ("http://127.0.0.1:1",), False), (own, (f"http://a@{own}",), False),
                (own, (f"ftp://{own}",), False)):
            for method, path in state:
                got, text = raw(server, f"{method} {path} HTTP/1.1", f"Host: {host}", key,
                                "Content-Length: 2", "Content-Type: application/json",
                                *(f"Origin: {each}" for each in origin),
                                body="{}")
                assert (got != 403) == allowed, (host, origin, path, text)
                assert allowed or "cross_origin" in text
        for site in ("cross-site", "same-site"):
            assert raw(server, "DELETE /v1/responses/x HTTP/1.1", f"Host: {own}", key,
                       f"Sec-Fetch-Site: {site}")[0] == 403


def test_pages_of_other_origins_generate_where_browsers_ask_first():
    for origins, kind, status in (
            (("*",), "application/json", 200), (("*",), "text/plain", 400),
            (("http://a",), "text/plain", 200),
            (("http://b",), "application/json", 403), (("http://b",), "text/plain", 403)):
        with live(fake_service(cors=CORS(origins))) as server:
            for more in ({"Origin": "http://a"}, {"Origin": "http://a", "Sec-Fetch-Site": "cross-site"}):
                got = server.http.post("/completion", content=PROMPT, headers={"Content-Type": kind, **more})
                assert got.status_code == status, (origins, kind, got.text)
            got = server.http.post("/completion", content=PROMPT, headers={"Content-Type": "text/plain"})
            assert got.status_code == 200


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a fox"}), ("/v1/completions", {"prompt": "a fox", "cache_salt": "s"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}), ("/completion", {"prompt": "a"}),
    ("/api/generate", {"model": NAME, "prompt": "a", "raw": True, "stream": False}),
    ("/api/chat", {"model": NAME, "messages": [{"role": "user", "content": "a"}], "stream": False})]


def test_prefixes_are_shared_only_with_the_same_key():
    engine = FakeEngine(FakeModel(), "b")
    with live(fake_service(engine, keys=frozenset({"one", "two"}))) as server:
        def salts(path: str, body: dict[str, Any]) -> list[str]:
            engine.asked.clear()
            for key in ("one", "two", "one"):
                got = server.http.post(path, json={"max_tokens": 2, **body} if "/api" not in path else body,
                                       headers={"Authorization": f"Bearer {key}"})
                assert got.status_code == 200, got.text
            return [parsed.salt for parsed, _ in engine.asked]

        for path, body in BODIES:
            first, second, third = salts(path, body)
            assert first == third != second, path
            assert "one" not in first
            assert first.endswith(body.get("cache_salt", ":"))
        server.service.shared_prefixes = True
        assert salts(*BODIES[0]) == ["", "", ""]
        assert salts(*BODIES[1]) == ["s", "s", "s"]
        server.service.shared_prefixes, server.service.keys = False, frozenset({"one"})
        engine.asked.clear()
        server.post(BODIES[0][1], headers={"Authorization": "Bearer one"})
        assert engine.asked[0][0].salt == ""


def test_responses_are_their_keys():
    with live(fake_service(FakeEngine(FakeModel(), "b"), keys=frozenset({"one", "two"}))) as server:
        def ask(key: str, method: str, path: str = "", body: Any = None) -> Any:
            return server.http.request(method, f"/v1/responses{path}", json=body,
                                       headers={"Authorization": f"Bearer {key}"})
        made = ask("one", "POST", "", {"input": "a"}).json()
        name, item = made["id"], made["output"][0]["id"]
        for key, status in (("two", 404), ("one", 200)):
            assert ask(key, "GET", f"/{name}").status_code == status
            assert ask(key, "GET", f"/{name}/input_items").status_code == status
            goes_on = ask(key, "POST", "", {"input": "b", "previous_response_id": name})
            assert goes_on.status_code == status, goes_on.text
            refers = {"input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "c"}]}
            assert (ask(key, "POST", "", refers).status_code == 200) == (status == 200)
            assert ask(key, "POST", f"/{name}/cancel").status_code == (404 if key == "two" else 400)
            assert ask(key, "DELETE", f"/{name}").status_code == status
