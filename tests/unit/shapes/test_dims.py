"""Dimensions: what is read equals Python's arithmetic, and what is solved fits."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.dims import Dim, parse
from tinygrad_nv.shapes.fit import assignments, fit_dim

LEAVES = st.sampled_from(["B", "S", "D_h", "1", "2", "7"])
TEXTS = st.recursive(LEAVES, lambda inner: st.one_of(
    st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
    st.tuples(inner, st.sampled_from(["2", "3", "S"])).map(lambda t: f"({t[0]})//{t[1]}")), max_leaves=6)
SIZES = st.fixed_dictionaries({name: st.integers(1, 50) for name in ("B", "S", "D_h")})


@settings(deadline=None, max_examples=300)
@given(TEXTS, SIZES)
def test_value_is_pythons(text: str, sizes: dict[str, int]):
    assert parse(text).value(sizes) == eval(text, {}, sizes)


@settings(deadline=None, max_examples=200)
@given(TEXTS, SIZES)
def test_what_is_written_is_read_again(text: str, sizes: dict[str, int]):
    dim = parse(text)
    assert parse(str(dim)) == dim
    assert parse(str(dim)).value(sizes) == dim.value(sizes)


@pytest.mark.parametrize(("one", "other"), [
    ("3H*D_h", "D_h*H*3"), ("(S+1)*2", "2S+2"), ("2(S+1)", "2S+2"), ("(B*H)//H", "B"), ("4D//2", "2D"),
    ("S+1-1", "S"), ("B-B", "0"), ("8//3", "2"), ("1H", "H")])
def test_equal_polynomials_are_equal(one: str, other: str):
    assert parse(one) == parse(other)
    assert hash(parse(one)) == hash(parse(other))


def test_different_polynomials_differ():
    assert parse("D//2*2") != parse("D")
    assert parse("B*H") != parse("B+H")


@pytest.mark.parametrize(("text", "number", "sizes", "found"), [
    ("S", 7, {}, ("S", 7)), ("3H*D_h", 192, {"H": 4}, ("D_h", 16)), ("S+1", 9, {}, ("S", 8)),
    ("B*H", 12, {"B": 3}, ("H", 4)), ("N*N", 49, {}, ("N", 7)), ("B*H", 12, {}, None), ("D//2", 4, {}, None),
    ("2S-1", 7, {}, ("S", 4)), ("N*N+N", 6, {}, None), ("S+1", 1, {}, ("S", 0))])
def test_one_unknown_is_solved(text: str, number: int, sizes: dict[str, int], found: tuple[str, int] | None):
    assert parse(text).solve(number, sizes) == found


@pytest.mark.parametrize(("text", "number"), [("2S", 7), ("S+5", 3), ("N*N", 48)])
def test_what_no_size_gives_is_refused(text: str, number: int):
    with pytest.raises(ArithmeticError): parse(text).solve(number, {})


@pytest.mark.parametrize("text", ["B S", "3H*", "D/2", "", "(B", "B//0", "B)", "*B", "B**2", "é*", "a.b"])
def test_what_is_no_dimension_is_refused(text: str):
    with pytest.raises(ShapeError, match="the dimension"): parse(text)


# **** from numbers ****

@pytest.mark.parametrize("text", ["B", "3", "2D", "B*S", "3B*D", "S+1", "S-1", "B*S+B", "S+D", "D//2",
                                  "B*D//4", "B*S*D", "2S+3D+1", "D//heads", "B*S-1"])
def test_a_dimension_is_found_from_its_numbers(text: str):
    names = ("B", "S", "D", "heads")
    sizes = next(assignments(names, ("heads",), {}))
    numbers = [parse(text).value(at) or 0 for at in sizes]
    found = fit_dim(numbers, sizes, {})
    assert found is not None
    assert parse(found) == parse(text)


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
    assert fit_dim([8] * 5, sizes, {"2B": parse("2B"), "D": parse("D")}) == "2B"
    assert Dim.number(0) == parse("0")
