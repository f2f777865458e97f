"""Wrong programs in the tile language: each is refused with its line, the cause and what to do.

Protocol: `wrong = Wrong()` collects functions that it decorates with the words of their errors,

    @wrong("16 columns meet 8 rows", "tile.transpose(b)")
    def dot(x): tile.dot(x[:, :], x[:, :])  # here

and `check(case)` calls one as a kernel of one program. Its parameters are Tensors by the names of TENSORS;
the error begins with the file and the line that ends in `# here`, and has all words.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import LanguageError
from tinygrad_nv.language import KTile, OTile, f32, int32, kernel

TENSORS: dict[str, Any] = {"x": KTile["M", "N", f32], "v": KTile["N", f32], "n": KTile["M", "N", int32],
                           "out": OTile["M", "N", f32], "counts": OTile["N", int32]}
M, N = 8, 16


@dataclass(frozen=True)
class Case:
    """A function with the words of its error."""
    fn: FunctionType
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The file and the line that the error names."""
        lines, first = inspect.getsourcelines(self.fn)
        at = next(i for i, text in enumerate(lines) if text.rstrip().endswith("# here"))
        return f"{self.fn.__code__.co_filename}:{first + at}: "


class Wrong:
    """Collects wrong programs."""

    def __init__(self) -> None: self.cases: list[Case] = []

    def __call__(self, *words: str) -> Callable[[FunctionType], FunctionType]:
        def add(fn: FunctionType) -> FunctionType:
            self.cases.append(Case(fn, words))
            return fn
        return add

    @property
    def parametrized(self) -> pytest.MarkDecorator:
        """The cases, by their names."""
        return pytest.mark.parametrize("case", self.cases, ids=lambda case: case.fn.__name__)


def check(case: Case) -> None:
    """Calls the function as a kernel, which has to be refused."""
    names = inspect.signature(case.fn).parameters
    case.fn.__annotations__ = {name: TENSORS[name] for name in names}
    given = {name: Tensor.zeros(M, N) if len(TENSORS[name].dims) == 2 else Tensor.zeros(N) for name in names}
    given = {name: x.cast(TENSORS[name].element).contiguous().realize() for name, x in given.items()}
    with pytest.raises(LanguageError) as raised: kernel(grid=(1,))(case.fn)(**given)
    error = raised.value
    assert str(error).startswith(case.line), f"{case.line} expected in:\n{error}"
    assert [word for word in case.words if word not in str(error)] == [], str(error)
    assert error.expected or error.fix, str(error)
