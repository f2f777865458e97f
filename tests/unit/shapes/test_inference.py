"""Shapes of variables in names, without running: what is found in each line, and mismatches with both
origins."""
from __future__ import annotations

from typing import NamedTuple

import pytest
from tinygrad import Tensor, dtypes, nn

from tinygrad_nv import shapes
from tinygrad_nv.errors import ShapeError
from tinygrad_nv.functional import embedding, gate_up, scaled_dot_product_attention
from tinygrad_nv.kvcache.cache import KVCache
from tinygrad_nv.shapes import infer, inference

f32, bf16 = dtypes.float32, dtypes.bfloat16
Wqkv: Tensor["D", "3D", f32] = Tensor.empty(64, 192)
Wo = Tensor.empty(60, 64)


def found(fn, **options) -> dict[str, str]:
    """Shapes by variable, of a function without mismatches."""
    report = infer(fn, **options)
    assert not report.mismatches, inference.report_text(report)
    return {line.name: f"{line.shape} {line.dtype}" for line in report.lines}


def test_a_layer_line_by_line():
    def attention(x: Tensor["B", "S", "H*D_h", bf16], wqkv: Tensor["H*D_h", "3H*D_h", bf16], *, H: int):
        y = x @ wqkv
        q, k, v = [each.reshape(*x.shape[:2], H, -1).transpose(1, 2) for each in y.chunk(3, dim=-1)]
        s = q.float() @ k.float().transpose(-1, -2)
        out = (s.softmax() @ v.float()).transpose(1, 2).flatten(2)
        last = out[:, -1:].cat(x.float(), dim=1)
        return out.cast(bf16), last
    assert found(attention) == {
        "x": "[B, S, H*D_h] bf16", "wqkv": "[H*D_h, 3H*D_h] bf16", "y": "[B, S, 3H*D_h] bf16",
        **dict.fromkeys("qkv", "[B, H, S, D_h] bf16"), "s": "[B, H, S, S] f32", "out": "[B, S, H*D_h] f32",
        "last": "[B, S+1, H*D_h] f32", "return[0]": "[B, S, H*D_h] bf16", "return[1]": "[B, S+1, H*D_h] f32"}


def test_lines_have_their_numbers_and_loops_are_said_once():
    def f(x: Tensor["B"]) -> Tensor["B"]:
        for _ in range(3):
            x = x + 1
        return x
    first = f.__code__.co_firstlineno
    lines = [(line.line - first, line.name) for line in infer(f).lines]
    assert lines == [(-first, "x"), (2, "x"), (3, "return")]


def test_heads_divide_what_is_split_into_them():
    def split(x: Tensor["B", "S", "D"], *, heads: int, p: float, causal: bool
              ) -> Tensor["B", "heads", "S", "D//heads"]:
        return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)
    assert found(split)["return"] == "[B, heads, S, D//heads] f32"
    assert found(split, sizes={"heads": 4, "D": 64})["return"] == "[B, heads, S, D//heads] f32"


def test_aligned_sizes_are_tried_where_a_function_wants_them():
    def blocks(x: Tensor["N"]):
        if x.shape[0] % 32: raise ValueError("32")
        return x.reshape(-1, 32)
    assert found(blocks)["return"] == "[N//32, 32] f32"


def test_functions_of_ours_are_shapes_alone():
    def forward(ids: Tensor["B", "S", dtypes.int], table_: Tensor["V", "H*64", f32],
                w: Tensor["H*64", "2F", f32], *, H: int) -> Tensor["B", "S", "F"]:
        x = embedding(table_, ids)
        q = x.reshape(*x.shape[:2], H, 64).transpose(1, 2)
        y = scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        up = y @ w
        return gate_up(up, "silu")
    assert found(forward)["y"] == "[B, S, H*64] f32"


class Model:
    """A layer with weights of its own."""
    def __init__(self) -> None:
        self.norm, self.w = nn.LayerNorm(64), Tensor.empty(48, 64)

    def __call__(self, x: Tensor["B", 64]) -> Tensor["B", 48]:
        h = self.norm(x)
        return h @ self.w.T

    def wrong(self, x: Tensor["B", 64]) -> Tensor["B", 48]:
        return x @ self.w


def test_methods_and_attributes():
    assert found(Model())["return"] == found(Model().__call__)["return"] == "[B, 48] f32"
    mismatch, = infer(Model().wrong).mismatches
    assert mismatch.origins == ('x is [B, 64]: argument x, Tensor["B", 64]',
                                "self.w is [48, 64]: its own shape")


def test_module_variables_fix_names():
    def project(x: Tensor["B", "S", "D"]) -> Tensor["B", "S", "3D"]: return x @ Wqkv
    report = infer(project)
    assert report.fixed == {"D": 64}
    assert [line.shape for line in report.lines] == ["[B, S, D]", "[B, S, 3D]"]
    assert inference.report_text(report).splitlines()[0].endswith("project, with D=64")


