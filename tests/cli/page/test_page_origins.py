"""The server as a page of another origin uses it: what the browser lets through, in both directions."""
from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from tests.support.server.browser_case import Browser
from tests.support.server.serve_case import FakeEngine, fake_service, live
from tinygrad_nv.server.service import CORS

# a conversation, streamed: [status, text, pieces that arrived, headers that the page may read]
ASK = """return (async () => {
    const answer = await fetch(%r + "/v1/chat/completions", {method: "POST", headers:
        {"Content-Type": "application/json", "Authorization": "Bearer " + %r, "X-Request-Id": "page-7"},
        body: JSON.stringify({messages: [{role: "user", content: "Once upon a time"}], max_tokens: 30,
                              stream: true})});
    const reader = answer.body.getReader(), decoder = new TextDecoder();
    let text = "", pieces = 0;
    for (;;) {
        const {done, value} = await reader.read();
        if (done) break;
        text += decoder.decode(value, {stream: true});
        pieces += 1;
    }
    return [answer.status, text, pieces, ["X-Request-Id", "Retry-After", "Content-Type", "X-Accel-Buffering"]
        .map(name => answer.headers.get(name))];
})().catch(error => error.name + ": " + error.message)"""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[tuple[str, str]]:
    """Two origins with an empty page each."""
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title><link rel=icon href=data:,>")

        def log_message(self, *_: object) -> None: """Nothing is logged."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as one, \
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        for each in (one, other): threading.Thread(target=each.serve_forever, daemon=True).start()
        yield tuple(f"http://127.0.0.1:{each.server_port}" for each in (one, other))  # type: ignore[misc]
        for each in (one, other): each.shutdown()


def test_a_page_of_another_origin_is_answered(window: Browser, engine: FakeEngine,
                                              elsewhere: tuple[str, str]):
    """With a key, so that the browser asks first what it may send; and the answer comes piece by piece."""
    allowed, other = elsewhere
    with live(fake_service(engine, keys=frozenset({"secret"}), cors=CORS((allowed,)))) as server:
        window.open(allowed)
        status, events, pieces, headers = window.run(ASK % (server.url, "secret"))
        assert (status, headers) == (200, ["page-7", None, "text/event-stream; charset=utf-8", None])
        assert events.endswith("data: [DONE]\n\n")
        assert pieces > 10
        # errors can be read, and so can the header that says when to come again
        status, events, _, headers = window.run(ASK % (server.url, "wrong"))
        assert (status, "invalid_api_key" in events, headers[0]) == (401, True, "page-7")
        engine.limit = 0
        status, _, _, headers = window.run(ASK % (server.url, "secret"))
        assert (status, headers[1]) == (429, "1")
        engine.limit, asked = 10, len(engine.asked)
        window.complaints()
        window.open(other)
        assert window.run(ASK % (server.url, "secret")) == "TypeError: Failed to fetch"
        assert any("blocked by CORS policy" in each for each in window.complaints())
        assert len(engine.asked) == asked, "the browser asked first, and sent no request"
    window.open("about:blank")


def test_every_origin_is_allowed_unless_some_are_named(window: Browser, engine: FakeEngine,
                                                       elsewhere: tuple[str, str]):
    with live(fake_service(engine, keys=frozenset({"secret"}))) as server:
        for origin in elsewhere:
            window.open(origin)
            assert window.run(ASK % (server.url, "secret"))[0] == 200
    window.open("about:blank")
    window.complaints()
