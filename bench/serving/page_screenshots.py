"""Pictures of the server's page, with the model in the box: docs/page-*.png.

    python bench/serving/page_screenshots.py [--out docs] [--seconds 45]

It starts `tinygrad-nv serve`, keeps it busy for so many seconds before each set of pictures, so that the
plots have something to show, and drives a headless Chromium (chromium and chromedriver in PATH) at 390, 820
and 1440 pixels. The conversation that shows Markdown is put into the browser's storage: the model in the box
tells stories. Pictures have 256 colours.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
COLOURS = 256
# Chromium has a mouse: it hovers (2), its pointer is fine (4)
MOUSE = "--blink-settings=" + ",".join(f"{kind}{name}Type{end}={value}" for name, value in (
    ("Hover", 2), ("Pointer", 4)) for kind, end in (("primary", ""), ("available", "s")))
TALKS = ("Once upon a time there was a bear who could not sleep.", "A mouse lived in an old clock.",
         "One cold morning, a little fox named", "The next day,")
MARKDOWN = "A **page table** turns a position of a sequence into a place in memory. Each sequence has a " \
           "list of page numbers; the page of position `p` is `table[p // 16]`." """

1. Allocate a page when a sequence grows past the last one.
2. Count its references:
   - a shared prefix counts once for each sequence,
   - a page that nothing refers to is *cached*, not freed.

```python
def slot(table: list[int], position: int, size: int = 16) -> int:
    page, offset = divmod(position, size)
    return table[page] * size + offset
```

| pages | tokens | bytes |
|:--|--:|--:|
| 1 | 16 | 4,096 |
| 68 | 1,088 | 278,528 |

> A page is never moved: only its number is.
"""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The address of a server of the model in the box."""
    command = [sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0", "--max-num-seqs", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(found[1] for line in process.stderr if (found := re.search(r"ready url=(\S+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield url
    finally:
        process.terminate()
        process.wait(30)


def busy(url: str, until: float) -> None:
    """Requests, some at a time, with pauses."""
    draw = random.Random(threading.get_ident())
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < until:
            client.post("/v1/completions", json={"prompt": draw.choice(TALKS), "ignore_eos": True,
                                                 "max_tokens": draw.randrange(50, 500)})
            time.sleep(draw.random() * 1.5)


@contextlib.contextmanager
def load(url: str, seconds: float) -> Iterator[None]:
    """Clients beside what is done here, which end before it goes on."""
    clients = [threading.Thread(target=busy, args=(url, time.monotonic() + seconds)) for _ in range(5)]
    for client in clients: client.start()
    yield
    for client in clients: client.join()


def storage_script(url: str) -> str:
    """A script that puts a conversation with Markdown into the browser's storage."""
    model = httpx.get(url + "/v1/models").json()["data"][0]["id"]
    question = "How does a paged KV cache find a token?"
    talk = {"id": "pages", "title": question, "named": False, "updated": time.time() * 1000, "messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": MARKDOWN, "model": model, "thought": 2140,
         "reasoning": "The question is about pages. A short list, a few lines of code and a table will do."}]}
    return f'localStorage.setItem("tinygrad-nv:conversation:pages", {json.dumps(json.dumps(talk))})'


def picture(window: Any, path: Path) -> None:
    """A screenshot with few colours."""
    time.sleep(0.5)
    window.screenshot(path)
    with Image.open(path) as image: small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1000:.0f} KB")


def say(window: Any, text: str) -> None:
    """A message, and its answer."""
    window.type("#text", text + "\n")
    ends = time.monotonic() + 60
    while not (window.has("#messages .assistant:not(.busy)") and window.has("#stop[hidden]")):
        if time.monotonic() > ends: raise SystemExit("an answer took longer than 60 s")
        time.sleep(0.1)


def begin(window: Any, url: str, scheme: str) -> None:
    """Opens the page, with the conversation that shows Markdown among those that are kept."""
    window.media(prefers_color_scheme=scheme)
    window.open(url + "/icon.svg")
    window.run(storage_script(url))
    window.open(url + "/")


def show_markdown(window: Any) -> None:
    """Shows that conversation, from its beginning."""
    window.each("#conversations [data-id=pages] .conversation", "e.click()")
    window.each("#log", "e.scrollTop = 0")


def desktop(window: Any, url: str, out: Path, seconds: float) -> None:
    """Wide pictures, in both themes."""
    window.screen(1440, 900)
    begin(window, url, "light")
    window.each("#temperature", "[e.value = 0, e.dispatchEvent(new Event('input'))]")
    with load(url, seconds):
        for at, text in enumerate(TALKS):
            if 0 < at < 3: window.each("#clear", "e.click()")
            say(window, text)
        time.sleep(max(0, seconds - 5))
        picture(window, out / "page-1440.png")
        window.media(prefers_color_scheme="dark")
        show_markdown(window)
        picture(window, out / "page-1440-dark.png")


def telephone(window: Any, url: str, out: Path, seconds: float) -> None:
    """Narrow pictures."""
    window.screen(820, 1100, mobile=True)
    begin(window, url, "light")
    show_markdown(window)
    picture(window, out / "page-820.png")
    window.screen(390, 844, mobile=True)
    window.each("#log", "e.scrollTop = 0")
    picture(window, out / "page-390.png")
    window.click("#panel-toggle")
    with load(url, seconds):
        time.sleep(max(0, seconds - 2))
        picture(window, out / "page-390-panel.png")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder (default docs)")
    parser.add_argument("--seconds", type=float, default=45, help="of load before the pictures (default 45)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    browser = import_module("tests.support.server.browser_case").browser
    with server() as url:
        for shoot, flags in ((desktop, [MOUSE]), (telephone, [])):
            with tempfile.TemporaryDirectory() as profile, browser(Path(profile), *flags) as window:
                shoot(window, url, arguments.out, arguments.seconds)


if __name__ == "__main__": main()
