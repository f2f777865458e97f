"""The page, in a browser: what is kept, and the choice of model, settings, key and theme."""
from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

import pytest

from tests.support.server.browser_case import Browser
from tests.support.server.page_case import ANSWERS, ENTER, SHIFT, ended, field, open_page, prompts, say, until
from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.adapters import AdapterNames

BIG = {"id": "big", "title": "big", "named": True, "updated": 1, "messages": [{"role": "user"}]}


@pytest.mark.slow
def test_a_reload_keeps_conversations_settings_and_what_is_written(
        window: Browser, page: Live, engine: FakeEngine):
    engine.text, engine.pause_s = "a **fox**", 0
    say(window, f"First of all{SHIFT}{ENTER}{SHIFT}and more")
    window.click("#clear")
    say(window, "Second")
    shown = window.text("#messages")
    asked = {"temperature": "0.5", "top_k": "7", "seed": "11", "repetition_penalty": "1.2", "system": "Be."}
    for name, value in asked.items(): window.type(f"#{name}", value)
    window.type("#stop_strings", "END\n\\n\\n")
    window.type("#text", "not sent yet")
    open_page(window, page)
    assert window.text("#conversations .conversation") == "Second|First of all"
    assert window.text("#messages") == shown
    assert window.text(f"{ANSWERS} strong") == "fox"
    assert field(window) == "not sent yet"
    # each conversation has what is written for it
    window.click("#clear")
    assert field(window) == ""
    window.run("document.querySelectorAll('.conversation')[1].click()")
    assert "and more" in window.text("#messages")
    say(window, "Third")
    params = engine.asked[-1][1]
    assert (params.temperature, params.top_k, params.seed, params.repetition_penalty) == (0.5, 7, 11, 1.2)
    assert params.stop == ["END", "\n\n"]
    # the latest is the first
    assert window.text("#conversations .conversation") == "First of all|Second"
    window.click("#reset")
    assert window.has("#reset:disabled")
    say(window, "Fourth")
    assert engine.asked[-1][1].top_k != 7
    assert window.complaints() == []


def test_a_reload_in_the_middle_of_an_answer_keeps_its_beginning(
        window: Browser, page: Live, engine: FakeEngine):
    window.type("#text", "Once upon a time\n")
    until(lambda: len(window.text(f"{ANSWERS} .text")) > 5)
    open_page(window, page)
    assert len(window.text(f"{ANSWERS} .text")) > 5
    assert "broke off" in window.text(f"{ANSWERS} .end")
    engine.text = "so"
    window.click(f"{ANSWERS} .retry")
    until(lambda: ended(window) and window.text(f"{ANSWERS} .text") == "so")


def test_conversations_are_renamed_saved_deleted_and_restored(
        window: Browser, page: Live, engine: FakeEngine):
    engine.text, engine.pause_s = "a fox", 0
    say(window, "Who lives in a wood?")
    window.click("#conversations .quiet-button")
    window.click("#menu-rename")
    window.type("#conversations input", "Wood & tree" + ENTER)
    assert window.text("#conversations .conversation") == "Wood & tree"
    assert window.run("return document.title") == "Wood & tree · tinygrad-nv"
    window.run("""window.saved = []; URL.createObjectURL = blob => { window.saved.push(blob); return "#" };
        HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download) }""")
    for name in ("markdown", "json"):
        window.click("#conversations .quiet-button")
        window.click(f"#menu-{name}")
    text, made, named, second = window.later(
        "const s = window.saved; return [await s[0].text(), JSON.parse(await s[2].text()), s[1], s[3]]")
    assert text == f"# Wood & tree\n\n## You\n\nWho lives in a wood?\n\n## {NAME}\n\na fox\n"
    assert (named, second) == ("Wood-tree.md", "Wood-tree.json")
    assert made["messages"] == [{"role": "user", "content": "Who lives in a wood?"},
                                {"role": "assistant", "content": "a fox"}]
    assert made["model"] == NAME
    window.click("#conversations .quiet-button")
    window.click("#menu-delete")
    assert (window.text("#conversations"), window.text("#messages")) == ("", "")
    window.click("#notice button")
    assert window.text("#conversations .conversation") == "Wood & tree"
    assert "a fox" in window.text("#messages")
    window.click("#conversations .quiet-button")
    window.click("#menu-delete")
    open_page(window, page)
    assert window.text("#conversations") == ""
    assert "kept in this browser only" in window.text("#storage")


