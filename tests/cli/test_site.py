"""The documentation site: it builds without a warning (no dead link, no missing anchor, no page outside the
navigation), and its reference has what users import."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import tinygrad_nv

ROOT = Path(__file__).parents[2]
TINYGRAD = {"Context", "Device", "GlobalCounters", "Tensor", "TinyJit", "UOp", "Variable", "dtypes",
            "function", "nn"}


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site with warnings as errors; with -q mkdocs would not count them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


def test_the_site_builds_without_a_warning(tmp_path: Path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    assert all(text in api for text in ("max_tokens", "LLM", "OnnxRunner", "SamplingParams"))
    # a page of a file outside docs/, and a file that pages link to
    assert "<h1" in (tmp_path / "site" / "contributing" / "index.html").read_text()
    assert (tmp_path / "site" / "files" / "bench" / "results" / "plan_check.png").is_file()


def test_what_is_dead_fails(tmp_path: Path):
    """With the settings of the site, without its pages."""
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("nav:\n")
    settings = re.sub(r"^(hooks|exclude_docs):.*\n(?:  .*\n)*", "", settings, flags=re.M)
    settings = re.sub(r"^  - mkdocstrings:\n(?:    .*\n)*", "", settings, flags=re.M)
    (tmp_path / "mkdocs.yml").write_text(f"{settings}nav:\n  - Overview: index.md\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[c](c.md), [d](#there)\n")
    (tmp_path / "docs" / "b.md").write_text("# B\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    for said in ("'c.md', but the target is not found", "'#there', but there is no such anchor",
                 "not included in the \"nav\" configuration"):
        assert said in done.stderr, done.stderr


def test_the_reference_has_what_users_import():
    named = set(re.findall(r"^::: [\w.]+\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M))
    assert set(tinygrad_nv.__all__) - TINYGRAD - {"__version__"} <= named
