"""A headless Chromium, driven by WebDriver (W3C) over HTTP."""
from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--window-size=1280,800")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"     # the standard's name of a reference


@dataclass
class Browser:
    """One window. Each start has a profile of its own below a folder."""
    profiles: Path
    flags: Sequence[str] = ()
    starts: int = 0

    def start(self) -> None:
        """Chromedriver, Chromium, and a session of theirs."""
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        assert driver, "no chromedriver: apt-get install chromium chromium-driver"
        assert chromium, "no chromium: apt-get install chromium chromium-driver"
        self.starts += 1
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True,
                                        start_new_session=True)
        assert self.process.stdout is not None
        port = next(found[1] for line in self.process.stdout
                    if (found := re.search(r"successfully on port (\d+)", line)))
        profile = f"--user-data-dir={self.profiles / str(self.starts)}"
        options = {"binary": chromium, "args": [*FLAGS, *self.flags, profile]}
        asked = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options,
                                                  "goog:loggingPrefs": {"browser": "ALL"}}}}
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        self.session = self.http.post("/session", json=asked).json()["value"]["sessionId"]

    def end(self) -> None:
        """Of all its processes, also of those that do not answer."""
        self.http.close()
        with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, signal.SIGTERM)
        try: self.process.wait(20)
        finally:
            with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, signal.SIGKILL)

    def call(self, path: str, **body: Any) -> Any:
        """A command of the session."""
        answer = self.http.post(f"/session/{self.session}/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None: self.call("url", url=url)

    def find(self, selector: str) -> str:
        return self.call("element", using="css selector", value=selector)[ELEMENT]

    def type(self, selector: str, text: str) -> None:
        self.call(f"element/{self.find(selector)}/value", text=text)

    def click(self, selector: str) -> None: self.call(f"element/{self.find(selector)}/click")

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self.call("execute/sync", script=script, args=[])

    def later(self, script: str) -> Any:
        """What the promise of an async function's body comes to."""
        wrapped = f"const end = arguments[0]; (async () => {{ {script} }})().then(end, e => end(String(e)))"
        return self.call("execute/async", script=wrapped, args=[])

    def each(self, selector: str, script: str) -> list[Any]:
        """The value of an expression for each element `e`."""
        found = f"document.querySelectorAll({json.dumps(selector)})"
        return list(self.run(f"return [...{found}].map(e => {script})"))

    def text(self, selector: str) -> str:
        """The texts of all elements, as they are seen."""
        return "|".join(self.each(selector, "e.innerText"))

    def has(self, selector: str) -> bool:
        """Whether there is such an element."""
        return bool(self.each(selector, "true"))

    def screen(self, width: int = 0, height: int = 0, mobile: bool = False) -> None:
        """A screen of this size; without one the window's own."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.devtools("Emulation.setDeviceMetricsOverride" if width else
                      "Emulation.clearDeviceMetricsOverride", **(size if width else {}))

    def media(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        self.devtools("Emulation.setEmulatedMedia", features=[
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()])

    def devtools(self, command: str, **params: Any) -> Any:
        """A command of Chromium's DevTools protocol."""
        return self.call("goog/cdp/execute", cmd=command, params=params)

    def complaints(self) -> list[str]:
        """What the console says of warnings and errors since it was asked last."""
        return [f"{entry['level']} {entry['message']}" for entry in self.call("se/log", type="browser")
                if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path: Path) -> None:
        answer = self.http.get(f"/session/{self.session}/screenshot").json()["value"]
        path.write_bytes(base64.b64decode(answer))


@contextlib.contextmanager
def browser(profiles: Path, *flags: str) -> Iterator[Browser]:
    """A browser with a fresh profile."""
    window = Browser(profiles, flags)
    window.start()
    try: yield window
    finally: window.end()
