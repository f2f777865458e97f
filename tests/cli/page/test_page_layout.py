"""The page, in a browser: layout, keyboard, screen readers, contrast, plots, where it comes from. And the
server as a page of another origin uses it."""
from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server.browser_case import Browser
from tests.support.server.page_case import ESCAPE, TAB, ended, field, until
from tests.support.server.serve_case import FakeEngine, Live, fake_service, live
from tinygrad_nv.server.service import CORS

PAGE = Path(__file__).parents[3] / "tinygrad_nv" / "server" / "page"
WIDTH = "return document.documentElement.scrollWidth"
LINE = "if x == 1: return 'a string'  # code that is wider than a telephone is, so that it scrolls\n"
MARKDOWN = ("Some *text* with `code` and a [link](https://example.org).\n\n> quoted\n\n1. one\n\n"
            "| a | b |\n|--|--|\n| c | d |\n\n" f"```python\n{LINE * 3}```\n")


@pytest.fixture
def telephone(window: Browser, page: Live) -> Iterator[Live]:
    window.screen(390, 844)
    yield page
    window.screen()


def answered(window: Browser, engine: FakeEngine) -> None:
    """A conversation of one turn, with all that Markdown has."""
    engine.pieces, engine.pause_s = re.findall(r"\s*\S+\s*", MARKDOWN), 0
    window.type("#text", "Show me\n")
    until(lambda: ended(window))


def press(window: Browser, key: str) -> None:
    """Presses a key, where the focus is."""
    strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
    window.call("actions", actions=[{"type": "key", "id": "keys", "actions": strokes}])


def focused(window: Browser) -> str: return str(window.run("return document.activeElement.id"))


def test_a_telephone_gives_the_conversation_its_room(window: Browser, telephone: Live, engine: FakeEngine):
    answered(window, engine)
    assert window.run(WIDTH) == 390
    heights = {name: window.each(name, "e.offsetHeight")[0] for name in ("#log", "#centre > header")}
    assert heights["#log"] >= 0.6 * 844
    assert heights["#centre > header"] <= 56
    rows = window.each("#centre > header > *", "e.offsetWidth > 1 ? e.offsetTop + e.offsetHeight / 2 : null")
    assert max(filter(None, rows)) - min(filter(None, rows)) < 4      # one row
    assert 820 <= window.each("#form", "e.getBoundingClientRect().bottom")[0] <= 844
    # code scrolls in itself
    assert window.each("pre", "e.scrollWidth > e.clientWidth") == [True]
    # drawers: what is behind them is out of reach, Escape closes them, and the focus comes back
    for name in ("side", "panel"):
        assert window.each(f"#{name}", "getComputedStyle(e).display") == ["none"]
        window.click(f"#{name}-toggle")
        assert window.has("#centre[inert]")
        assert window.each(f"#{name}", "e.contains(document.activeElement)") == [True]
        assert window.run(WIDTH) == 390
        press(window, ESCAPE)
        assert focused(window) == f"{name}-toggle"
        assert window.has(f"body:not(.{name}-open)")
    # a conversation that is chosen closes the drawer
    window.click("#side-toggle")
    window.click("#conversations .conversation")
    assert window.has("body:not(.side-open)")
    assert focused(window) == "log"
    for width in (360, 820, 1440):
        window.screen(width, 800)
        assert window.run(WIDTH) == width
    assert window.complaints() == []


def test_everything_is_reached_by_keys(window: Browser, page: Live, engine: FakeEngine):
    answered(window, engine)
    window.run("document.activeElement.blur()")
    window.type("body", "/")
    assert focused(window) == "text"
    assert field(window) == ""
    # in a field, "/" is a letter
    window.type("#text", "a/b")
    assert field(window) == "a/b"
    window.type("#text", TAB)
    assert focused(window) == "send"
    # the order is that of the page, and what is focused is seen
    window.run("document.querySelector('#clear').focus()")
    seen = []
    for _ in range(10):
        press(window, TAB)
        seen.append(window.run("""const e = document.activeElement, style = getComputedStyle(e);
            return [e.id || e.ariaLabel || e.tagName, style.outlineStyle !== "none" || e.id === "text"]"""))
    assert [name for name, _ in seen] == ["panel-toggle", "log", "Copy message", "Edit message", "A", "Table",
                                          "Copy code", "Code: python", "Copy answer", "Answer again"]
    assert all(outlined for _, outlined in seen)