def test_module_variables_without_annotation_are_named():
    def project(x: Tensor["B", "D"], w: Tensor["D", "D"]) -> Tensor["B", "D"]: return (x @ Wo) @ w
    mismatch, = infer(project).mismatches
    assert mismatch.origins == ('x is [B, D]: argument x, Tensor["B", "D"]', "Wo is [60, 64]: its own shape")
    assert infer(project, sizes={"D": 60}).mismatches[0].text == "(x @ Wo) @ w"


class State(NamedTuple):
    """What a recurrent layer carries."""
    h: Tensor["B", "N"]
    c: Tensor["B", "N"]


def test_nested_arguments_and_caches():
    def step(state: State, xs: list[Tensor["B", "N"]], pair: tuple[Tensor["B"], Tensor["N"]] | None,
             cache: KVCache["B", "H", "S_max", "D", f32], more: Tensor[..., "N"]) -> State:
        cache = cache.append(cache.K, cache.V)
        keys = cache.K
        return State(state.h + xs[1] * pair[1], state.c + more[0] + keys.sum())
    shapes_ = found(step)
    assert shapes_["keys"] == shapes_["cache.V"] == "[B, H, 2S_max, D] f32"
    assert shapes_["return.h"] == "[B, N] f32"


def test_what_is_given_by_value():
    def f(x: Tensor["B"], how, *, mode: str = "a") -> Tensor["2B"]: return x.cat(how)
    with pytest.raises(ShapeError, match="argument how has no dimensions"): infer(f)
    assert infer(f, {"B": 3}, {"how": Tensor.empty(3)}).mismatches == ()


# **** mismatches ****

def test_both_origins_of_a_matmul():
    def f(x: Tensor["B", "S", "D"], w: Tensor["F", "D"]) -> Tensor["B", "S", "F"]:
        h = x.relu()
        return h @ w
    report = infer(f)
    mismatch, = report.mismatches
    assert (mismatch.line, mismatch.text) == (f.__code__.co_firstlineno + 2, "h @ w")
    assert mismatch.origins == (f"h is [B, S, D]: assigned in line {mismatch.line - 1}",
                                'w is [F, D]: argument w, Tensor["F", "D"]')
    assert "cannot dot" in mismatch.reason
    with pytest.raises(ShapeError, match="h @ w: cannot dot"): report.raise_mismatch()


def test_both_origins_of_a_broadcast():
    def f(x: Tensor["B", "S"], y: Tensor["S", "B"]):
        z = x + y.T.relu() * y
        return z
    mismatch, = infer(f).mismatches
    assert mismatch.origins == ('an operand is [B, S]: computed from argument y, Tensor["S", "B"]',
                                'y is [S, B]: argument y, Tensor["S", "B"]')


def test_a_view_is_said_by_its_variable():
    def f(x: Tensor["B", "S"], w: Tensor["F", "S"]): return x @ w.reshape(-1, w.shape[0] * 2)
    assert infer(f).mismatches[0].text.startswith(("w.reshape", "x @"))


def test_a_result_that_is_not_as_annotated():
    def f(x: Tensor["B", "S"]) -> Tensor["S", "B", bf16]: return x
    mismatch, = infer(f).mismatches
    assert mismatch.origins == ("return is [B, S] of f32", 'the annotation says Tensor["S", "B", bf16]')


def test_a_failure_of_python_is_a_mismatch_too():
    def f(x: Tensor["B", "S"]):
        a, b, c = x.shape
        return x.reshape(a * b, c)
    mismatch, = infer(f).mismatches
    assert "not enough values to unpack" in mismatch.reason


def test_the_attempt_that_comes_furthest_is_told():
    def f(x: Tensor["B", "D"], w: Tensor["D", "D"], *, heads: int):
        y = x.reshape(x.shape[0], heads, x.shape[1] // heads)
        return y @ w
    assert infer(f).mismatches[0].text == "y @ w"


def test_checked_functions_inside_name_their_line():
    @shapes.checked
    def inner(x: Tensor["B", "D"], w: Tensor["D"]) -> Tensor["B", "D"]: return x * w

    def outer(x: Tensor["B", "D"]):
        return inner(x, x.sum(1))
    mismatch, = infer(outer).mismatches
    assert mismatch.text == "inner(x, x.sum(1))"
    assert "argument w: dimension 0" in mismatch.reason


# **** values ****

def test_realize_does_nothing_and_values_are_refused(monkeypatch: pytest.MonkeyPatch):
    def f(x: Tensor["B"]) -> Tensor["B"]:
        y = (x + 1).realize()
        return y * 2
    assert found(f)["y"] == "[B] f32"

    def g(x: Tensor["B"]): return x[:int(x.sum().item())]
    assert "a value is read" in infer(g).mismatches[0].reason
    assert Tensor([2, 3]).sum().item() == 5     # afterwards as before


def test_report_and_verify_of_a_checked_function():
    @shapes.checked
    def f(x: Tensor["B", "D"]) -> Tensor["B"]: return x.sum(1)
    assert f.report().lines[-1].shape == "[B]"
    f.verify()

    @shapes.checked
    def g(x: Tensor["B", "D"]) -> Tensor["D"]: return x.sum(1)
    with pytest.raises(ShapeError, match="the result"): g.verify()
