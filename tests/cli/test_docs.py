"""Pages of docs/ are executed: their blocks of Python, in order, in one process each."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# a table, held by tests/unit/test_words.py, and figures, held by tests/unit/bench/test_timing_judges.py
TAUGHT = [page for page in PAGES if page.stem not in ("glossary", "timing")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", TAUGHT, ids=lambda page: page.stem)
def test_a_page_runs(page: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=ROOT,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_a_page_names_are_there(page: Path):
    for name in re.findall(r"`((?:ptx|tinygrad_nv|tests|bench)/[\w./]+)`", page.read_text()):
        assert (ROOT / name).exists() or (ROOT / "tinygrad_nv" / name).exists(), name
