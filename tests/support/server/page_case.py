"""The chat page in a browser."""
from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.support.server.browser_case import Browser
from tests.support.server.serve_case import FakeEngine, Live
from tests.support.server.serve_case import until as soon

ANSWERS = "#messages li.assistant"
ENTER, ESCAPE, SHIFT, TAB, UP = "\ue007", "\ue00c", "\ue008", "\ue004", "\ue013"     # WebDriver's keys


def until(holds: Callable[[], object]) -> None:
    """Waits until `holds()`. A question to the browser costs it time, too."""
    soon(holds, pause_s=0.03)


def open_page(window: Browser, server: Live) -> None:
    """Opens the page, or opens it again. A Chromium that hangs as it loads the first page of a test, as one
    did for 60 s beside a full test run, is replaced, once."""
    try: window.open(server.url + "/")
    except httpx.TimeoutException:
        window.end()
        window.start()
        window.open(server.url + "/")
    until(lambda: window.text("#health") == "ready")


def forget(window: Browser, server: Live) -> None:
    """Leaves the page, and removes what the browser has kept of it."""
    window.open(server.url + "/icon.svg")
    window.run("localStorage.clear(); sessionStorage.clear()")
    window.complaints()


def field(window: Browser, selector: str = "#text") -> str:
    """What a field holds."""
    return str(window.each(selector, "e.value")[0])


def ended(window: Browser) -> bool:
    """Whether there is an answer, and none is being written."""
    return window.has(f"{ANSWERS}:not(.busy)") and window.has("#stop[hidden]")


def say(window: Browser, text: str) -> None:
    """Sends a message, and waits until it is answered."""
    window.type("#text", text + "\n")
    until(lambda: ended(window))


def prompts(engine: FakeEngine) -> list[str]:
    """What the engine was asked, in the words of the model's template."""
    return [engine.model.tokenizer.decode(list(parsed.ids or ())) for parsed, _ in engine.asked]
