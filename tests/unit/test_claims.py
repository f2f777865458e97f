"""Claims of status: pages and docstrings say that something did not run, or was not timed, on a GPU only
where docs/status.json, which bench/report.py writes from the results, says so as well.

A paragraph (or a row of a table) with such a claim names its subject: `<!-- status: conv not timed -->` in
a page, `(status: conv not timed)` in a docstring or comment. Kinds: "not run" (neither compared nor timed on
any GPU), "not timed", and for a contender of the benchmarks "not beside". A claim without a subject fails,
and so does one whose subject has run. A page that denies what docs/status.md lists as working fails, too.
"""
from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATUS = json.loads((ROOT / "docs" / "status.json").read_text())
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md",
         *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for folder in ("tinygrad_nv", "models", "bench")
           for path in sorted((ROOT / folder).rglob("*.py"))]

RAN = r"(?:measured|timed|tried|run|ran)"
GPU = r"(?:GPUs?|H100s?|hardware|NVLink)"
CLAIMS = re.compile("|".join((
    r"\bnever (?:been )?(?:measured|timed|tried|(?:run|ran) on)\b",
    rf"\b(?:not|nothing|none|nor)\b(?: \w+){{0,3}} {RAN}\b(?: \w+){{0,2}} (?:on|for|over|with) "
    rf"(?:\w+ ){{0,2}}(?:{GPU}|one\b(?! {RAN}))",
    rf"\b(?:on|over|with) (?:\w+ ){{0,2}}{GPU}\b,?(?: \w+){{0,4}} (?:not|nothing|never|none)\b"
    rf"(?: \w+){{0,2}} {RAN}\b(?! in)",
    rf"\b{GPU}(?: times)?:? (?:are |were |was |is )?(?:not|never|only) (?:yet )?(?:been )?"
    rf"(?:{RAN}|predicted)",
    r"\bemulator alone", r"\bonly (?:on the emulator|predicted|modelled|with `?--emulate)",
    r"\b(?:but|and) (?:has|have|did|does) not timed? them", r"\bso far (?:only|run|ran|on)\b",
    r"\bnot tried on one\b", r"\bbut not on a GPU", r"\bonly (?:in emulation|emulated)\b",
    rf"\b(?:untested|unmeasured|untimed|untried) on (?:\w+ )?{GPU}",
    rf"\byet to be {RAN}\b", rf"\bnot yet (?:been )?{RAN} (?:on|by) (?:\w+ )?{GPU}",
    rf"\bno (?:real )?{GPU} (?:has|have) (?:yet )?{RAN}")), re.I)
SUBJECT = re.compile(r"(?:<!-- |\()status: ([\w.-]+) (not run|not timed|not beside)(?: -->|\))")
# what docs/status.md lists, and words that deny it
DENIED = {"Images in prompts": r"\breads? (?:only text|text only)|\b(?:only text|text only) (?:is|are) read",
          "Convolutions": r"\bnot for CNNs|\bno convolutions?\b",
          "Training": r"\b(?:cannot|does not) train\b",
          "Several devices": r"\bone device only\b"}


def paragraphs(text: str) -> Iterator[str]:
    """Yields each paragraph, item of a list and row of a table of a page, on one line, without code."""
    text = re.sub(r"<!-- (\w+): written by.*?<!-- \1: end -->", "", text, flags=re.S)
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for block in re.split(r"\n\s*\n|\n(?=\| )|\n(?=\s*[*\d]\.? )", text): yield " ".join(block.split())


def comments(path: Path) -> Iterator[str]:
    """Yields each docstring and each run of comments of a file, on one line."""
    text = path.read_text()
    if not CLAIMS.search(" ".join(text.replace("#", " ").split())): return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield from paragraphs(doc)
    lines: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT: continue
        if token.start[0] != last + 1 and lines:
            yield " ".join(lines)
            lines = []
        lines.append(token.string.lstrip("# "))
        last = token.start[0]
    if lines: yield " ".join(lines)


def refusals(paragraph: str, status: dict[str, Any]) -> list[str]:
    """Says what is wrong with the claims of a paragraph."""
    named, wrong = SUBJECT.findall(paragraph), []
    if (claim := CLAIMS.search(SUBJECT.sub("", paragraph))) and not named:
        wrong.append(f"{claim[0]!r} has no subject: say <!-- status: SUBJECT not timed -->, with a "
                     "subject of docs/status.json, or what was measured")
    for name, kind in named:
        if kind == "not beside":
            if any(status["beside"][name].values()): wrong.append(f"was measured beside {name}")
            continue
        found = status["subjects"][name]
        ran = {**found["timed"], **(found["right"] if kind == "not run" else {})}
        if ran: wrong.append(f"{found['title']} ran on {', '.join(ran)} (docs/status.json): say so")
    return wrong


def denials(text: str, works: str) -> list[str]:
    """Says which words of a page deny what docs/status.md lists."""
    return [f"{found[0]!r}, but {title!r} is in docs/status.md" for title, pattern in DENIED.items()
            if f"[{title}]" in works and (found := re.search(pattern, " ".join(text.split()), re.I))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_claims_what_the_results_say(page: Path):
    text = page.read_text()
    wrong = [f"{each}\n    {paragraph[:300]}" for paragraph in paragraphs(text)
             for each in refusals(paragraph, STATUS)]
    wrong += denials(text, (ROOT / "docs" / "status.md").read_text())
    assert not wrong, "\n".join(wrong)


def test_code_claims_what_the_results_say():
    wrong = [f"{path.relative_to(ROOT)}: {each}\n    {paragraph[:300]}" for path in SOURCES
             for paragraph in comments(path) for each in refusals(paragraph, STATUS)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("claim", [
    "not run on a GPU", "so far run only with `--emulate`", "nothing has been timed on one",
    "not tried on one yet", "both so far on the emulator alone", "GPU times only predicted",
    "they have not been measured on a GPU", "On a GPU nothing was measured.",
    "Predicted, and never measured:",
    "an H100 ran both and found them right, but did not time them", "GPUs: not measured.",
    "with several real GPUs nothing was run yet", "untested on a GPU", "It is yet to be measured.",
    "tested only in emulation", "no GPU has run this", "not yet run on an H100", "never run on hardware"])
def test_a_claim_is_found_and_held_to_the_data(claim: str):
    assert refusals(claim, STATUS)
    assert not refusals(f"{claim} <!-- status: conv not run -->", STATUS)
    for subject in ("gemm not timed", "gemm not run", "latent not run", "Triton not beside"):
        wrong, = refusals(f"{claim} <!-- status: {subject} -->", STATUS)
        assert "H100" in wrong or "Triton" in wrong


@pytest.mark.parametrize("text", [
    "each test is run on a GPU", "The first row was measured on an H100.", "one that is not run, on purpose",
    "at most one is not tried again"])
def test_other_words_are_no_claims(text: str):
    assert not refusals(text, STATUS)


def test_what_works_is_not_denied():
    works = "* [Images in prompts](vision.md): …\n* [Convolutions](diffusion.md): …"
    assert len(denials("Models read text\nonly. Not for CNNs.", works)) == 2
    assert not denials("Models read text only.", "")
