"""The pictures of the README: what they show is what the commands print today."""
from __future__ import annotations

import html
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.scripts import lowering_svg, terminal_svg

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
README = (ROOT / "README.md").read_text()


def lines_of(name: str) -> list[str]:
    """The lines of text of a picture."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", (IMAGES / name).read_text())
    return [html.unescape(line) for line in found]


@pytest.mark.parametrize("name", ["lowering.svg", "terminal.svg"])
def test_a_picture_is_small_and_legible_in_light_and_dark(name: str):
    text = (IMAGES / name).read_text()
    assert f"docs/images/{name}" in README
    assert len(text.encode()) < 60_000
    assert "prefers-color-scheme: dark" in text
    ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_drawing_is_what_explain_shows():
    shown = lowering_svg.levels()
    assert lowering_svg.draw(shown) == lowering_svg.OUT.read_text(), "run docs/scripts/lowering_svg.py"
    drawn, said = lines_of("lowering.svg"), {line.strip() for lines in shown.values() for line in lines}
    assert len([line for line in drawn if line in said]) >= 20
    assert any(line.startswith("wgmma.mma_async") for line in drawn)


def test_the_recording_is_what_the_commands_print():
    drawn = lines_of("terminal.svg")
    for command in (terminal_svg.GENERATE, terminal_svg.EXPLAIN, terminal_svg.CHAT):
        assert f"$ {command}" in drawn
        assert command.removesuffix(" --seed 1").removesuffix(" --level tile") in README
    said = [line.strip() for line in terminal_svg.screen(terminal_svg.run(terminal_svg.EXPLAIN)) if line]
    assert [line for line in said if line not in drawn] == []
    story = " ".join(re.findall(r"^> (.*)$", (ROOT / "docs" / "start.md").read_text(), re.M))
    assert story in " ".join(drawn)
