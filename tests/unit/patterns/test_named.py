"""Functions that are known by name: lowered to kernels, or inlined, in each of tinygrad's modes."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tinygrad.uop.ops import Ops, UOp

from tests.support.patterns import silu_mul
from tinygrad_nv import Tensor, TinyJit, disabled, explain, function, hooks
from tinygrad_nv.hooks import rewrites as hook_rewrites
from tinygrad_nv.patterns import named, program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.runtime.note import Note, note_of


@dataclass(frozen=True)
class Gate:
    """silu(x) · y · by, and x + y."""
    by: int = 1


@dataclass(frozen=True)
class Slope:
    """gradient · y · by + x."""
    by: int


WRAPS = pytest.mark.parametrize("wrap", [lambda fn: fn, function, lambda fn: function(fn, precompile=True)],
                                ids=["eager", "function", "precompiled"])


def body(what: Gate, x: Tensor, y: Tensor) -> tuple[Tensor, ...]: return x.silu() * y * what.by, x + y


def kernel(what: Gate, target: Target, x: UOp, y: UOp) -> tuple[UOp, ...]:
    """The product by a kernel of tests, which is exact for by = 1 alone."""
    if what.by == 2: raise Unsupported("gates by 2")
    if what.by == 3: return None
    source = silu_mul.SOURCE
    for name, value in (("ENTRY", "gate"), ("COUNT", str(x.numel())), ("PARAMETER", "")):
        source = source.replace(name, value)
    (out,) = program.program("gate", source, x.device, [program.Output(x.shape, x.dtype)],
                             [x, y], note=Note("gate", f"by {what.by}"))
    return out, x + y


@pytest.fixture(autouse=True)
def lowered() -> Iterator[None]:
    before = dict(named._lowerings), set(hook_rewrites._kept)
    named.lower(Gate, "gate", kernel)
    yield
    named._lowerings.clear()
    named._lowerings.update(before[0])
    hook_rewrites._kept.intersection_update(before[1])


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(3).normal(size=(2, 16, 8)).astype(np.float32)
    return x, y


def want(x: np.ndarray, y: np.ndarray, by: int = 1) -> np.ndarray: return x / (1 + np.exp(-x)) * y * by


def close(got: Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=2e-6)


def gate(x: Tensor, y: Tensor, by: int = 1) -> Tensor: return named.call(Gate(by), body, x, y)[0]


def templates(*tensors: Tensor) -> list[str | None]: return [k.template for k in explain(*tensors).kernels]


def pair(data: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    x, y = (Tensor(one).realize() for one in data)
    return x, y


# **** lowered, in each mode ****

@WRAPS
@pytest.mark.parametrize("by", [1, 2, 3])
def test_kernels_or_bodies(data, wrap: Callable[..., Callable[..., Tensor]], by: int):
    fn = wrap(lambda x, y: gate(x, y, by))
    # tinygrad 0.14.0 keeps a precompiled result that is realized directly as GETTUPLE: hence the addition
    out = fn(*pair(data)) + 1
    assert ("gate" in templates(out)) == (by == 1)
    close(out, want(*data, by) + 1)


@WRAPS
def test_under_jit(data, wrap: Callable[..., Callable[..., Tensor]]):
    fn = wrap(gate)
    x, y = pair(data)
    run = TinyJit(lambda x, y: (fn(x, y) + 1).realize())
    for scale in (1, 2, 3, 4): close(run(x, (y * scale).realize()), want(*data) * scale + 1)
    notes = [note_of(u) for u in run.captured.linear.toposort()]
    assert [note.template for note in notes if note] == ["gate"]


def test_both_results(data):
    out, total = named.call(Gate(), body, *pair(data))
    close(out * total, want(*data) * (data[0] + data[1]))


def test_functions_in_functions(data):
    inner = function(lambda x, y: gate(x, y) + y)
    outer = function(lambda x, y: inner(x, y) + gate(y, x))
    x, y = pair(data)
    assert templates(outer(x, y)).count("gate") == 2
    close(outer(x, y), want(*data) + data[1] + want(data[1], data[0]))


def test_one_call_with_several_users_is_lowered_once(data):
    x, y = pair(data)
    out = gate(x, y)
    assert templates(out * 2, out + 3).count("gate") == 1


def test_results_that_are_arguments(data):
    x, y = pair(data)
    out = gate(gate(x, y), y)
    assert templates(out).count("gate") == 2
    close(out, want(want(*data), data[1]))


def test_arguments_that_are_computed(data):
    x, y = pair(data)
    out = gate(x.permute(1, 0) * 2, y.T)
    assert "gate" in templates(out)
    close(out, want(data[0].T * 2, data[1].T))


def test_one_tensor_as_every_argument(data):
    x, _ = pair(data)
    close(gate(x, x), want(data[0], data[0]))


def test_disabled_runs_the_body(data):
    x, y = pair(data)
    out = gate(x, y)
    with disabled():
        assert "gate" not in templates(out)
        close(out, want(*data))


def test_made_while_disabled_and_run_while_enabled(data):
    with disabled(): out = gate(*pair(data))
    assert templates(out) == ["gate"]
    close(out, want(*data))


@pytest.mark.parametrize("axis", [0, 1])
def test_each_shard(data, axis: int):
    x, y = (t.shard(("CPU:0", "CPU:1"), axis=axis).realize() for t in pair(data))
    out = gate(x, y)
    assert templates(out) == ["gate", "gate"]
    close(out, want(*data))


# **** what is told ****

def test_a_refusal_is_told_with_its_reason(data):
    (record,) = explain(gate(*pair(data), by=2)).kernels
    assert record.template is None
    assert record.reason == "gate: gates by 2"


def test_a_refusal_without_a_reason_is_not_told(data):
    (record,) = explain(gate(*pair(data), by=3)).kernels
    assert record.reason == "no pattern matched"


def test_what_tells_schedules_apart_though_bodies_are_equal(data):
    def same(what: Gate, x: Tensor, y: Tensor) -> tuple[Tensor, ...]: return x.silu() * y, x + y
    for by, template in ((1, "gate"), (2, None), (1, "gate")):
        out = named.call(Gate(by), same, *pair(data))[0].contiguous()
        calls = out.schedule_linear().src
        (note,) = [note_of(call.src[0]) for call in calls]
        assert (note and note.template) == template


# **** in the place of what follows ****

@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_values_in_the_place_of_what_follows(data, used: tuple[int, ...]):
    seen: list[named.Uses] = []

    def turned(what: Gate, target: Target, uses: named.Uses, x: UOp, y: UOp) -> dict[UOp, UOp] | None:
        seen.append(uses)
        if 0 not in uses.after: return None
        (permuted, *_), (out, total) = uses.after[0], kernel(what, target, x, y)
        assert permuted.op is Ops.PERMUTE
        return {permuted: out.permute((1, 0)), uses.call.gettuple(1): total}
    named.lower(Gate, "gate", turned, sees_uses=True)
    results = named.call(Gate(), body, *pair(data))
    wanted = [(results[i].transpose(0, 1) * 2).contiguous() for i in used]
    assert ("gate" in templates(*wanted)) == (0 in used)
    assert {tuple(uses.after) for uses in seen} == {used}
    right = want(*data), data[0] + data[1]
    for i, got in zip(used, wanted, strict=True): close(got, 2 * right[i].T)


def test_a_result_of_two_users_has_nothing_after_it(data):
    seen: list[named.Uses] = []
    named.lower(Gate, "gate", lambda what, target, uses, *given: seen.append(uses), sees_uses=True)
    out, _ = named.call(Gate(), body, *pair(data))
    close(out.transpose(0, 1) * 2 + (out + 1).transpose(0, 1), 3 * want(*data).T + 1)
    assert {uses.after[0] for uses in seen} == {()}


# **** gradients ****

def derived(data: tuple[np.ndarray, np.ndarray], by: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x, y = data
    s = 1 / (1 + np.exp(-x))
    return (s + x * s * (1 - s)) * y * by, x * s * by


def test_gradients_of_the_body_where_none_is_given(data):
    x, y = pair(data)
    gate(x, y, 2).sum().backward()
    for got, expected in zip((x.grad, y.grad), derived(data, 2), strict=True): close(got, expected)


@WRAPS
def test_a_gradient_that_is_given(data, wrap: Callable[..., Callable[..., Tensor]]):
    seen, asked = [], []
    named.lower(Slope, "slope", lambda what, target, *arguments: asked.append(what))

    def grad(dout: UOp, call: UOp) -> tuple[UOp | None, ...]:
        what, (x, y) = call.arg.aux, call.src[1:]
        seen.append((what, call.gettuple(0).shape))
        (made,) = named.call(Slope(what.by), lambda what, g, y, x: (g * y * what.by + x,), Tensor(dout),
                             Tensor(y), Tensor(x))
        return made.uop, None

    x, y = pair(data)
    fn = wrap(lambda x, y: named.call(Gate(3), body, x, y, grad=grad)[0])
    (fn(x, y) * 5).sum().backward()
    assert seen == [(Gate(3), (16, 8))]
    close(x.grad + 0, 5 * data[1] * 3 + data[0])
    assert asked[0] == Slope(3)
    assert not y.grad.numpy().any()


@pytest.mark.parametrize("precompile", [False, True])
def test_a_gradient_with_more_arguments_than_the_function_it_is_in(data, precompile: bool):
    named.lower(Slope, "slope", lambda what, target, *arguments: None)

    def grad(dout: UOp, call: UOp) -> tuple[UOp | None, ...]:
        x, y = call.src[1:]
        five = (Tensor(one) for one in (dout, dout, y, x, dout))
        (made,) = named.call(Slope(2), lambda what, a, b, y, x, g: ((a + b) * y * what.by + x + g,), *five)
        return made.uop, None

    x, y = pair(data)
    fn = function(lambda x: named.call(Gate(3), body, x, x + y, grad=grad)[0] + 0, allow_implicit=True,
                  precompile=precompile)
    (dx,) = (fn(x) * 5).sum().gradient(x)
    close(dx + 0, 20 * (data[0] + data[1]) + data[0] + 5)


def test_gradients_of_both_results(data):
    def grad(*given: UOp, call: UOp) -> tuple[UOp | None, ...]: return given
    x, y = pair(data)
    out, total = named.call(Gate(), body, x, y, grad=grad)
    (out * 2 + total * 3).sum().backward()
    close(x.grad, np.full((16, 8), 2.0))
    close(y.grad, np.full((16, 8), 3.0))


# **** what raises ****

def test_what_a_body_raises_is_raised_by_the_call(data):
    x, y = pair(data)
    with pytest.raises(IndexError, match="broadcast"): gate(x, y[:, :3])


def test_only_kinds_that_are_lowered_are_kept(data):
    @dataclass(frozen=True)
    class Unknown:
        by: int = 1
    seen = []
    hooks.add_rewrite("look", lambda sink: seen.extend(n.op for n in sink.toposort()) or sink)
    try:
        (out,) = named.call(Unknown(), lambda what, x: (x * 2,), Tensor(data[0]).realize())
        close(out, data[0] * 2)
        assert Ops.FUNCTION not in seen
    finally: hooks.remove_rewrite("look")
