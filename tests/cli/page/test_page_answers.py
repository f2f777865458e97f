"""The page, in a headless Chromium: answers, and what is done with them: stop, retry, edit, copy."""
from __future__ import annotations

import pytest

from tests.support.server.browser_case import Browser
from tests.support.server.page_case import ANSWERS, ESCAPE, UP, field, prompts, say, until
from tests.support.server.serve_case import NAME, FakeEngine, Live

SAID = "#messages li.user .text"
COPIED = "window.copied = []; navigator.clipboard.writeText = async text => { window.copied.push(text) }"


def test_an_answer_grows_is_measured_and_carries_the_next(window: Browser, page: Live, engine: FakeEngine):
    assert field(window, "#model") == NAME
    window.type("#max_tokens", "30")
    window.type("#text", "Once upon a time\n")
    until(lambda: window.text(f"{ANSWERS} .text") and engine.running)
    begun = window.text(f"{ANSWERS} .text")
    assert window.has("#send[hidden]")
    until(lambda: "first after" in window.text(f"{ANSWERS} small") and not engine.running)
    until(lambda: window.has("#stop[hidden]"))
    assert len(window.text(f"{ANSWERS} .text")) > len(begun) + 10
    assert window.text(f"{ANSWERS} small").startswith("30 tokens · ")
    assert "tokens/s" in window.text(f"{ANSWERS} small")
    assert "no more tokens were allowed" in window.text(f"{ANSWERS} .end")
    assert window.text(SAID) == "Once upon a time"
    # leading blank is no part of what is shown
    assert window.each(f"{ANSWERS} .text", "e.textContent[0]") == ["O"]
    # a finished answer is announced once, not token by token
    until(lambda: window.text("#announcer").startswith("Answer: Once upon"))
    assert window.run("return document.querySelector('#log').ariaLive") == "off"
    window.type("#text", "And then\n")
    until(lambda: len(engine.asked) == 2)
    assert prompts(engine)[1].startswith(prompts(engine)[0] + " ")
    assert prompts(engine)[1].endswith("And then")
    assert engine.asked[1][1].max_tokens == 30
    assert window.complaints() == []


def test_stop_keeps_what_there_is_and_retry_replaces_it(window: Browser, page: Live, engine: FakeEngine):
    for stop in (lambda: window.click("#stop"), lambda: window.type("#text", ESCAPE)):
        window.click("#clear")
        window.type("#text", "Once upon a time\n")
        until(lambda: len(window.text(f"{ANSWERS} .text")) > 3 and engine.running)
        stop()
        until(lambda: not engine.running)
        until(lambda: window.text(f"{ANSWERS} .end") == "Stopped.")
        assert len(window.text(f"{ANSWERS} .text")) > 3
        assert "tokens" in window.text(f"{ANSWERS} small")
    engine.text = "a fox"
    window.click(f"{ANSWERS} .retry")
    until(lambda: window.text(f"{ANSWERS} .text") == "a fox" and window.has("#stop[hidden]"))
    assert prompts(engine)[-1] == prompts(engine)[-2]
    assert window.text(f"{ANSWERS} .end") == ""
    # where there is no other answer, the last one stays
    engine.limit = 0
    window.click(f"{ANSWERS} .retry")
    until(lambda: "1 waits" in window.text("#messages li.error"))
    assert window.text(f"{ANSWERS} .text") == "a fox"
    assert field(window) == ""


@pytest.mark.slow
def test_an_edited_message_is_sent_again_from_there(window: Browser, page: Live, engine: FakeEngine):
    engine.text = "so"
    for words in ("first", "second"): say(window, words)
    # the arrow edits the last message, and Escape leaves it as it is
    window.type("#text", UP)
    window.type(".editor textarea", "!" + ESCAPE)
    assert window.text(SAID) == "first|second"
    window.type("#text", UP)
    window.type(".editor textarea", " thing\n")
    until(lambda: window.text(SAID) == "first|second thing" and window.has("#stop[hidden]"))
    # the first one leaves out what came after it, until that is undone
    window.run("document.querySelector('.user [aria-label=\"Edit message\"]').click()")
    window.type(".editor textarea", " of all")
    window.click(".editor .primary")
    until(lambda: window.text(SAID) == "first of all" and window.has("#stop[hidden]"))
    assert prompts(engine)[-1].endswith("first of all")
    window.click("#notice button")
    until(lambda: window.text(SAID) == "first|second thing")
    # a message that fails is in its editor again
    engine.limit = 0
    window.type("#text", UP)
    window.type(".editor textarea", "s fall\n")
    until(lambda: window.has(".editor"))
    assert field(window, ".editor textarea") == "second things fall"
    assert window.text(f"{ANSWERS} .text") == "so|so"


