"""Annotations: what is in the brackets, how it prints, and that Tensor stays tinygrad's. Sizes of names
from real shapes: in any order, through products, and what does not agree. Dimensions: what is read equals
Python's arithmetic, and what is solved fits. mypy with the plugin: annotations are Tensors to it,
mistakes beside them are found, and without it they fail."""
from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, get_args

import pytest
import tinygrad
from hypothesis import given, settings
from hypothesis import strategies as st
from mypy import api
from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

import tinygrad_nv
from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes import Dims, KTile, OTile, QTile, TensorType, Tile, TileType, parse, types
from tinygrad_nv.shapes.binding import Bindings
from tinygrad_nv.shapes.dims import Dim
from tinygrad_nv.shapes.dims import parse as parse_dim
from tinygrad_nv.shapes.fit import assignments, fit_dim

bf16 = dtypes.bfloat16


@dataclass(frozen=True)
class Policied:
    """A dtype with policies, as numerics has it."""
    dtype: Any
    policies: tuple[str, ...] = ()

    def __str__(self) -> str: return " @ ".join(["bf16", *self.policies])


def test_brackets_give_a_type():
    made = Tensor["B", "S", "3H*D_h", bf16]
    assert (made.kind, made.dtype, made.leading) == ("Tensor", bf16, False)
    assert made.dims == (parse("B"), parse("S"), parse("3H*D_h"))
    assert str(made) == 'Tensor["B", "S", "3H*D_h", bf16]'
    assert made.symbols == ("B", "S", "D_h", "H")


@pytest.mark.parametrize(("made", "printed"), [
    (Tensor["B", 8], 'Tensor["B", 8]'), (Tensor[..., "D"], 'Tensor[..., "D"]'),
    (Tensor["...", "D"], 'Tensor[..., "D"]'),
    (Tensor[bf16], "Tensor[bf16]"), (Tensor["B"], 'Tensor["B"]'),
    (KTile["B*H", "S", Policied(bf16, ("accum(f32)",))], 'KTile["B*H", "S", bf16 @ accum(f32)]'),
    (QTile["N", "K", dtypes.int8], 'QTile["N", "K", s8]'), (OTile["M"], 'OTile["M"]'),
    (Tile["M"], 'Tile["M"]')])
def test_a_type_prints_as_written(made: TensorType, printed: str):
    assert str(made) == repr(made) == printed


def test_policies_keep_their_dtype():
    made = Tensor["B", Policied(bf16)]
    assert made.element == bf16
    assert made.dtype == Policied(bf16)


def test_types_are_equal_by_what_they_say():
    assert Tensor["H*D", "2S"] == Tensor["D*H", "S*2"]
    assert hash(Tensor["B", bf16]) == hash(Tensor["B", bf16])
    assert Tensor["B", bf16] != Tensor["B"]
    assert KTile["B"] != Tensor["B"]
    assert Dims["B"] == Tensor["B"]


def test_types_are_frozen_and_can_be_copied():
    made = KTile["M", "N", bf16]
    with pytest.raises(FrozenInstanceError): made.kind = "Tile"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert isinstance(made, TileType)


def test_types_stand_in_other_annotations():
    made = Tensor["B"]
    assert get_args(Optional[made]) == get_args(made | None) == (made, type(None))  # noqa: UP045
    assert get_args(None | made) == (type(None), made)
    assert get_args(dict[str, made]) == (str, made)
    assert get_args(Annotated[Tensor, Dims["B"]])[1] == made


def test_tensor_is_tinygrads():
    assert Tensor is tinygrad.Tensor is tinygrad_nv.Tensor
    assert isinstance(Tensor([1]), Tensor)
    assert Tensor([1, 2, 3])[1].item() == 2     # of objects the brackets are tinygrad's


def test_brackets_stay_while_disabled():
    with tinygrad_nv.disabled(): assert str(Tensor["B"]) == 'Tensor["B"]'


def test_brackets_can_be_taken_back():
    script = ("import tinygrad_nv, tinygrad; from tinygrad_nv.shapes import types; types.unregister()\n"
              "print(hasattr(tinygrad.Tensor, '__class_getitem__')); types.register()\n"
              "print(tinygrad.Tensor['B'])")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={"PATH": "/usr/bin:/bin", "NV": "0"})
    assert done.stdout.split("\n")[:2] == ["False", 'Tensor["B"]']
    assert types.TensorType is TensorType


