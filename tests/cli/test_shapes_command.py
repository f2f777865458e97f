"""`tinygrad-nv shapes`: tables, JSON, exit codes, and what is given with --set."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = '''
from tinygrad import Tensor, dtypes
from tinygrad_nv import shapes

W: Tensor["D", "3D"] = Tensor.empty(16, 48)

@shapes.checked
def mlp(x: Tensor["B", "S", "D"], w1: Tensor["D", "F"], w2: Tensor["F", "D"]) -> Tensor["B", "S", "D"]:
    h = (x @ w1).gelu()
    y = h @ w2
    return y

def plain(x): return x

def project(x: Tensor["B", "D"], *, mode) -> Tensor["B", "3D"]:
    return x @ W

class Block:
    def __call__(self, x: Tensor["B", "D", dtypes.half]) -> Tensor["B", "2D", dtypes.half]:
        return x.cat(x, dim=1)

block = Block()
'''
WRONG = '''
def wrong(x: Tensor["B", "S"], w: Tensor["F", "S"]):
    h = x.exp()
    return h @ w
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_all_functions(command, program: Path):
    done = command("shapes", program, "--set", "mode=fast").succeeded()
    assert done.err == ""
    assert done.out == """\
mlp
  line  variable  shape      dtype
        x         [B, S, D]  f32
        w1        [D, F]     f32
        w2        [F, D]     f32
     9  h         [B, S, F]  f32
    10  y         [B, S, D]  f32
    11  return    [B, S, D]  f32

project, with D=16
  line  variable  shape    dtype
        x         [B, D]   f32
    16  return    [B, 3D]  f32

Block.__call__
  line  variable  shape    dtype
        x         [B, D]   f16
    20  return    [B, 2D]  f16
"""


def test_one_function_with_sizes(command, program: Path):
    done = command("shapes", program, "mlp", "--set", "D=64", "--set", "B=2").succeeded()
    assert done.out.splitlines()[0] == "mlp, with D=64, B=2"
    assert command("shapes", program, "Block.__call__").succeeded().out.startswith("Block.__call__\n")


def test_a_mismatch_is_exit_code_1(command, program: Path):
    program.write_text(PROGRAM + WRONG)
    done = command("shapes", program, "wrong")
    assert (done.code, done.err) == (1, "")
    line = PROGRAM.count("\n") + 4
    assert done.out.splitlines()[-4:] == [
        f"  mismatch in line {line}: h @ w", f"    h is [B, S]: assigned in line {line - 1}",
        '    w is [F, S]: argument w, Tensor["F", "S"]',
        "    cannot dot (11, 29) and (47, 29) (at B=11, S=29, F=47)"]


def test_json_has_the_same(command, program: Path):
    program.write_text(PROGRAM + WRONG)
    done = command("shapes", program, "wrong", "--json")
    report, = json.loads(done.out)
    assert report["function"] == "wrong"
    assert [one["shape"] for one in report["lines"]] == ["[B, S]", "[F, S]", "[B, S]"]
    assert report["mismatches"][0]["origins"][1] == 'w is [F, S]: argument w, Tensor["F", "S"]'


def test_a_file_named_as_a_module(command, tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text(PROGRAM)
    command("shapes", path, "mlp").succeeded()
    assert json.dumps(1) == "1"
