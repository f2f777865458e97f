"""The field's words: code and pages have none of the words that CONTRIBUTING.md asks not to use.

`WORDS` are looked for in names, comments, docstrings and messages of all code, and in pages (README,
CONTRIBUTING, docs/, bench/README.md). `PROSE` are looked for in pages alone, outside code. What
bench/report.py writes into the README counts as bench's.

Left out, because the field uses them too and no pattern tells the uses apart: row (of a matrix), form (of an
instruction, of an expression), part and parts (of a CPU kernel), product (dot product, product of extents; in
prose only), machine (a computer), body (of a function, of HTTP), top and total (top-k, total bytes), shrink
(tinygrad's op), BYTES (a unit), copies (of memory), k (the extent).
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tinygrad_nv"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/README.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
SUFFIXES = (".py", ".c", ".h", ".js", ".html")

# name: what is counted (no letter may stand on either side; small letters find capitals too), what to say
WORDS: dict[str, tuple[str, str]] = {
    "whoever": ("whoever", "the thing that acts"),
    "nobody": ("nobody", "the thing that does not act"),
    "somebody": ("somebody", "the thing that acts"),
    "joint": (r"joints?(?! (?:norm|probability|distribution))", "hook, plugin point"),
    "guess": ("guess(?:es|ed|ing)?", "draft token, speculative decoding, estimate"),
    "doors": ("doors?", "full / empty barrier"),
    "settle": ("settl(?:e|es|ed|ing)", "sync, drain, flush, finalize"),
    "matrix product": ("matrix products?", "matmul, GEMM"),
    "begin early": ("begins? early", "programmatic dependent launch"),
    "window of L2": ("windows? of l2", "access-policy window, L2 persistence"),
    "log_sum": ("log_sums?", "LSE"),
    "pages are short": ("pages? (?:is|are) short", "out of pages"),
    "HALVES": ("HALVES", "FLOAT16S, of what is not the halves of something"),
    "Where.BACK": (r"Where\.(?:BACK|OUT)", "host / device copies"),
    "_Writer": ("_Writer", "the name of what is written"),
    "class Products": (r"^class \w*(?:Finish|Meeting|Piece|Products|Ring|Turns|Walk)",
                       "epilogue, reduction, work tile, main loop, pipeline, scheduler, ordered barrier"),
    "class Short": ("^class Short", "out of pages"),
}
# of pages alone, outside code and `names`
PROSE: dict[str, tuple[str, str]] = {
    "product": (r"(?<!dot )products?", "matmul, GEMM"),
    "body": ("bodies|the body of", "reference implementation"),
    "form": ("forms? of an answer|answers? of a form", "structured output, constraint"),
    "who": ("who (?:has|runs|is|holds)", "the thing that acts"),
    "kernel that begins": ("kernels? that begins?", "programmatic dependent launch"),
    "ours": ("ours|of yours", "of tinygrad_nv, your own"),
}


def sources() -> list[Path]:
    """The files of the code. The stories of models/tales are English, not code."""
    folders = (PACKAGE, ROOT / "models", ROOT / "bench", ROOT / "tests")
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES
            and path != Path(__file__).resolve() and "tales" not in path.parts]


def used(text: str, words: dict[str, tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    """Each use of a word: its name, the number of its line, the line."""
    # most files have none, which one search in small letters finds sooner than one a word and line
    some = re.compile("|".join(pattern.lower() for pattern, _ in words.values()), re.M)
    if some.search(text.lower()) is None: return
    for name, (pattern, _) in words.items():
        known = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.I if pattern.islower() else 0)
        for number, line in enumerate(text.splitlines(), 1):
            for _ in known.finditer(line): yield name, number, line.strip()


def written(page: Path) -> str:
    """A page without what bench/report.py writes there."""
    return re.sub(r"<!-- (\w+): written.*?<!-- \1: end -->", "", page.read_text(), flags=re.S)


def prose(text: str) -> str:
    """Text outside blocks of code and `names`, with its lines."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    text = re.sub(r"^::: .*", "", text, flags=re.M)     # names of the API
    return re.sub(r"`[^`]*`", lambda name: "\n" * name[0].count("\n"), text)


def test_code_has_none():
    found = [f"{path.relative_to(ROOT)}:{number}: {line!r} has {name!r}; say {WORDS[name][1]}"
             for path in sources() for name, number, line in used(path.read_text(), WORDS)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_none(page: Path):
    text = written(page)
    found = [f"{page.name}:{number}: {line!r} has {name!r}; say {(WORDS | PROSE)[name][1]}"
             for name, number, line in (*used(text, WORDS), *used(prose(text), PROSE))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("text", "found"), [
    ("Nobody reads", ["nobody"]), ("anybody", []), ("if not all_settled:", ["settle"]), ("a settlement", []),
    ("class ColumnRing:", ["class Products"]), ("class Ringing:", []), ("# Ring buffers", []),
    ("the joints with tinygrad", ["joint"]), ("their joint norm", []), ("a window of L2", ["window of L2"])])
def test_a_word_is_found_where_it_is_and_nowhere_else(text: str, found: list[str]):
    assert [name for name, _, _ in used(text, WORDS)] == found


def test_prose_is_what_is_outside_code():
    text = "a product\n```python\nproduct = 1\n```\nthe `product` of a dot product\n"
    assert [(number, line) for _, number, line in used(prose(text), PROSE)] == [(1, "a product")]


# **** the glossary ****

def entries() -> dict[str, list[tuple[str, str, str]]]:
    """The rows of each section of the glossary: term, meaning, where."""
    sections = re.split(r"^## (.*)\n", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)[1:]
    rows = {title: re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text, re.M)[1:]
            for title, text in zip(sections[::2], sections[1::2], strict=True)}
    assert all(rows.values())
    return rows


def test_terms_of_the_glossary_are_sorted_and_said_once():
    terms = [[term.lower() for term, _, _ in rows] for rows in entries().values()]
    assert all(section == sorted(section) for section in terms)
    every = [term for section in terms for term in section]
    assert len(every) == len(set(every)) > 150


def test_files_that_the_glossary_names_are_there():
    places = [place for rows in entries().values() for _, _, where in rows for place in where.split(", ")]
    missing = [place for place in places
               if not any((base / place.strip("`")).exists() for base in (PACKAGE, ROOT))]
    assert not missing, missing
