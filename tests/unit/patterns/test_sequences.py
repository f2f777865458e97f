"""Causal convolutions and linear attention as functions: on a CPU by their kernels and by their references,
of tokens that lie in any way, and their errors."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.support.tile.sequences_case import PAGES, ROWS, SINGLE, TOKENS, tokens_of
from tinygrad_nv import disabled, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import causal_conv, linear_attention

C, TAPS, HEADS, SHARED, D_K, D_V = 12, 3, 4, 2, 8, 6
LAYOUTS: dict[str, Callable[[np.ndarray], Tensor]] = {
    "dense": Tensor, "columns": lambda x: Tensor(np.pad(x, [(0, 0)] * (x.ndim - 1) + [(3, 2)]))[..., 3:-2],
    "apart": lambda x: Tensor(np.ascontiguousarray(x.T)).permute(*range(x.ndim)[::-1])}
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "causal_conv": causal_conv, "linear_attention": linear_attention}


def make_arguments(name: str, layout: str, single: bool = False) -> dict[str, Any]:
    """Returns the arguments of a function; tokens lie as `layout` says."""
    random, count = np.random.default_rng(0), len(SINGLE) if single else TOKENS
    def draw(*shape: int) -> np.ndarray: return random.standard_normal(shape).astype(np.float32)
    def lay(*shape: int) -> Tensor: return LAYOUTS[layout](draw(*shape) * 0.3)
    made: dict[str, Any] = {"sequences": Tensor(np.array(SINGLE if single else ROWS, np.int32)),
                            "single": single}
    if name == "causal_conv":
        return {**made, "x": lay(count, C), "weight": Tensor(draw(C, TAPS)), "bias": Tensor(draw(C)),
                "windows": Tensor(draw(PAGES, TAPS - 1, C)).contiguous().realize()}
    return {**made, "q": lay(count, SHARED, D_K), "k": lay(count, SHARED, D_K),
            "v": lay(count, HEADS, D_V), "decay": -Tensor(draw(count, HEADS)).abs(),
            "beta": Tensor(draw(count, HEADS)).sigmoid(), "scale": 0.5,
            "states": Tensor(draw(PAGES, HEADS, D_K, D_V)).contiguous().realize()}


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernel_and_reference(name: str, layout: str, single: bool):
    pages, tokens = "windows" if name == "causal_conv" else "states", tokens_of(SINGLE if single else ROWS)
    given = make_arguments(name, layout, single)
    out, after = FUNCTIONS[name](**given)
    assert name in [each.template for each in explain(out).kernels]
    Tensor.realize(out, after)
    other = make_arguments(name, "dense", single)
    wanted, wanted_after = FUNCTIONS[name](**other)
    with disabled(): Tensor.realize(wanted, wanted_after)
    np.testing.assert_allclose(out.numpy()[tokens], wanted.numpy()[tokens], atol=1e-5)
    np.testing.assert_allclose(given[pages].numpy(), other[pages].numpy(), atol=1e-5)


@pytest.mark.parametrize(("name", "argument", "shape"), [
    ("causal_conv", "weight", (C + 1, TAPS)), ("causal_conv", "windows", (PAGES, TAPS, C)),
    ("causal_conv", "bias", (C + 1,)), ("causal_conv", "sequences", (5, 5)),
    ("linear_attention", "k", (TOKENS, SHARED, D_K + 1)), ("linear_attention", "beta", (TOKENS, SHARED)),
    ("linear_attention", "decay", (TOKENS, HEADS, D_V)), ("linear_attention", "sequences", (5, 5)),
    ("linear_attention", "states", (PAGES, HEADS, D_V, D_K))])
def test_shapes_that_do_not_fit_are_named(name: str, argument: str, shape: tuple[int, ...]):
    given = make_arguments(name, "dense")
    given[argument] = Tensor.zeros(*shape, dtype=given[argument].dtype)
    with pytest.raises(SpecError, match=argument): FUNCTIONS[name](**given)


@pytest.mark.parametrize(("name", "argument"), [
    ("causal_conv", "weight"), ("causal_conv", "windows"), ("linear_attention", "k"),
    ("linear_attention", "decay"), ("linear_attention", "states")])
def test_other_dtypes_are_refused(name: str, argument: str):
    given = make_arguments(name, "dense")
    with pytest.raises(SpecError, match=argument):
        FUNCTIONS[name](**{**given, argument: given[argument].cast(dtypes.float16)})