def test_screen_readers_find_landmarks_labels_and_a_log(window: Browser, page: Live, engine: FakeEngine):
    answered(window, engine)
    controls = window.each("input, select, textarea, button, #figures svg",
                           "[e.outerHTML, Boolean(e.labels?.length || e.innerText || e.ariaLabel)]")
    assert [html for html, labelled in controls if not labelled] == []
    assert window.run("return document.documentElement.lang") == "en"
    found = window.each("nav, main, aside, header, [role=log], [aria-live=polite]", "e.id || e.tagName")
    assert set(found) == {"side", "MAIN", "panel", "HEADER", "log", "announcer"}
    assert window.each("#messages h3", "e.textContent") == ["You", "tales answers"]
    # what moves is still where that is asked for
    window.media(prefers_reduced_motion="reduce")
    window.each(".assistant", "e.classList.add('waiting')")
    moves = window.each(".assistant .text", "getComputedStyle(e, '::after').animationName")
    window.media()
    assert moves == ["none"]


# each text that is seen, with the colours of it and of what is behind it
CONTRASTS = """
    const colour = text => {
        const [r, g, b, a = 1] = text.match(/[\\d.]+(?:e-?\\d+)?/g).map(Number);
        return text.startsWith("color") ? [r, g, b, a] : [r / 255, g / 255, b / 255, a];
    };
    const over = (top, bottom) => [0, 1, 2].map(at => top[at] * top[3] + bottom[at] * (1 - top[3]));
    const behind = e => {
        if (!e) return [1, 1, 1, 1];
        const own = colour(getComputedStyle(e).backgroundColor);
        return own[3] === 1 ? own : over(own, behind(e.parentElement));
    };
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const contrast = (one, other) => (Math.max(luminance(one), luminance(other)) + 0.05)
        / (Math.min(luminance(one), luminance(other)) + 0.05);
    const out = [];
    for (const e of document.querySelectorAll("body *")) {
        const words = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || e.placeholder;
        const seen = e.checkVisibility({visibilityProperty: true}) && !e.closest("symbol, option, .hidden");
        if (!words || !seen) continue;
        const style = getComputedStyle(e), back = behind(e);
        const front = e.closest("svg") ? style.fill
            : e.placeholder ? getComputedStyle(e, "::placeholder").color : style.color;
        out.push([contrast(over(colour(front), back), back), e.outerHTML.slice(0, 100)]);
    }
    return out;"""


def test_all_text_stands_out_in_both_themes(window: Browser, page: Live, engine: FakeEngine):
    answered(window, engine)
    engine.limit = 0
    window.type("#text", "Fail\n")
    until(lambda: window.has("li.error"))
    window.each("#key-dialog", "e.show()")
    window.each("#key-wrong", "e.hidden = false")
    window.each("#conversations .quiet-button", "e.click()")
    for scheme in ("light", "dark"):
        window.media(prefers_color_scheme=scheme)
        texts = window.run(CONTRASTS)
        window.media()
        # WCAG AA
        assert [each for each in texts if each[0] < 4.5] == []
        assert len(texts) > 60


def test_plots_have_values_axes_and_units(window: Browser, page: Live, engine: FakeEngine):
    until(lambda: window.text("#running") == "0")
    window.type("#text", "Once upon a time\n")
    until(lambda: window.text("#running") == "1" and float(window.text("#rate")) > 5)
    assert window.text("#kv") == "25"
    window.click("#stop")
    until(lambda: window.text("#running") == "0" and window.text("#ttft") != "–")
    lines = window.each("#figures .line", "e.getAttribute('d').split('L').length")
    assert len(lines) == 5
    assert min(lines[0], *lines[2:]) > 1
    labels = window.each("#figures svg", "e.ariaLabel")
    assert re.fullmatch(r"Generation, the last minute, now: tokens/s [\d.]+ tokens/s", labels[0])
    assert re.fullmatch(r"Time to first token, the last minute, now: mean [\d.]+ ms", labels[1])
    assert re.fullmatch(r"Requests, the last minute, now: running 0, waiting 0", labels[2])
    assert labels[3] == "KV cache in use, the last minute, now: in use 25 %"
    assert window.each("#figures svg", "e.querySelectorAll('text').length") == [5] * 4
    # nothing is asked of /metrics while the plots are not seen
    window.click("#panel-toggle")
    window.run("const fetched = window.fetch; window.asked = []; "
               "window.fetch = (path, options) => { window.asked.push(path); return fetched(path, options) }")
    until(lambda: "health" in window.run("return window.asked"))
    assert "metrics" not in window.run("return window.asked")


def test_nothing_comes_from_elsewhere_and_nothing_is_missing(window: Browser, page: Live):
    for file in PAGE.iterdir():
        assert not re.search(r"//(?!www\.w3\.org/2000/svg)\w", file.read_text()), file
        if file.suffix == ".js": assert "HTML =" not in file.read_text(), file
    loaded = window.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert {f"{page.url}/{file.name}" for file in PAGE.glob("*.*s")} <= set(loaded)
    assert all(name.startswith(page.url) for name in loaded)
    policy = page.http.get("/").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for name in ("icon.svg", "favicon.ico"):
        icon = page.http.get(f"/{name}")
        assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    assert 'status="404"' not in page.http.get("/metrics").text


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
