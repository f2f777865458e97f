"""Checked functions: what passes, and which argument, dimension and origin an error names."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv import shapes
from tinygrad_nv.errors import ShapeError
from tinygrad_nv.kvcache.cache import KVCache
from tinygrad_nv.shapes import Dims

f32 = dtypes.float32


def T(*shape: int, dtype=f32) -> Tensor: return Tensor.empty(*shape, dtype=dtype)


@shapes.checked
def mlp(x: Tensor["B", "S", "D", f32], w1: Tensor["D", "F", f32], w2: Tensor["F", "D", f32]
        ) -> Tensor["B", "S", "D", f32]:
    return (x @ w1).relu() @ w2


def test_what_fits_passes_through():
    rng = np.random.default_rng(0)
    x, a, b = (rng.standard_normal(shape, np.float32) for shape in ((2, 3, 8), (8, 4), (4, 8)))
    out = mlp(Tensor(x), Tensor(a), w2=Tensor(b))
    np.testing.assert_allclose(out.numpy(), np.maximum(x @ a, 0) @ b, rtol=1e-4, atol=1e-5)
    assert mlp.__name__ == "mlp"


@pytest.mark.parametrize(("args", "message"), [
    ((T(2, 3, 8), T(9, 4), T(4, 8)),
     "argument w1: dimension 0 of .* is 9, not 8.*\n.*D=8, from argument x: dimension 2"),
    ((T(2, 3, 8), T(8, 4), T(5, 8)),
     "argument w2: dimension 0 .* is 5, not 4.*\n.*F=4, from argument w1: dimension 1"),
    ((T(2, 3), T(8, 4), T(4, 8)), "argument x has 2 dimensions"),
    ((T(2, 3, 8), T(8, 4, dtype=dtypes.half), T(4, 8)), "argument w1 is of f16\n.*f32"),
    (([1], T(8, 4), T(4, 8)), "argument x is a list"), ((None, T(8, 4), T(4, 8)), "argument x is None")])
def test_what_does_not_fit_is_named(args, message: str):
    with pytest.raises(ShapeError, match=message): mlp(*args)


def test_wrong_calls_are_pythons():
    with pytest.raises(TypeError, match="missing"): mlp(T(2, 3, 8))


def test_an_int_gives_its_name():
    @shapes.checked
    def heads_of(x: Tensor["B", "S", "heads*D_h"], *, heads: int, p: float = 0.0
                 ) -> Tensor["B", "heads", "S", "D_h"]:
        return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)
    assert heads_of(T(2, 3, 8), heads=4).shape == (2, 4, 3, 2)
    with pytest.raises(ShapeError, match=r"a whole number D_h with heads.D_h = 8: heads=3 from argument"):
        heads_of(T(2, 3, 8), heads=3)


def test_an_int_by_its_default():
    @shapes.checked
    def first(x: Tensor["B", "n"], n: int = 4) -> Tensor["B", "n"]: return x
    assert first(T(2, 4)).shape == (2, 4)
    with pytest.raises(ShapeError, match=r"dimension 1 .* is 5, not 4.*\n.*argument n=4"): first(T(2, 5))


def test_results_are_held():
    @shapes.checked
    def turned(x: Tensor["B", "S"]) -> Tensor["S", "B"]: return x
    with pytest.raises(ShapeError, match=r"the result: dimension 0 .* is 2, not 3.*\n.*from argument x: dim"):
        turned(T(2, 3))
    assert turned(T(3, 3)).shape == (3, 3)


class Pair(NamedTuple):
    """Keys and values."""
    k: Tensor["B", "D"]
    v: Tensor["B", "D"]


@dataclass
class Both:
    """A sum and a product."""
    total: Tensor["B"]
    count: int


def test_nested_values():
    @shapes.checked
    def every(xs: list[Tensor["B", "D"]], *more: Tensor["B"], by: dict[str, Tensor["D"]],
              kv: Pair, bias: Tensor["D"] | None = None) -> tuple[dict[str, Tensor["B", "D"]], Both]:
        return {"sum": xs[0] + by["w"]}, Both(xs[0].sum(1), 1)
    good = {"by": {"w": T(3)}, "kv": Pair(T(2, 3), T(2, 3))}
    assert every([T(2, 3)], **good)[1].count == 1
    for bad, words in (({**good, "by": {"w": T(3), "b": T(4)}}, r"argument by\['b'\]: dimension 0 .* is 4"),
                       ({**good, "kv": Pair(T(2, 3), T(2, 5))}, r"argument kv\.v: dimension 1 .* is 5"),
                       ({**good, "bias": T(4)}, "argument bias: dimension 0 .* is 4"),
                       ({**good, "by": T(3)}, "argument by is a Tensor\n.*a dict")):
        with pytest.raises(ShapeError, match=words): every([T(2, 3)], **bad)
    with pytest.raises(ShapeError, match=r"argument xs\[1\]: dimension 0 .* is 4"):
        every([T(2, 3), T(4, 3)], **good)


def test_tuples_of_any_length_and_of_one():
    @shapes.checked
    def all_of(xs: tuple[Tensor["B"], ...], pair: tuple[Tensor["B"], Tensor["C"]],
               seq: Sequence[Tensor["C"]] = ()) -> Tensor["B"]: return xs[0]
    assert all_of((T(2), T(2)), (T(2), T(3)), [T(3)]).shape == (2,)
    with pytest.raises(ShapeError, match=r"argument pair has 1 elements\n.*2"): all_of((T(2),), (T(2),))
    with pytest.raises(ShapeError, match=r"argument seq\[0\]"): all_of((T(2),), (T(2), T(3)), [T(4)])


def test_alternatives_by_their_rank():
    @shapes.checked
    def mean(x: Tensor["B", "S", "D"] | Tensor["S", "D"], w: Tensor["D"]) -> Tensor: return x * w
    assert mean(T(2, 3, 4), T(4)).shape == (2, 3, 4)
    assert mean(T(3, 4), T(4)).shape == (3, 4)
    with pytest.raises(ShapeError, match="argument x is a Tensor"): mean(T(4), T(4))


def test_annotated_is_the_same():
    @shapes.checked
    def scaled(x: Annotated[Tensor, Dims["B", "D", f32]],
               w: Annotated[Tensor, "a note", Dims["D"]]) -> Tensor:
        return x * w
    with pytest.raises(ShapeError, match=r"argument w: dimension 0 .* is 3, not 4"): scaled(T(2, 4), T(3))


def test_methods():
    class Linear:
        def __init__(self) -> None: self.w = T(4, 5)

        @shapes.checked
        def __call__(self, x: Tensor["B", 4]) -> Tensor["B", 5]: return x @ self.w

        @staticmethod
        @shapes.checked
        def doubled(x: Tensor["B"]) -> Tensor["2B"]: return x.cat(x)
    assert Linear()(T(2, 4)).shape == (2, 5)
    assert Linear.doubled(T(2)).shape == (4,)
    with pytest.raises(ShapeError, match=r"argument x: dimension 1 .* is 3, not 4"): Linear()(T(2, 3))


def test_caches_by_extents_or_keys():
    @shapes.checked
    def step(q: Tensor["B", "H", 1, "D"], cache: KVCache["B", "H", "S_max", "D", f32]) -> Tensor: return q

    class Plain:
        def __init__(self, *shape: int) -> None: self.K, self.V = T(*shape), T(*shape)
    assert step(T(2, 4, 1, 8), Plain(2, 4, 16, 8)).shape == (2, 4, 1, 8)
    with pytest.raises(ShapeError, match=r"argument cache: dimension 3 of KVCache.* is 9, not 8"):
        step(T(2, 4, 1, 8), Plain(2, 4, 16, 9))
    ours = KVCache["B", "H", "S_max", "D", f32](B=2, H=4, S_max=16, D=8)
    assert step(T(2, 4, 1, 8), ours).shape == (2, 4, 1, 8)
    with pytest.raises(ShapeError, match=r"argument cache: dimension 0 of KVCache.* is 2, not 3"):
        step(T(3, 4, 1, 8), ours)


# **** what does not fit inside ****

def test_a_mismatch_inside_names_line_and_origins():
    @shapes.checked
    def wrong(x: Tensor["B", "D"], w: Tensor["F", "D"]) -> Tensor["B", "F"]:
        h = x.relu()
        return h @ w
    line = wrong.__wrapped__.__code__.co_firstlineno + 3
    with pytest.raises(ShapeError) as error: wrong(T(2, 3), T(5, 3))
    assert isinstance(error.value, RuntimeError)    # as tinygrad's own
    assert f"test_checked.py:{line}, in " in error.value.found
    assert "h @ w: cannot dot (2, 3) and (5, 3)" in error.value.found
    assert error.value.expected == (f"h is [2, 3]: assigned in line {line - 1}; "
                                    'w is [5, 3]: argument w, Tensor["F", "D"]')


def test_a_broadcast_that_tinygrad_says_late():
    @shapes.checked
    def wrong(x: Tensor["B", "D"], w: Tensor["F"]) -> Tensor["B", "D"]:
        h = x.exp()
        y = h * 2 + w
        return y.sqrt()
    line = wrong.__wrapped__.__code__.co_firstlineno + 3
    with pytest.raises(ShapeError) as error: wrong(T(2, 3), T(5))
    assert f"test_checked.py:{line}, in " in error.value.found
    assert "computed from h, assigned in line" in error.value.expected
    assert "w is [5]: argument w" in error.value.expected


def test_the_users_own_errors_are_left_alone():
    @shapes.checked
    def picky(x: Tensor["B"]) -> Tensor["B"]: raise ValueError("odd")
    with pytest.raises(ValueError, match=r"^odd$"): picky(T(2))


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch):
    def realized(self: Tensor, *_: Tensor, **__: object) -> Tensor: raise AssertionError("something runs")
    monkeypatch.setattr(Tensor, "realize", realized)
    mlp(T(2, 3, 8), T(8, 4), T(4, 8))
