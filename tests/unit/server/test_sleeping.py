"""/sleep, /wake_up, /is_sleeping: refused unless the server was started for them, and behind its keys."""
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server.serve_case import FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.server.service import CORS


class Sleeping:
    """What was asked."""

    def __init__(self) -> None: self.calls = list[tuple[object, ...]]()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level > 2: raise ConfigError("sleep(level=3)", "1 or 2", "change level")
        self.calls.append((level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None: self.calls.append(("wake", tags))

    def is_sleeping(self) -> bool: return len(self.calls) % 2 == 1


@pytest.fixture
def model() -> Sleeping: return Sleeping()


@pytest.fixture
def served(model: Sleeping) -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(), "a"), sleeping=model, keys=frozenset({"k"}))) as made:
        made.http.headers["Authorization"] = "Bearer k"
        yield made


def test_calls(served: Live, model: Sleeping):
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert served.http.post("/sleep").status_code == 200
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.http.post("/wake_up").status_code == 200
    served.http.post("/sleep?level=2&mode=wait")
    served.http.post("/wake_up?tags=weights&tags=kv_cache")
    assert model.calls == [(1, "abort"), ("wake", None), (2, "wait"), ("wake", ["weights", "kv_cache"])]


def test_what_is_wrong(served: Live, model: Sleeping):
    for query, words in (("level=x", "level is 'x'; expected: 1 or 2"), ("level=3", "sleep(level=3)")):
        refused = served.http.post(f"/sleep?{query}")
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    assert served.http.get("/sleep").status_code == 405
    assert served.http.post("/sleep", headers={"Authorization": "Bearer x"}).status_code == 401
    assert model.calls == []


def test_pages_of_other_origins_are_refused(model: Sleeping):
    """By default any page may use the server; which may have it sleep must be said by name."""
    for origins in (("*",), ("https://chat.example",)):
        model.calls.clear()
        with live(fake_service(FakeEngine(FakeModel(), "a"), sleeping=model, cors=CORS(origins))) as made:
            named = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
            for headers, allowed in (
                    ({}, True), ({"Origin": made.url}, True), ({"Sec-Fetch-Site": "none"}, True),
                    ({"Origin": made.url, "Sec-Fetch-Site": "same-origin"}, True),
                    (named, "*" not in origins),
                    ({"Origin": "https://evil.example"}, False), ({"Origin": "null"}, False),
                    ({"Origin": "http://[x"}, False),
                    ({"Origin": f"http://127.0.0.1:{made.port + 1}"}, False),
                    ({"Sec-Fetch-Site": "cross-site"}, False)):
                for path in ("/sleep", "/wake_up"):
                    model.calls.clear()
                    answer = made.http.post(path, headers=headers)
                    got = answer.status_code, len(model.calls)
                    assert got == ((200, 1) if allowed else (403, 0)), headers
                    if allowed: continue
                    assert answer.json()["error"]["code"] == "cross_origin"
                    assert "--allowed-origins" in answer.json()["error"]["message"]


def test_a_server_that_was_not_started_for_it():
    with live(fake_service(FakeEngine(FakeModel(), "a"))) as made:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            refused = made.http.request(method, path)
            assert refused.status_code == 403
            assert "--enable-sleep-mode" in refused.json()["error"]["message"]
