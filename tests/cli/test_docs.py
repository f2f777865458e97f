"""Pages of docs/ are executed: their blocks of Python, in order, in one process each, with the package that
the wheel installs."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.cli.wheel_case import Installed

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
TAUGHT = [page for page in PAGES if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", TAUGHT, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, installed: Installed):
    blocks = BLOCK.findall(page.read_text())
    assert len(blocks) >= 5
    done = installed.run("python", "-c", "\n".join(blocks))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_a_page_names_are_there(page: Path):
    for name in re.findall(r"`((?:ptx|tinygrad_nv|tests|bench)/[\w./]+)`", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "tinygrad_nv" / name).exists(), name
