"""The page, in a headless Chromium: it talks, stops, shows what the engine does, and loads nothing else."""
from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_case import Browser, browser
from serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live, until

from tinygrad_nv.server.service import CORS

PAGE = Path(__file__).parents[2] / "tinygrad_nv" / "server" / "page"
ANSWERS = "#messages li.assistant"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made: yield made


@pytest.fixture
def engine() -> FakeEngine: return FakeEngine(FakeModel(), pause_s=0.02)


@pytest.fixture
def page(window: Browser, engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine)) as server:
        window.open(server.url + "/")
        until(lambda: text(window, "#health") == "ready")
        yield server
        window.open("about:blank")


def text(window: Browser, selector: str) -> str:
    return window.run(f"return [...document.querySelectorAll({selector!r})].map(e => e.innerText).join('|')")


def test_a_message_is_answered_word_by_word(window: Browser, page: Live, engine: FakeEngine):
    assert window.run("return document.querySelector('#model').value") == NAME
    window.type("#max_tokens", "40")
    window.type("#text", "Once upon a time\n")
    until(lambda: text(window, ANSWERS) and engine.running)
    begun = text(window, ANSWERS)
    until(lambda: not engine.running)
    until(lambda: "40 tokens" in text(window, ANSWERS))
    whole = text(window, ANSWERS)
    assert len(whole) > len(begun) + 20
    assert text(window, "#messages li.user") == "Once upon a time"
    # the second turn carries the first, and the engine repeats it
    window.type("#text", "And then\n")
    until(lambda: "tokens ·" in text(window, ANSWERS).partition("|")[2])
    assert window.complaints() == []


def test_stop_ends_the_answer_and_keeps_what_there_is(window: Browser, page: Live, engine: FakeEngine):
    for stop in (lambda: window.click("#stop"), lambda: window.type("#text", "\ue00c")):  # the Escape key
        window.click("#clear")
        window.type("#text", "Once upon a time")
        window.click("#send")
        until(lambda: len(text(window, ANSWERS)) > 3 and engine.running)
        stop()
        until(lambda: not engine.running)
        until(lambda: "stopped" in text(window, ANSWERS))
        assert len(text(window, ANSWERS)) > len("stopped")
        assert window.run("return document.querySelector('#send').disabled") is False
    assert window.complaints() == []


def test_figures_move(window: Browser, page: Live, engine: FakeEngine):
    until(lambda: text(window, "#running") == "0")
    window.type("#text", "Once upon a time\n")
    until(lambda: text(window, "#running") == "1")
    until(lambda: float(text(window, "#rate").split()[0]) > 5)
    assert text(window, "#kv") == "25 %"
    assert "L" in window.run("return document.querySelector('#figures path.line').getAttribute('d')")
    window.click("#stop")
    until(lambda: text(window, "#running") == "0")
    assert window.complaints() == []


def test_a_new_conversation_in_the_middle_of_an_answer_begins_with_nothing(
        window: Browser, page: Live, engine: FakeEngine):
    window.type("#text", "fox\n")
    until(lambda: "fox" in text(window, ANSWERS))
    window.click("#clear")
    until(lambda: not engine.running)
    window.type("#max_tokens", "8")
    window.type("#text", "duck\n")
    until(lambda: "8 tokens" in text(window, ANSWERS))
    # the engine says its prompt again
    assert "duck" in text(window, ANSWERS)
    assert "fox" not in text(window, ANSWERS)
    assert "no more tokens were allowed" in text(window, ANSWERS)
    assert window.complaints() == []


def test_a_connection_that_ends_too_early_is_told(window: Browser, page: Live):
    window.run("""const fetched = window.fetch, chunk = {choices: [{delta: {content: "Once"}}]};
        window.fetch = async (path, options) => path.endsWith("completions")
            ? new Response(`data: ${JSON.stringify(chunk)}\\n\\n`) : fetched(path, options)""")
    window.type("#text", "And then\n")
    until(lambda: "is lost" in text(window, "#messages li.error"))
    assert text(window, ANSWERS) == "Once"
    # without an answer, the words can be sent again
    window.run("window.fetch = async () => { throw new TypeError('network error') }")
    window.type("#text", "Who\n")
    until(lambda: window.run("return document.querySelector('#text').value") == "Who")
    assert text(window, "#messages li.user") == "And then"
    until(lambda: text(window, "#health") == "not reachable")


def test_a_page_that_came_before_its_server_finds_the_model(window: Browser, page: Live):
    window.run("document.querySelector('#model').replaceChildren()")
    until(lambda: window.run("return document.querySelector('#model').value") == NAME)


def test_an_error_is_told_in_words(window: Browser, page: Live, engine: FakeEngine):
    engine.limit = 0
    window.type("#text", "Once\n")
    until(lambda: "1 waits" in text(window, "#messages li.error"))
    assert text(window, ANSWERS) == ""
    engine.limit = 10
    window.type("#max_tokens", "3")
    window.type("#text", "Once\n")
    until(lambda: "3 tokens" in text(window, ANSWERS))
    # the console names the answer 429, and nothing else
    assert [each for each in window.complaints() if "429" not in each] == []


def test_a_key_is_asked_for_and_sent(window: Browser):
    with live(fake_service(keys=frozenset({"secret"}))) as server:
        window.open(server.url + "/")
        until(lambda: window.run("return document.activeElement.id") == "key")
        then = window.run("return performance.now()")
        until(lambda: window.run("return performance.now()") > then + 1500)     # the page looks once a second
        assert text(window, "#health") == "wants an API key"
        window.type("#key", "secret\ue004")
        until(lambda: window.run("return document.querySelector('#model').value") == NAME)
        until(lambda: text(window, "#health") == "ready")
        window.run("sessionStorage.clear()")
    window.complaints()


def test_controls_have_labels(window: Browser, page: Live):
    unlabelled = window.run("""return [...document.querySelectorAll("input, select, textarea, button, svg")]
        .filter(e => !(e.labels && e.labels.length) && !e.innerText && !e.ariaLabel).map(e => e.outerHTML)""")
    assert unlabelled == []
    assert window.run("return document.documentElement.lang") == "en"


def test_nothing_is_cut_off_on_a_telephone(window: Browser, page: Live):
    screen = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    window.call("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=screen)
    try: assert window.run("return document.documentElement.scrollWidth") == 360
    finally: window.call("goog/cdp/execute", cmd="Emulation.clearDeviceMetricsOverride", params={})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(window: Browser, page: Live, scheme: str):
    window.call("goog/cdp/execute", cmd="Emulation.setEmulatedMedia",
                params={"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    colours = window.run("""const style = getComputedStyle(document.documentElement);
        return ["--back", "--panel", "--front", "--soft", "--accent", "--on-accent"]
            .map(name => style.getPropertyValue(name).trim())""")
    back, panel, front, soft, accent, on_accent = map(luminance, colours)
    assert (back < 0.1) == (scheme == "dark")
    # WCAG AA: 4.5 for text
    for one, other in ((front, back), (front, panel), (soft, back), (soft, panel), (accent, on_accent)):
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, by WCAG."""
    parts = [int(colour[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_nothing_comes_from_elsewhere(window: Browser, page: Live):
    for file in PAGE.iterdir(): assert not re.search(r"//\w", file.read_text()), file
    loaded = window.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert all(name.startswith(page.url) for name in loaded)
    assert "default-src 'self'" in page.http.get("/").headers["content-security-policy"]


# **** pages of other origins ****

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
