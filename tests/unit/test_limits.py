"""The table of limits in docs/security.md: what a file, a request or a peer may ask for.

A limit is a named constant with a comment that begins with "limit:", on its line or in the lines above it:

    MAX_STEPS = 10**6       # limit: steps of a chat template (--template-steps)

`python tests/unit/test_limits.py` writes the table again.
"""
from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- limits: begin -->\n", "<!-- limits: end -->\n"
MARK = "limit:"


@dataclass(frozen=True, order=True)
class Limit:
    """A constant of `file`, its value as the page has it, and what it bounds."""
    file: str
    line: int
    name: str
    value: str
    words: str


def limits() -> list[Limit]:
    """All limits of the package, by file and line."""
    paths = [path for top in ("tinygrad_nv", "models") for path in (ROOT / top).rglob("*.py")]
    return sorted(each for path in paths if MARK in (text := path.read_text(encoding="utf-8"))
                  for each in _limits(text, str(path.relative_to(ROOT))))


def _limits(text: str, file: str) -> Iterator[Limit]:
    comments = {token.start[0]: token.string.lstrip("# ") for token in
                tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT}
    marked = {line for line, words in comments.items() if words.startswith(MARK)}
    known: dict[str, object] = {}
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None): continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if not isinstance(target, ast.Name): continue
        value = known[target.id] = _value(node.value, known)
        if node.end_lineno in marked: first, last = node.end_lineno, node.end_lineno
        else:
            first, last = node.lineno, node.lineno - 1
            while first - 1 in comments and first not in marked: first -= 1
            if first not in marked: continue
        marked.remove(first)
        words = " ".join(comments[line] for line in range(first, last + 1)).removeprefix(MARK).strip()
        yield Limit(file, node.lineno, target.id, _shown(value, words), words)
    assert not marked, f"{file}:{min(marked)}: a limit is a comment of one named constant"


def _value(node: ast.expr, known: Mapping[str, object]) -> object:
    try: return eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, dict(known))
    except Exception: return ast.unparse(node)


def _shown(value: object, words: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if "byte" in words and value >= size and not value % size: return f"{value // size} {unit}"
        return f"{value:,}"
    if isinstance(value, float) and value.is_integer(): return f"{value:,.0f}"
    return f"`{value}`" if isinstance(value, str) else str(value)


def table() -> str:
    """The table of the page."""
    rows = [f"| {each.words} | {each.value} | `{each.name}` of `{each.file}` |\n"
            for each in limits()]
    return "| limit of | default | constant |\n|---|---|---|\n" + "".join(rows)


def test_the_page_has_all_limits():
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    assert after.partition(END)[0] == table(), "run python tests/unit/test_limits.py"
    assert before


def test_a_limit_is_read_where_it_stands():
    text = ("A = 1 << 20\n# limit: bytes of a file,\n# decompressed (--a)\nB = 4 * A\nC = 5     # other\n"
            "class D:\n    e: int = 7_000     # limit: steps\n    f: float = C * 2.0    # limit: seconds\n"
            "G = H(3)    # limit: of another\n")
    assert [(each.name, each.value, each.words) for each in sorted(_limits(text, "x.py"))] == [
        ("B", "4 MiB", "bytes of a file, decompressed (--a)"), ("e", "7,000", "steps"),
        ("f", "10", "seconds"), ("G", "`H(3)`", "of another")]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