def test_full_and_damaged_storage_is_told_and_costs_nothing_else(
        window: Browser, page: Live, engine: FakeEngine):
    engine.text, engine.pause_s = "a fox", 0
    window.run(f"""const put = (id, text) => localStorage.setItem("tinygrad-nv:conversation:" + id, text);
        const big = {json.dumps(BIG)};
        big.messages[0].content = "x".repeat(4 * 2 ** 20 - 200);
        put("big", JSON.stringify(big)); put("a", "no JSON"); put("b", '{{"id": "b"}}');
        localStorage.setItem("tinygrad-nv:settings", "[")""")
    open_page(window, page)
    assert window.text("#conversations .conversation") == "big"
    assert "4.0 of 4 MB" in window.text("#storage")
    say(window, "One more")
    assert "not kept: the browser's storage is full (4.0 of 4 MB)" in window.text("#notice")
    assert "a fox" in window.text(ANSWERS)
    # another tab makes room
    window.run("""const key = "tinygrad-nv:conversation:big"; localStorage.removeItem(key);
        window.dispatchEvent(new StorageEvent("storage", {key, newValue: null}))""")
    until(lambda: window.text("#conversations .conversation") == "One more")
    say(window, "And another")
    open_page(window, page)
    assert window.text("#conversations .conversation") == "One more"
    assert window.complaints() == []


def test_a_theme_is_chosen_and_kept(window: Browser, page: Live):
    def dark() -> bool:
        red = window.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        return int(red) < 60
    try:
        for system in ("light", "dark"):
            window.media(prefers_color_scheme=system)
            assert dark() == (system == "dark")
        window.click("#theme input[value=light]")
        assert not dark()
        open_page(window, page)
        assert not dark()
        assert field(window, "#theme :checked") == "light"
        window.click("#theme input[value=auto]")
        assert dark()
    finally: window.media()


THINKS = "{% for m in messages %}{{ m['content'] }} {% endfor %}{# <think>, enable_thinking #}"


def test_a_key_is_asked_for_then_models_adapters_and_reasoning_are_offered(window: Browser):
    pieces = ["<think>", "\nIs it a ", "**fox**?", "</think>", "\n\nIt ", "is."]
    engine = FakeEngine(FakeModel(THINKS), pieces=pieces)
    adapters = AdapterNames(Namespace(load=lambda _: None), (NAME,))
    adapters.add("french", "/adapters/french")
    service = fake_service(engine, keys=frozenset({"secret"}), adapters=adapters)
    with live(service) as server:
        window.open(server.url + "/")
        until(lambda: window.run("return document.activeElement.id") == "key")
        assert window.text("#health") == "wants an API key"
        window.type("#key", "wrong" + ENTER)
        until(lambda: window.text("#key-wrong") != "")
        window.type("#key", "secret" + ENTER)
        until(lambda: window.text("#health") == "ready")
        assert window.run("return JSON.stringify(localStorage).includes('secret')") is False
        assert window.each("#model optgroup", "[e.label, e.firstElementChild.value]") == [
            ["Model", NAME], ["Adapters", "french"]]
        window.each("#model", "[e.value = 'french', e.dispatchEvent(new Event('change'))]")
        assert window.text("#reasoning_effort option") == "default|off|on"
        # the browser reads all pieces at once: a clock that stands says so
        window.run("performance.now = () => 1000")
        say(window, "Who?")
        # reasoning is folded, and is no part of the answer
        assert engine.loras[-1].lora_name == "french"
        assert window.text(f"{ANSWERS} .tools + *, {ANSWERS} > .text") == "It is."
        assert window.text(".thinking summary").startswith("Thought for ")
        assert not window.has(".thinking[open]")
        window.click(".thinking summary")
        assert window.text(".thinking strong") == "fox"
        # a key that holds no more is asked for, and the words are kept
        window.run("sessionStorage.setItem('tinygrad-nv:key', 'old')")
        window.type("#text", "Again\n")
        until(lambda: window.has("#key-dialog[open]"))
        assert field(window) == "Again"
        window.type("#key", "secret" + ENTER)
        until(lambda: window.text("#health") == "ready")
        assert field(window, "#model") == "french"
        window.click("#send")
        until(lambda: len(engine.asked) == 2)
        # the reasoning is not sent back
        assert prompts(engine)[1].split() == ["Who?", "It", "is.", "Again"]
        window.run("localStorage.clear(); sessionStorage.clear()")
        window.open("about:blank")
    window.complaints()


def test_tool_calls_are_shown_and_sent_back(window: Browser, page: Live):
    window.run("""const fetched = window.fetch;
        const chunk = call => ({choices: [{delta: {tool_calls: [{index: 0, ...call}]}}]});
        const chunks = [chunk({id: "a", type: "function", function: {name: "look", arguments: ""}}),
            chunk({function: {arguments: '{"at": '}}), chunk({function: {arguments: '"a fox"}'}}),
            {choices: [{delta: {}, finish_reason: "tool_calls"}]}];
        const stream = [...chunks.map(each => `data: ${JSON.stringify(each)}`), "data: [DONE]", ""];
        window.sent = [];
        window.fetch = async (path, options) => {
            if (!path.endsWith("completions")) return fetched(path, options);
            window.sent.push(JSON.parse(options.body));
            return new Response(stream.join("\\n\\n"));
        }""")
    say(window, "Look")
    assert window.text(".call figcaption span") == "Calls look"
    assert window.text(".call code") == '{\n  "at": "a fox"\n}'
    assert window.text(f"{ANSWERS} .end") == ""
    say(window, "It is red")
    sent: Any = window.run("return window.sent[1].messages")
    assert [each["role"] for each in sent] == ["user", "assistant", "user"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "a fox"}'}
