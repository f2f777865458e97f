"""What messages and pages tell to install is there: every `pip install X` is a name or an extra of
pyproject.toml. `'.[extra]'` works in a checkout alone: it is for pages and scripts about one."""
from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tinygrad_nv.benchmarks.engines import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CHECKOUT = [*ROOT.glob("*.md"), ROOT / "docs" / "start.md", *ROOT.glob("bench/*.md"),
            *ROOT.glob("bench/**/*.py")]
INSTALLED = [path for folder, kind in (("docs", "*.md"), ("tinygrad_nv", "*.py"), ("models", "*.py"))
             for path in (ROOT / folder).rglob(kind) if path not in CHECKOUT]
# text, and string literals that continue on the next line
JOINED = re.compile(r"""["']\n\s*f?["']""")
COMMAND = re.compile(r"pip install ([^:;)`\n\"{]+)")


def names() -> set[str]:
    """What the project depends on, with all extras."""
    listed = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    return {re.split(r"[><=;\[ ]", one)[0].lower() for one in listed}


def wrong(command: str, checkout: bool = False) -> list[str]:
    """The words of a command that are no package or extra of the project."""
    bad = []
    if "--no-index" in command: return bad  # a file
    for word in re.sub(r"--no-deps|--require-hashes|-r requirements/\S+|--target \S+|'", "", command).split():
        if word in ("or", "on", "and", "besides", "in"): break
        if word == "-U" or (word == "-e" and checkout): continue
        own = re.fullmatch(r"(\.|tinygrad-nv)\[([a-z,-]+)\]", last := word.rstrip(",."))
        known = set(own[2].split(",")) <= set(EXTRAS) and (own[1] != "." or checkout) if own \
            else re.split(r"[><=]", last)[0].lower() in names()
        if not known: bad.append(word)
        if last != word: break
    return bad


def test_what_is_to_be_installed_is_known():
    unknown = [(path.name, found[0]) for path in [*CHECKOUT, *INSTALLED]
               for found in COMMAND.finditer(JOINED.sub("", path.read_text()).replace("pip\n", "pip "))
               if wrong(found[1], path in CHECKOUT)]
    assert unknown == []


@pytest.mark.parametrize("name", PACKAGES)
def test_peers_are_known(name: str): assert not wrong(PACKAGES[name])


@pytest.mark.parametrize("command", ["'.[cuda]'", "-e 'tinygrad-nv[cuda]'", "tinygrad-nv",
                                     "'tinygrad-nv[gpu]'", "ziglang nothing"])
def test_others_are_not(command: str): assert wrong(command)
