"""Shapes: annotations that say nothing, files that have none, and the words of what does not fit."""
from __future__ import annotations

from pathlib import Path

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv import shapes
from tinygrad_nv.errors import ShapeError

READ = 'expected: "B", "S+1", "3H*D_h", "D//2", a whole number, or "..." for leading dimensions'


@pytest.mark.parametrize(("words", "message"), [
    (("B S",), ("the dimension 'B S' has 'S' where it should end", READ, "one dimension for each string")),
    (("3H*",), ("the dimension '3H*' has no end",)), (("",), ("the dimension '' has nothing in it",)),
    (("D/2",), ("the dimension 'D/2' has '/' (// divides)",)),
    (("(B+1",), ("the dimension '(B+1' has no end",)),
    (("B//0",), ("the dimension 'B//0' has a division by 0",)),
    (("(B+1 S)",), ("has a parenthesis that is not closed",)),
    (("B", 1.5), ("Tensor[…] with 1.5", "expected: dimensions, then a dtype")),
    (("B", "S", None), ("Tensor[…] with None", "dimensions, then a dtype")),
    ((dtypes.half, "B"), ("Tensor[…] with dtypes.half before other dimensions", "a dtype behind all")),
    (("B", ...), ('Tensor[…] with "..." behind other dimensions', '"..." first')),
    (("B", -1), ("Tensor[…] with the dimension -1", "a whole number, at least 0"))])
def test_brackets(words, message: tuple[str, ...]):
    with pytest.raises(ShapeError) as error: Tensor[words if len(words) > 1 else words[0]]
    assert [word for word in message if word not in str(error.value)] == []


def test_the_words_of_a_call():
    @shapes.checked
    def f(x: Tensor["B", "S", "D"], w: Tensor["D", "3H*D_h"], *, H: int) -> Tensor["B", "S", "3D"]:
        return x @ w
    with pytest.raises(ShapeError) as error: f(Tensor.empty(2, 3, 8), Tensor.empty(9, 24), H=2)
    assert str(error.value) == (
        'argument w: dimension 0 of Tensor["D", "3H*D_h"] is 9, not 8; its shape is (9, 24)\n'
        '  expected: D=8, from argument x: dimension 2 of Tensor["B", "S", "D"], of shape (2, 3, 8)')
    with pytest.raises(ShapeError) as error: f(Tensor.empty(2, 3, 8), Tensor.empty(8, 25), H=2)
    assert str(error.value) == (
        'argument w: dimension 1 of Tensor["D", "3H*D_h"] is 25; its shape is (8, 25)\n'
        "  expected: a whole number D_h with 3H*D_h = 25: H=2 from argument H=2")


def test_an_annotation_of_names_that_are_not_there():
    @shapes.checked
    def f(x: "Tensor['B', f31]"): return x
    with pytest.raises(ShapeError) as error: f(Tensor.empty(2))
    assert "the annotation of x in " in str(error.value)
    assert "cannot be evaluated: name 'f31' is not defined" in str(error.value)
    assert "names that are there when the function is called" in str(error.value)


FILE = '''
from tinygrad import Tensor
import tinygrad_nv
def f(x: Tensor["B", "D"], *, how): return x
'''


@pytest.mark.parametrize(("text", "arguments", "words"), [
    (None, (), ("no file ", "a Python file")),
    ("x = 1\n", (), ("has no function with dimensions in its annotations", 'such as Tensor["B", "S", "D"]')),
    ("import nothing_there\n", (), ("cannot be imported: ModuleNotFoundError", "shows where it fails")),
    ("def f(:\n", (), ("cannot be imported: SyntaxError",)),
    (FILE, ("g",), ("has no function g with dimensions", "one of f")),
    (FILE, ("f",), ("argument how has no dimensions: its annotation is nothing", "--set how=…")),
    (FILE, ("f", "--set", "how"), ("--set how", "NAME=VALUE, such as D=64"))])
def test_the_command(command, tmp_path: Path, text: str | None, arguments: tuple[str, ...],
                     words: tuple[str, ...]):
    path = tmp_path / "some.py"
    if text is not None: path.write_text(text)
    command("shapes", path, *arguments).refused(*words)


def test_near_names(command, tmp_path: Path):
    path = tmp_path / "other.py"
    path.write_text(FILE.replace("def f", "def forward"))
    command("shapes", path, "froward").refused("did you mean forward?")