def test_answers_and_code_are_copied(window: Browser, page: Live, engine: FakeEngine):
    engine.pieces = ["\n\nUse ", "this:\n", "```py", "thon\nx = 1\n", "  y = '<b>'\n", "```\n", "All."]
    engine.pause_s = 0
    window.run(COPIED)
    window.type("#text", "Code, please\n")
    until(lambda: "All." in window.text(ANSWERS) and window.has("#stop[hidden]"))
    assert window.text(".code figcaption") == "python"
    window.click(".code figcaption button")
    window.click(f"{ANSWERS} .tools button")
    assert window.run("return window.copied") == [
        "x = 1\n  y = '<b>'", "".join(engine.pieces).strip()]
    until(lambda: window.text("#announcer") == "Copied.")


def test_a_conversation_goes_on_while_another_is_shown(window: Browser, page: Live, engine: FakeEngine):
    engine.pause_s = 0.05
    window.type("#text", "fox\n")
    until(lambda: "fox" in window.text(ANSWERS))
    window.click("#clear")
    assert window.text("#messages") == ""
    assert window.text("#conversations li.running").split() == ["fox", ",", "answering"]
    # the engine says its prompt again
    window.type("#text", "duck\n")
    until(lambda: "duck" in window.text(f"{ANSWERS} .text"))
    assert "fox" not in window.text("#messages")
    window.click("#stop")
    until(lambda: len(engine.running) == 1)
    window.each("#conversations li.running .conversation", "e.click()")
    begun = window.text(f"{ANSWERS} .text")
    until(lambda: len(window.text(f"{ANSWERS} .text")) > len(begun))
    assert "duck" not in window.text("#messages")
    window.click("#stop")
    until(lambda: not engine.running)
    assert window.complaints() == []


def test_a_connection_that_ends_too_early_is_told(window: Browser, page: Live):
    window.run("""const fetched = window.fetch, chunk = {choices: [{delta: {content: "Once"}}]};
        window.fetch = async (path, options) => path.endsWith("completions")
            ? new Response(`data: ${JSON.stringify(chunk)}\\n\\n`) : fetched(path, options)""")
    window.type("#text", "And then\n")
    until(lambda: "is lost" in window.text("#messages li.error"))
    assert window.text(f"{ANSWERS} .text") == "Once"
    assert "broke off" in window.text(f"{ANSWERS} .end")
    # without an answer, the words can be sent again, before what was written since
    window.run("""window.fetch = async path => { if (path.endsWith("completions"))
        return new Promise((_, fail) => { window.fail = fail })
        throw new TypeError("network error") }""")
    window.type("#text", "Who\n")
    window.type("#text", "goes there")
    window.run("window.fail(new TypeError('network error'))")
    until(lambda: field(window) == "Who\n\ngoes there")
    assert window.text(SAID) == "And then"
    until(lambda: window.text("#health") == "not reachable")


def test_an_error_is_told_in_its_parts(window: Browser, page: Live, engine: FakeEngine):
    engine.limit = 0
    window.type("#text", "Once\n")
    until(lambda: window.text("#messages li.error dt") == "Found|Expected|To fix")
    assert window.text("#messages li.error dd") == "1 waits|less than 1|come again"
    assert (window.text(ANSWERS), window.text(SAID), field(window)) == ("", "", "Once")
    engine.limit = 10
    # a field that the server refuses is marked
    window.type("#top_p", "3")
    window.type("#text", "\n")
    until(lambda: "top_p is 3, expected" not in window.text("#messages li.error") and
          "top_p is 3" in window.text("#messages li.error"))
    assert window.has("#top_p[aria-invalid]")
    window.click("#reset")
    window.type("#max_tokens", "3")
    window.type("#text", "\n")
    until(lambda: "3 tokens" in window.text(ANSWERS))
    assert not window.has("li.error")
    # the console names the answers 429 and 400, and nothing else
    assert [each for each in window.complaints() if "429" not in each and "400" not in each] == []
    # a page that came before its server finds the model
    window.run("document.querySelector('#model').replaceChildren()")
    until(lambda: field(window, "#model") == NAME)
