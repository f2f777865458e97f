"""mypy with the plugin: annotations are Tensors to it, mistakes beside them are found, and without it they
fail."""
from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

PROGRAM = '''
from typing import Annotated
from tinygrad import Tensor, dtypes
from tinygrad_nv.shapes.types import Dims, KTile
bf16 = dtypes.bfloat16
def accum(given: object) -> object: return given
def f(x: Tensor["B", "S", "3H*D_h", bf16 @ accum(1)], y: list[Tensor[..., "D"]]) -> Tensor["B", 4]:
    reveal_type(x)
    reveal_type(y)
    return x.relu()
def kernel(q: KTile["B*H", "S", bf16 @ accum(1)]) -> None: reveal_type(q)
class Net:
    w: Tensor["D", "F"] | None
    def __init__(self) -> None: self.b: Tensor["F"] = 3
def g(x: Annotated[Tensor, Dims["B", "S"]]) -> int: return f(x, [x])
'''
INI = "[mypy]\n{}[mypy-tinygrad_nv.*]\nfollow_imports = silent\n"


@pytest.mark.slow
def test_mypy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MYPYPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)

    def checked(plugin: str) -> str:
        (tmp_path / "mypy.ini").write_text(INI.format(plugin))
        return api.run(["--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache"), "program.py"])[0]
    lines = checked("plugins = tinygrad_nv.shapes.mypy_plugin\n").splitlines()
    found = [line.partition(": ")[2] for line in lines if line.startswith("program.py")]
    assert found == [
        'note: Revealed type is "tinygrad.tensor.Tensor"',
        'note: Revealed type is "list[tinygrad.tensor.Tensor]"',
        'note: Revealed type is "Any"',
        'error: Incompatible types in assignment (expression has type "int", variable has type "Tensor")  '
        '[assignment]',
        'error: Incompatible return value type (got "Tensor", expected "int")  [return-value]']
    assert 'Name "B" is not defined' in checked("")
