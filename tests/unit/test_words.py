"""The field's words: words that CONTRIBUTING.md asks not to use are counted, and their number may only fall.

`ALLOWED` has the count of each word in each layer of the code: names, comments, docstrings, messages. A layer
that is not listed has none. When a count falls, lower it here: `python tests/unit/test_words.py` prints the
table of the working tree. Pages (README, CONTRIBUTING, docs/, bench/README.md) have none of them, nor those
of `PROSE`, which are looked for outside code. What bench/report.py writes into the README counts as bench's.

Left out, because the field uses them too and no pattern tells the uses apart: row (of a matrix), form (of an
instruction, of an expression), part and parts (of a CPU kernel), product (dot product, product of extents; in
prose only), machine (a computer), body (of a function, of HTTP), top and total (top-k, total bytes), shrink
(tinygrad's op), BYTES (a unit), copies (of memory), k (the extent).
"""
from __future__ import annotations

import re
import textwrap
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
ALLOWED: dict[str, dict[str, int]] = {
    "whoever": {"patterns": 2, "tile": 4},
    "nobody": {"cpu": 13, "patterns": 6, "tile": 5},
    "somebody": {"cpu": 1, "patterns": 1, "tile": 1},
    "doors": {"tile": 26, "tests": 1},
    "settle": {"tile": 10},
    "matrix product": {"patterns": 3, "tile": 1},
    "log_sum": {"cpu": 2, "patterns": 7, "tile": 14, "bench": 10, "tests": 98},
    "HALVES": {"tile": 39},
    "_Writer": {"tile": 14},
    "class Products": {"tile": 19},
}


def layers() -> dict[str, list[Path]]:
    """The files of each layer of the code. The stories of models/tales are English, not code."""
    folders = {each.parent.name: each.parent for each in sorted(PACKAGE.glob("*/__init__.py"))}
    named = {**folders, "models": ROOT / "models", "bench": ROOT / "bench", "tests": ROOT / "tests"}
    found = {name: [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES
                    and path != Path(__file__).resolve() and "tales" not in path.parts]
             for name, folder in named.items()}
    return {"tinygrad_nv": sorted(PACKAGE.glob("*.py")), **found}


def used(text: str, words: dict[str, tuple[str, str]]) -> Iterator[tuple[str, int, str]]:
    """Each use of a word: its name, the number of its line, the line."""
    for name, (pattern, _) in words.items():
        known = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.I if pattern.islower() else 0)
        for number, line in enumerate(text.splitlines(), 1):
            for _ in known.finditer(line): yield name, number, line.strip()


def counts() -> dict[str, dict[str, int]]:
    """For each word the layers that have it, and how often."""
    found: dict[str, dict[str, int]] = {name: {} for name in WORDS}
    for layer, paths in layers().items():
        for name, _, _ in used("\n".join(path.read_text() for path in paths), WORDS):
            found[name][layer] = found[name].get(layer, 0) + 1
    return {name: by_layer for name, by_layer in found.items() if by_layer}


def written(page: Path) -> str:
    """A page without what bench/report.py writes there."""
    return re.sub(r"<!-- performance: written.*?<!-- performance: end -->", "", page.read_text(), flags=re.S)


def prose(text: str) -> str:
    """Text outside blocks of code and `names`, with its lines."""
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`", lambda name: "\n" * name[0].count("\n"), text)


def test_no_layer_has_more_of_a_word_than_it_had():
    more = [f"{layer} has {name!r} {count} times, allowed {allowed}; say {WORDS[name][1]}"
            for name, by_layer in counts().items() for layer, count in by_layer.items()
            if count > (allowed := ALLOWED.get(name, {}).get(layer, 0))]
    assert not more, "\n".join(more)


def test_the_table_names_layers_and_words_that_there_are():
    assert ALLOWED.keys() <= WORDS.keys()
    assert {layer for by_layer in ALLOWED.values() for layer in by_layer} <= layers().keys()


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


if __name__ == "__main__":
    print("ALLOWED: dict[str, dict[str, int]] = {")
    for name, by_layer in counts().items():
        allowed = ", ".join(f'"{layer}":~{count}' for layer, count in by_layer.items())
        print(textwrap.fill(f'"{name}": {{{allowed}}},', 110, initial_indent="    ",
                            subsequent_indent=" " * (len(name) + 9)).replace("~", " "))
    print("}")
