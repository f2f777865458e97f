"""Pages of docs/ are executed: their blocks of Python, in order, in one process each, with the package that
the wheel installs. The wheel has what git has; the documentation site builds without a warning."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import tinygrad_nv
from tests.support.cli.wheel_case import PREBUILT, Installed, tracked

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


def test_its_files_are_those_of_git(installed: Installed) -> None:
    found = {name for name in ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    wanted = {name if name.startswith("tinygrad_nv/") else f"tinygrad_nv/{name}"
              for name in [*tracked(), PREBUILT]}
    assert (sorted(found - wanted), sorted(wanted - found)) == ([], [])
    assert "tinygrad_nv/cpu/language/language.h" in found


def test_it_tells_a_story(installed: Installed) -> None:
    """The console script runs the model in the box from the wheel's files."""
    done = installed.run("tinygrad-nv", "generate", "Once upon a time", "--seed", "6", "--max-tokens", "30")
    assert done.returncode == 0, done.stderr
    assert "a kind young boy named Finn lived in a white house" in done.stdout.replace("\n", " ")
    where = installed.run("python", "-c", "import tinygrad_nv, tinygrad_nv.models as m;"
                                          "print(tinygrad_nv.__file__, m.__file__, sep='\\n')")
    assert all(line.startswith(str(installed.folder)) for line in where.stdout.splitlines()), where
    script = "from importlib.metadata import version; print(version('tinygrad_nv'))"
    version = installed.run("python", "-c", script)
    assert version.stdout.strip() == tinygrad_nv.__version__


def test_torch_finds_its_backend(installed: Installed) -> None:
    """The entry point registers it, with no import of this package."""
    done = installed.run("python", "-c", "import torch; x = torch.ones(1, 3); m = torch.nn.Linear(3, 3);"
                                         "y = torch.compile(m, backend='tinygrad_nv')(x);"
                                         "assert torch.allclose(y, m(x), atol=1e-6)")
    assert done.returncode == 0, done.stderr


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