f32 = dtypes.float32


def bound(*given) -> Bindings:
    made = Bindings()
    for i, (type, shape) in enumerate(given): made.tensor(f"argument {'xyz'[i]}", type, shape)
    return made


def test_names_are_found():
    assert bound((Tensor["B", "S", "2D"], (2, 3, 8)), (Tensor["D"], (4,))).sizes == {"B": 2, "S": 3, "D": 4}


def test_a_product_waits_for_a_name():
    made = bound((Tensor["B*H", "S"], (12, 5)))
    assert made.sizes == {"S": 5}
    made.scalar("H", 4, "H=4")
    assert made.sizes == {"S": 5, "H": 4, "B": 3}
    made = bound((Tensor["A*B"], (6,)), (Tensor["B*C"], (15,)), (Tensor["A"], (2,)))
    assert made.sizes == {"A": 2, "B": 3, "C": 5}


def test_equal_products_agree_without_names():
    assert bound((Tensor["B*H"], (12,)), (Tensor["H*B"], (12,))).sizes == {}
    with pytest.raises(ShapeError, match=r"argument y: dimension 0 of Tensor\[\"H\*B\"\] is 13, not 12"):
        bound((Tensor["B*H"], (12,)), (Tensor["H*B"], (13,)))


def test_what_waited_is_checked_when_its_names_are_known():
    with pytest.raises(ShapeError, match=r"argument x: dimension 0 of .* is 12, not 20"):
        bound((Tensor["B*H"], (12,)), (Tensor["B", "H"], (4, 5)))
    with pytest.raises(ShapeError, match="a whole number B with"):
        bound((Tensor["B*H"], (12,)), (Tensor["H"], (5,)))


def test_a_quotient_is_checked_and_not_solved():
    assert bound((Tensor["D//2"], (4,)), (Tensor["D"], (9,))).sizes == {"D": 9}
    with pytest.raises(ShapeError, match="is 4, not 5"): bound((Tensor["D//2"], (4,)), (Tensor["D"], (10,)))


def test_leading_dimensions_are_free():
    assert bound((Tensor[..., "D"], (2, 3, 4)), (Tensor[..., "D"], (4,))).sizes == {"D": 4}
    with pytest.raises(ShapeError, match="1 or more"): bound((Tensor[..., "D"], ()))


def test_numbers_are_held():
    assert bound((Tensor["B", 4], (2, 4))).sizes == {"B": 2}
    with pytest.raises(ShapeError, match="is 5, not 4"): bound((Tensor["B", 4], (2, 5)))


def test_dtypes_are_held_where_there_are_any():
    made = Bindings()
    made.tensor("argument x", Tensor["B"], (2,), dtypes.int8)
    made.tensor("argument x", Tensor["B", f32], (2,), f32)
    with pytest.raises(ShapeError, match="argument x is of s8"):
        made.tensor("argument x", Tensor["B", f32], (2,), dtypes.int8)


def test_symbolic_extents_are_left_alone():
    n = UOp.variable("n", 1, 8)
    assert bound((Tensor["B", "S"], (n, 3)), (Tensor["B"], (5,))).sizes == {"S": 3, "B": 5}


def test_the_error_says_where_sizes_are_from():
    with pytest.raises(ShapeError) as error:
        bound((Tensor["B", "S", "D"], (2, 8, 64)), (Tensor["D", "3D"], (64, 190)))
    assert str(error.value).splitlines() == [
        'argument y: dimension 1 of Tensor["D", "3D"] is 190, not 192; its shape is (64, 190)',
        '  expected: 3D=192: D=64 from argument x: dimension 2 of Tensor["B", "S", "D"], of shape (2, 8, 64)']


LEAVES = st.sampled_from(["B", "S", "D_h", "1", "2", "7"])
TEXTS = st.recursive(LEAVES, lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    st.tuples(inner, st.sampled_from(["2", "3", "S"])).map(lambda t: f"({t[0]})//{t[1]}")), max_leaves=6)
SIZES = st.fixed_dictionaries({name: st.integers(1, 50) for name in ("B", "S", "D_h")})


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_value_is_pythons(text: str, sizes: dict[str, int]):
    assert parse_dim(text).value(sizes) == eval(text, {}, sizes)


