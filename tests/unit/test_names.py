"""Names and docstrings: functions are verbs, and a docstring's first sentence says what its thing is or does.

Counted in the code of `tinygrad_nv/`, `models/` and `bench/`. A function whose first word is a past
participle (`written`, `_turned`, `scaled_rows`) reads like a value: the verb is its name (`write`,
`scale_rows`), or for a predicate `is_written`. A docstring that begins with one of `OPENERS` has no subject.
Both numbers may only fall: lower the limits with them.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tinygrad_nv", "models", "bench")

PARTICIPLES = 45          # functions that begin with a participle
SUBJECTLESS = 4          # docstrings that begin with one of OPENERS

SLACK = 10      # how far a number may fall before its limit has to

OPENERS = ("As", "Of", "That", "The same of", "These", "This", "Those", "What", "Where", "Which", "Who",
           "Whose")
# what ends in -ed and is no participle
VERBS = {"bleed", "breed", "embed", "exceed", "feed", "need", "proceed", "red", "seed", "shed", "speed",
         "weed"}
# participles that do not end in -ed, without those that are the verb, too (cut, put, read, run, set, split)
IRREGULAR = {
    "bare", "begun", "bent", "bound", "bought", "broken", "brought", "built", "caught", "chosen", "come",
    "dealt", "done", "drawn", "driven", "drunk", "dug", "eaten", "fallen", "fed", "felt", "forgiven",
    "forgotten", "found", "given", "gone", "grown", "held", "hidden", "hung", "kept", "known", "laid",
    "led", "left", "lent", "lost", "made", "meant", "met", "paid", "ridden", "risen", "said", "seen",
    "sent", "shown", "shrunk", "sold", "sought", "spent", "spoken", "stolen", "struck", "stuck", "sunk",
    "swept", "sworn", "taken", "taught", "thought", "thrown", "told", "torn", "understood", "woken", "won",
    "worn", "wound", "written"}


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Yields each function below `tree` with its qualified name, those in classes and functions too."""
    for node in ast.iter_child_nodes(tree):
        name = f"{within}{node.name}" if isinstance(node, Function | ast.ClassDef) else ""
        if isinstance(node, Function): yield name, node
        yield from functions(node, f"{name}." if name else within)


def is_participle(name: str) -> bool:
    """Tells whether the first word of a name is a past participle."""
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR or (word.endswith("ed") and word not in VERBS)


def is_subjectless(docstring: str) -> bool:
    """Tells whether a docstring begins with a word of OPENERS."""
    return any(docstring.startswith(f"{opener} ") for opener in OPENERS)


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yields the docstrings of a module, its classes and functions: name, line, text."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.Module | ast.ClassDef) and \
                (text := ast.get_docstring(node)) is not None:
            yield getattr(node, "name", ""), getattr(node, "lineno", 1), text


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Yields the files of the code, parsed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def check(found: list[str], limit: int, what: str, name: str) -> None:
    """Fails where `found` is more than its limit, or so few that the limit can fall."""
    assert len(found) <= limit, f"{len(found)} {what}, at most {limit} may be:\n" + "\n".join(found)
    assert len(found) > limit - SLACK, f"{name} = {limit} can fall to {len(found)}"



def test_names_and_docstrings_are_plain():
    participles, subjectless = [], []
    for path, tree in trees():
        for name, node in functions(tree):
            if is_participle(node.name): participles.append(f"{path}:{node.lineno}: {name}")
        subjectless += [f"{path}:{line}: {name}: {text.splitlines()[0]}"
                        for name, line, text in docstrings(tree) if is_subjectless(text)]
    check(participles, PARTICIPLES, "functions begin with a participle", "PARTICIPLES")
    check(subjectless, SUBJECTLESS, "docstrings have no subject", "SUBJECTLESS")


@pytest.mark.parametrize(("name", "expected"), [
    ("written", True), ("_turned", True), ("scaled_rows", True), ("__made__", True), ("host_synced", False),
    ("write", False), ("embed_tokens", False), ("read", False), ("is_written", False), ("seed", False)])
def test_a_participle_is_told_from_a_verb(name: str, expected: bool):
    assert is_participle(name) is expected


@pytest.mark.parametrize(("text", "expected"), [
    ("Of each key its index.", True), ("What is left.", True), ("The same of columns.", True),
    ("Whole words.", False), ("Returns what is left.", False), ("Offsets of rows.", False), ("Asks.", False)])
def test_a_docstring_without_a_subject_is_found(text: str, expected: bool):
    assert is_subjectless(text) is expected


def test_functions_are_found_in_classes_and_functions():
    tree = ast.parse("class A:\n  def made(self):\n    def told(): pass\n"
                     "async def run(): pass\nif x:\n  def cut(): pass")
    assert [name for name, _ in functions(tree)] == ["A.made", "A.made.told", "run", "cut"]
