"""Markdown of the page, in a browser: what it becomes, that hostile text stays text, and streams."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server.browser_case import Browser
from tests.support.server.page_case import until
from tests.support.server.serve_case import FakeEngine, Live

# draws texts, and takes out what copies code and the roles of regions
DRAW = """const {Markdown} = await import("./markdown.js");
    function drawn(texts, open = false) {
        const root = document.createElement("div"), markdown = new Markdown(root);
        texts.forEach((text, at) => markdown.update(text, !open && at === texts.length - 1));
        root.querySelectorAll("figcaption button").forEach(each => each.remove());
        root.querySelectorAll("*").forEach(each => { for (const name of ["tabindex", "role", "aria-label",
            "target", "rel", "data-level"]) each.removeAttribute(name); });
        return root;
    }"""


@pytest.fixture
def renderer(window: Browser, served: tuple[Live, FakeEngine]) -> None:
    """The page, opened before or now: tests of the renderer leave nothing on it."""
    url = served[0].url + "/"
    if window.run("return location.href") != url: window.open(url)


EXAMPLES = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# a *b* #\n### c": "<h3>a <em>b</em></h3><h5>c</h5>",
    "**a *b* c** _d_ ~~e~~ ***f***": "<p><strong>a <em>b</em> c</strong> <em>d</em> <del>e</del> "
                                     "<em><strong>f</strong></em></p>",
    "snake_case_word 2 * 3 \\*not\\* **": "<p>snake_case_word 2 * 3 *not* **</p>",
    "`a ** b` `` c`d `` `open": "<p><code>a ** b</code> <code>c`d</code> `open</p>",
    "- a\n- b\n  - c\n\n    d\n- e": "<ul><li>a</li><li>b<ul><li><p>c</p><p>d</p></li></ul></li><li>e</li>"
                                      "</ul>",
    "2. a\n3. b\n\ntext": '<ol start="2"><li>a</li><li>b</li></ol><p>text</p>',
    # indented less than the text of its item, as models do
    "1. a\n  - b": "<ol><li>a<ul><li>b</li></ul></li></ol>",
    "Text:\n* a\n* b": "<p>Text:</p><ul><li>a</li><li>b</li></ul>",
    "- [x] a\n- [ ] b": '<ul><li class="task"><input type="checkbox" disabled="">a</li>'
                        '<li class="task"><input type="checkbox" disabled="">b</li></ul>',
    "| a | b |\n|:-:|--:|\n| `x|y` | 1 |\n| c |": '<div class="table"><table><thead><tr>'
        '<th class="align-center">a</th><th class="align-right">b</th></tr></thead><tbody><tr>'
        '<td class="align-center"><code>x|y</code></td><td class="align-right">1</td></tr><tr>'
        '<td class="align-center">c</td></tr></tbody></table></div>',
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "```py t\n<b>&amp;\n\n  x\n```\nafter": '<figure class="code"><figcaption><span>py</span></figcaption>'
        "<pre><code>&lt;b&gt;&amp;amp;\n\n  x</code></pre></figure><p>after</p>",
    "- a\n  ```\n  x\n  ```": '<ul><li>a<figure class="code"><figcaption><span>text</span></figcaption>'
                              "<pre><code>x</code></pre></figure></li></ul>",
    "[a](https://b.c/d_(e) 'f') <mailto:g@h.i> https://j.k/l.": '<p><a href="https://b.c/d_(e)">a</a> '
        '<a href="mailto:g@h.i">mailto:g@h.i</a> <a href="https://j.k/l">https://j.k/l</a>.</p>',
    "[https://a.b](https://c.d) [https://e.f]": '<p><a href="https://c.d/"><span>https://a.b</span></a> '
        '[<a href="https://e.f/">https://e.f</a>]</p>',
    "![a fox](https://b.c/d.png)": '<p><a href="https://b.c/d.png">a fox</a></p>',      # nothing is loaded
    "a &lt;b&gt; &copy; <br> c": "<p>a &lt;b&gt; &amp;copy; <br> c</p>",
}


def test_markdown_becomes_elements(window: Browser, renderer: None):
    made = window.later(f"{DRAW} return {json.dumps(list(EXAMPLES))}.map(text => drawn([text]).innerHTML)")
    for (text, expected), html in zip(EXAMPLES.items(), made, strict=True): assert html == expected, text


def test_code_has_colours_and_keeps_its_text(window: Browser, renderer: None):
    made = window.later("""const {highlight} = await import("./highlight.js");
        return [["x = f(1.5, 'a # b')  # if\\n\\"\\"\\"return\\"\\"\\"", "python"],
                ["let x = `a\\n`; // if", "js"], ["char c = '\\\\n'; /* 1", "c"],
                ["SELECT 1 -- x", "sql"], ["if <b>", "html"]]
            .map(each => highlight(...each))""")
    kinds = [[(kind, text) for kind, text in each if kind] for each in made]
    assert kinds == [
        [("number", "1.5"), ("string", "'a # b'"), ("comment", "# if"), ("string", '"""return"""')],
        [("word", "let"), ("string", "`a\n`"), ("comment", "// if")],
        [("word", "char"), ("string", "'\\n'"), ("comment", "/* 1")],
        [("word", "SELECT"), ("number", "1"), ("comment", "-- x")], []]
    assert "".join(text for _, text in made[0]) == "x = f(1.5, 'a # b')  # if\n\"\"\"return\"\"\""


def test_a_text_that_grows_is_drawn_as_the_whole(window: Browser, renderer: None):
    text = "\n\n".join(EXAMPLES)
    made = window.later(f"""{DRAW} const text = {json.dumps(text)};
        const steps = [...text].map((_, at) => text.slice(0, at + 1));
        return [drawn(steps).innerHTML, drawn([text]).innerHTML]""")
    assert made[0] == made[1]
    assert len(made[0]) > 1000


def test_finished_blocks_stay_and_code_grows_in_place(window: Browser, renderer: None):
    kept = window.later("""const {Markdown} = await import("./markdown.js");
        const root = document.createElement("div"), markdown = new Markdown(root);
        markdown.update("first\\n\\n```js\\nlet");
        const [first, code] = root.children, node = code.querySelector("code").firstChild;
        markdown.update("first\\n\\n```js\\nlet x;\\n");
        const html = code.querySelector("code").innerHTML;
        markdown.update("first\\n\\n```js\\nlet x;\\n```\\n\\nlast", true);
        return [root.children[0] === first, root.children[1].querySelector("code").textContent, html,
                node.isConnected, root.children.length]""")
    assert kept == [True, "let x;", "let x;\n", False, 3]


OPEN = {"```py\nx = 1": '<figure class="code"><figcaption><span>py</span></figcaption>'
                        "<pre><code>x = 1</code></pre></figure>",
        "so **bold": "<p>so <strong>bold</strong></p>", "so `co": "<p>so <code>co</code></p>",
        "so **": "<p>so </p>", "a\n\n- so **b": "<p>a</p><ul><li>so <strong>b</strong></li></ul>"}


def test_what_is_still_open_looks_as_it_will(window: Browser, renderer: None):
    made = window.later(f"{DRAW} return {json.dumps(list(OPEN))}.map(text => drawn([text], true).innerHTML)")
    for (text, expected), html in zip(OPEN.items(), made, strict=True): assert html == expected, text


HOSTILE = [
    "<script>window.hurt = 1</script>", "<img src=x onerror='window.hurt = 1'>", "<svg/onload=window.hurt=1>",
    "[a](javascript:window.hurt=1)", "[a](JaVaScRiPt:window.hurt=1)", "[a](  javascript:window.hurt=1)",
    "[a](<javascript:window.hurt=1>)", "<javascript:window.hurt=1>",
    "[a](data:text/html,<script>window.hurt=1</script>)",
    "[a](vbscript:x)", "[a](file:///etc/passwd)", "[a](/v1/models)", "[a](java\nscript:window.hurt=1)",
    "[a](&#106;avascript:window.hurt=1)", "![a](x\" onerror=\"window.hurt=1)",
    "`<img src=x onerror=window.hurt=1>`", "```<script>\n<script>window.hurt=1</script>\n```",
    "|<script>|\n|--|\n|<img src=x onerror=window.hurt=1>|",
    "[a](https://b.c \"x\" onclick=\"window.hurt=1\")", "<a href='javascript:window.hurt=1'>a</a>",
    "[https://a.b](https://c.d)", "<style>* { display: none }</style><base href=https://evil.example>"]
ALLOWED = {"P", "A", "BR", "CODE", "PRE", "SPAN", "FIGURE", "FIGCAPTION",
           "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}


def test_hostile_text_stays_text(window: Browser, page: Live, engine: FakeEngine):
    found: Any = window.later(f"""{DRAW}
        const root = drawn([{json.dumps(HOSTILE)}.join("\\n\\n")]);
        document.body.append(root);
        root.querySelectorAll("a").forEach(each => {{ each.target = ""; each.addEventListener("click",
            event => event.preventDefault()); each.click(); }});
        const all = [...root.querySelectorAll("*")];
        const out = [all.map(e => e.nodeName), all.flatMap(e => [...e.attributes].map(a => a.name)),
                     all.map(e => e.protocol).filter(Boolean), root.querySelectorAll("a a").length,
                     window.hurt];
        root.remove();
        return out""")
    names, attributes, protocols, nested, hurt = found
    assert set(names) <= ALLOWED
    assert set(attributes) <= {"class", "href", "target"}
    assert set(protocols) == {"https:"}
    assert (nested, hurt) == (0, None)
    # and as an answer, in the page
    engine.pieces, engine.pause_s = [f"{text}\n\n" for text in HOSTILE], 0
    window.type("#text", "Be evil\n")
    until(lambda: window.has("#messages .assistant:not(.busy) small"))
    links = window.each("#messages .text a", "[e.rel, e.target]")
    assert links
    assert all(each == ["noopener noreferrer nofollow", "_blank"] for each in links)
    assert window.run("return window.hurt") is None
    assert window.complaints() == []


# what costs careless parsers time or stack in proportion to the square of its length
LENGTH, DEEP = 20_000, 100_000
LONG = ["**a **", "*a* ", "_a_b", "``a` ", "[", "[a](https://x", "<https:", "https://", "> ", "- ",
        "- a\n  ", "# ", "```\n", "| a |\n|---|\n", "*_"]


def test_long_and_deep_text_is_drawn_in_time(window: Browser, renderer: None):
    slowest, deepest = window.later(f"""{DRAW} let slowest = 0, deepest = 0;
        for (const piece of {json.dumps(LONG)}) {{
            const begun = performance.now(), root = drawn([piece.repeat({LENGTH} / piece.length)]);
            slowest = Math.max(slowest, performance.now() - begun);
            let deep = 0;
            for (let each = root; each; each = each.lastElementChild) deepest = Math.max(deepest, deep++);
        }}
        const begun = performance.now();
        drawn(["*a ".repeat({DEEP // 6}) + "a* ".repeat({DEEP // 6})]);
        return [Math.max(slowest, performance.now() - begun), deepest]""")
    assert slowest < 2000
    assert deepest < 60
