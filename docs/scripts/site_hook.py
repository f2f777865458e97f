"""Makes pages of the site of files outside docs/ (CONTRIBUTING.md and others), and of what pages link to.

mkdocs calls `on_files` and `on_page_markdown`. Links are written for a reader of the repository, relative to
the page; here they become links of the site: to another page, or to a copy of the file under files/.
"""
from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# paths in the repository, and of their pages
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md",
           "CHANGELOG.md": "changelog.md", "bench/README.md": "benchmarks.md",
           "deploy/README.md": "containers.md"}
SITE = {**OUTSIDE, "README.md": "index.md"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")


def resolve(page: str, target: str) -> str:
    """Returns the repository's path of a link of a page (its path in the repository)."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def place(path: str) -> str | None:
    """Returns where the site has a file of the repository, None where there is no such file."""
    if path in SITE: return SITE[path]
    if path.startswith("docs/"): return path.removeprefix("docs/")
    return f"files/{path}" if (ROOT / path).is_file() else None


def source(site: str) -> str:
    """Returns the repository's path of a page of the site."""
    return next((path for path, name in OUTSIDE.items() if name == site), f"docs/{site}")


def rewrite(markdown: str, page: str) -> str:
    """Turns links of the repository into links of the site. Others stay, and mkdocs reports them."""
    def link(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or (found := place(resolve(page, target))) is None: return match[0]
        return f"{before}{found}{anchor})"
    return LINK.sub(link, markdown)


def copies(markdown: str, page: str) -> set[str]:
    """Returns the files outside docs/ that a page links to."""
    found = {resolve(page, match[2]) for match in LINK.finditer(markdown) if "://" not in match[2]}
    return {path for path in found if (place(path) or "").startswith("files/")}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and the files."""
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    wanted = set[str]()
    for file in list(files.documentation_pages()):
        wanted |= copies(file.content_string, source(file.src_uri))
    for path in sorted(wanted):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page."""
    return rewrite(markdown, source(page.file.src_uri))