@settings(deadline=None, max_examples=200)
@given(TEXTS, SIZES)
def test_what_is_written_is_read_again(text: str, sizes: dict[str, int]):
    dim = parse_dim(text)
    assert parse_dim(str(dim)) == dim
    assert parse_dim(str(dim)).value(sizes) == dim.value(sizes)


@pytest.mark.parametrize(("one", "other"), [
    ("3H*D_h", "D_h*H*3"), ("(S+1)*2", "2S+2"), ("2(S+1)", "2S+2"), ("(B*H)//H", "B"), ("4D//2", "2D"),
    ("S+1-1", "S"), ("B-B", "0"), ("8//3", "2"), ("1H", "H")])
def test_equal_polynomials_are_equal(one: str, other: str):
    assert parse_dim(one) == parse_dim(other)
    assert hash(parse_dim(one)) == hash(parse_dim(other))


def test_different_polynomials_differ():
    assert parse_dim("D//2*2") != parse_dim("D")
    assert parse_dim("B*H") != parse_dim("B+H")


@pytest.mark.parametrize(("text", "number", "sizes", "found"), [
    ("S", 7, {}, ("S", 7)), ("3H*D_h", 192, {"H": 4}, ("D_h", 16)), ("S+1", 9, {}, ("S", 8)),
    ("B*H", 12, {"B": 3}, ("H", 4)), ("N*N", 49, {}, ("N", 7)), ("B*H", 12, {}, None), ("D//2", 4, {}, None),
    ("2S-1", 7, {}, ("S", 4)), ("N*N+N", 6, {}, None), ("S+1", 1, {}, ("S", 0))])
def test_one_unknown_is_solved(text: str, number: int, sizes: dict[str, int], found: tuple[str, int] | None):
    assert parse_dim(text).solve(number, sizes) == found


@pytest.mark.parametrize(("text", "number"), [("2S", 7), ("S+5", 3), ("N*N", 48)])
def test_what_no_size_gives_is_refused(text: str, number: int):
    with pytest.raises(ArithmeticError): parse_dim(text).solve(number, {})


@pytest.mark.parametrize("text", ["B S", "3H*", "D/2", "", "(B", "B//0", "B)", "*B", "B**2", "é*", "a.b"])
def test_what_is_no_dimension_is_refused(text: str):
    with pytest.raises(ShapeError, match="the dimension"): parse_dim(text)


# **** from numbers ****

@pytest.mark.parametrize("text", ["B", "3", "2D", "B*S", "3B*D", "S+1", "S-1", "B*S+B", "S+D", "D//2",
                                  "B*D//4", "B*S*D", "2S+3D+1", "D//heads", "B*S-1"])
def test_a_dimension_is_found_from_its_numbers(text: str):
    names = ("B", "S", "D", "heads")
    sizes = next(assignments(names, ("heads",), {}))
    numbers = [parse_dim(text).value(at) or 0 for at in sizes]
    found = fit_dim(numbers, sizes, {})
    assert found is not None
    assert parse_dim(found) == parse_dim(text)


def test_scalars_divide_all_other_sizes():
    _, divided, aligned = assignments(("B", "D", "heads"), ("heads",), {"B": 3})
    assert all(at["D"] % at["heads"] == 0 and at["B"] == 3 for at in divided)
    assert all(at["D"] % (64 * at["heads"]) == 0 for at in aligned)
    assert len({at["D"] for at in divided}) == len(divided)


def test_numbers_of_no_dimension_are_not_named():
    sizes = next(assignments(("B",), (), {}))
    assert fit_dim([2 ** at["B"] for at in sizes], sizes, {}) is None


def test_what_is_written_comes_first():
    sizes = [{"B": 4, "D": 8}] * 5
    assert fit_dim([8] * 5, sizes, {"2B": parse_dim("2B"), "D": parse_dim("D")}) == "2B"
    assert Dim.number(0) == parse_dim("0")


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
