"""Layers: which kernel belongs where, in all the ways a kernel comes to be; and NVTX ranges."""
from __future__ import annotations

import pickle
import sys
import types
from collections import Counter

import numpy as np
import pytest
from tinygrad import tensor as tensors
from tinygrad.codegen import to_program_cache
from tinygrad.helpers import SCACHE
from tinygrad.uop import ops
from tinygrad.uop.ops import Ops, all_metadata

from tinygrad_nv import Context, Tensor, TinyJit, Variable, explain, function, hooks, layer
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.runtime.observe.ranges import LayerMetadata, Origin, origin, span, track_layers

DEVICES = ("CPU", "EMU")
ROWS = Variable("rows", 1, 16)
PARTS = {f"layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp")}


def own() -> list[object]:
    """What tracking puts something else in the place of."""
    return [tensors._METADATA, ops.RewriteContext, Tensor.linear_with_vars, SCACHE.value]


@pytest.fixture(autouse=True)
def as_found():
    before = own()
    yield
    assert all(a is b for a, b in zip(own(), before, strict=True))
    assert not ranges.tracking()
    assert not hooks.is_watched()


@pytest.fixture(params=DEVICES)
def on(request):
    with Context(DEV=request.param): yield request.param


@pytest.fixture
def executed():
    """(layer, op) of every kernel that runs, graphs looked into."""
    found: list[Origin] = []
    def look(call, ctx, run):
        body = call.src[0]
        inside = body.src[0].src if body.op is Ops.CUSTOM_FUNCTION else (call,)
        found.extend(origin(each) for each in inside if each.src[0].op is Ops.PROGRAM)
        return run(call, ctx)
    hooks.add_execute("look", look)
    yield found
    hooks.remove_execute("look")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 4).half().realize()


def weights() -> list[Tensor]: return [normal(64, 64, seed=seed) for seed in range(6)]


def model(x: Tensor, w: list[Tensor]) -> Tensor:
    for i in range(3):
        with layer(f"layers.{i}"):
            with layer("attention"):
                h = (x.float().square().mean(-1, keepdim=True).rsqrt().cast(x.dtype) * x).contiguous()
                x = x + (h @ w[2 * i]).softmax(-1).contiguous()
            with layer("mlp"): x = (x + (x @ w[2 * i + 1]).silu().contiguous()).contiguous()
    return x


# **** off ****

def test_nothing_is_kept_while_tracking_is_off(executed):
    assert layer("a") is layer("b")
    assert span("a") is layer("b")
    with layer("a"): y = normal(4, 4) + 1
    assert not any(isinstance(note, LayerMetadata) for note in all_metadata.get(y.uop, ()))
    y.realize()
    assert set(executed) == {Origin()}


def test_tracking_nests_and_ends_with_an_exception():
    before = own()
    def fails():
        with track_layers():
            with track_layers(): assert ranges.tracking()
            assert ranges.tracking()
            assert not any(a is b for a, b in zip(own()[:3], before, strict=False))
            assert SCACHE.value == 0
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError): fails()


@pytest.mark.parametrize("inside", [False, True])
def test_a_method_that_raised_is_not_noted_for_ever(executed, inside):
    """tinygrad keeps the name of a Tensor method that raises, and then notes no other."""
    def fails():
        with pytest.raises(ZeroDivisionError): tensors._metadata_wrapper(lambda: 1 / 0)()
        assert tensors._METADATA.get() is not None
    try:
        if not inside: fails()
        with track_layers():
            if inside: fails()
            with layer("a"): (normal(4, 4) + 1).realize()
    finally: tensors._METADATA.set(None)
    assert (executed[-1].layer, executed[-1].op) == ("a", "__add__")


def test_a_layer_ends_with_an_exception(executed):
    def fails():
        with layer("a"): raise ZeroDivisionError
    with track_layers():
        with pytest.raises(ZeroDivisionError): fails()
        with layer("b"): (normal(4, 4) + 1).realize()
    assert executed[-1].layer == "b"


# **** every kernel ****

@pytest.mark.sampled(1)
def test_an_eager_model(on, executed):
    x, w = normal(16, 64), weights()
    wanted = model(x, w).numpy()
    executed.clear()
    with track_layers(): found = model(x, w).realize()
    assert {each.layer for each in executed} == PARTS
    layers = [each.layer for each in executed]
    assert layers == sorted(layers)  # in the order of the model
    attentions = {f"layers.{i}.attention" for i in range(3)}
    for part in ("mean", "softmax", "__matmul__"):
        assert {each.layer for each in executed if each.op == part} >= attentions
    if on == "EMU":  # the sum that both the product and the result take; a CPU's kernels make it anew
        assert {each.layer for each in executed if each.op == "__add__"} >= attentions
    np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.sampled(1)
def test_a_captured_model_says_so_forever(on, executed):
    x, w = normal(16, 64), weights()
    wanted, step = model(x, w).numpy(), TinyJit(lambda x: model(x, w).realize())
    with track_layers():
        for _ in range(2): step(x)
    executed.clear()
    found = step(x)
    assert {each.layer for each in executed} == PARTS
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_calls_that_share_memory_are_told_apart(executed):
    """The same kernel in the same places of the arena, in one layer after the other: two calls, not one."""
    x = normal(16, 64)
    def twice():
        y = x
        for i in range(4):
            with layer(str(i)): y = (y * 2).contiguous()
        return y
    with track_layers(): twice().realize()
    assert [each.layer for each in executed[-4:]] == list("0123")


def test_a_function_and_a_variable(executed):
    x, w = normal(16, 64), normal(64, 64, seed=1)
    @function
    def inside(x: Tensor, w: Tensor) -> Tensor:
        with layer("inside"): return (x @ w).relu().contiguous()
    with track_layers():
        with layer("outside"): inside(x, w).sum(0).realize()
        assert {each.layer for each in executed if each.op == "__matmul__"} == {"outside.inside"}
        executed.clear()
        with layer("rows"): (x[:ROWS.bind(5)] @ w).softmax(-1).sum(0).realize()
    assert {each.layer for each in executed} == {"rows"}


def test_a_pickle_of_what_was_tracked_needs_no_package_but_tinygrad():
    """Nodes are shared: a weight may have the constants of a graph that was tracked."""
    with track_layers(), layer("layers.0"): made = Tensor([1.0, 2.0]) * 3
    assert all_metadata[made.uop] == (LayerMetadata("__mul__", False, "layers.0"),)
    pickled = pickle.dumps(made)
    assert b"tinygrad_nv" not in pickled
    del made
    assert (pickle.loads(pickled) + 0).tolist() == [3.0, 6.0]


@pytest.mark.sampled(1)
def test_gradients_belong_to_the_layer_of_what_they_are_of(on, executed):
    x, w = normal(16, 64), weights()[:2]
    with track_layers():
        y = x
        for i in range(2):
            with layer(str(i)): y = (y @ w[i]).relu().contiguous()
        Tensor.realize(*y.sum().gradient(*w))
    assert {each.layer for each in executed if each.op == "__matmul__ bw"} == {"0", "1"}
    assert {each.layer for each in executed if each.op == "relu bw"} <= {"0", "1"}
    assert Origin("1", "__matmul__ bw") in executed


def test_a_program_of_the_user(executed):
    text = "void twice(float* restrict out, const float* restrict x) {"
    text += "for (int i = 0; i < 4; i++) out[i] = 2 * x[i]; }"
    x = Tensor([1.0, 2, 3, 4], device="CPU").realize()
    with track_layers(), layer("mine"):
        y = Tensor(program("twice", text, "CPU", [Output((4,), x.dtype)], [(x + 1).contiguous().uop])[0])
        assert y.tolist() == [4, 6, 8, 10]
    assert executed[0] == Origin("mine", "__add__")


@pytest.mark.sampled(1)
def test_explain_has_a_column_while_layers_are_tracked(on):
    x, w = normal(16, 64), weights()
    with track_layers(): lowering = explain(model(x, w))
    assert {k.layer for k in lowering.kernels} == PARTS
    table = str(lowering).splitlines()
    assert "layer" in table[0].split()
    assert "6 kernels × 3:" in table, "equal layers are one block, under the name of the first"
    assert any("layers.0.mlp" in line for line in table)
    assert "layer" not in str(explain(model(x, w))).splitlines()[0].split()


# **** what must not change ****

@pytest.mark.sampled(1)
def test_equal_layers_share_kernels_with_and_without_tracking(on):
    x, w = normal(16, 64), weights()
    model(x, w).realize()
    made = len(to_program_cache)
    with track_layers(): model(x, w).realize()
    with track_layers(), layer("other"): model(x, w).realize()
    assert len(to_program_cache) == made


def test_schedules_of_others_are_not_what_a_layer_gets(executed):
    """Two layers of the same shapes, each realized on its own: what is cached of one says nothing of both."""
    w = weights()
    with track_layers():
        for i in range(4):
            with layer(f"layers.{i}"): (normal(16, 64, seed=i) @ w[i]).relu().realize()
    assert [each.layer for each in executed if each.op in ("__matmul__", "relu")][::-1][:1] == ["layers.3"]
    assert {each.layer for each in executed if each.layer} == {f"layers.{i}" for i in range(4)}
    counts = Counter(each.layer for each in executed if each.layer)
    assert len(set(counts.values())) == 1


# **** NVTX ****

class FakeNVTX(types.ModuleType):
    """Ranges as they were pushed, each with those around it."""

    def __init__(self):
        super().__init__("nvtx")
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def push_range(self, message, domain):
        assert domain == "tinygrad_nv"
        self.open.append(message)
        self.seen.append(tuple(self.open))

    def pop_range(self, domain): self.open.pop()


@pytest.fixture
def nvtx(monkeypatch):
    fake = FakeNVTX()
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.setenv("NV_NVTX", "1")
    ranges.enable_nvtx()
    yield fake
    ranges.disable_nvtx()
    assert not fake.open


def test_ranges_around_eager_launches_copies_and_graphs(nvtx):
    x, w = normal(16, 64), weights()
    step = TinyJit(lambda x: model(x, w).realize())
    step(x)
    eager = [one[-1] for one in nvtx.seen]
    assert any(name.startswith("layers.1.attention · ") for name in eager)
    assert any(name.startswith("copy ") for name in eager)
    step(x)
    nvtx.seen.clear()
    with span("decode"): step(x)
    assert [one[0] for one in nvtx.seen] == ["decode"] * len(nvtx.seen)
    assert any(one[-1].startswith("graph of ") for one in nvtx.seen)
    assert ranges.title(step.captured.linear.src[0]) == nvtx.seen[1][-1]


def test_a_graph_of_one_layer_is_named_after_it(nvtx):
    x, w = normal(16, 64), weights()
    def one(x: Tensor) -> Tensor:
        with layer("layers.7"):
            with layer("up"): x = (x @ w[0]).relu().contiguous()
            with layer("down"): return (x @ w[1]).softmax(-1).realize()
    step = TinyJit(one)
    for _ in range(3): step(x)
    assert nvtx.seen[-1][-1].startswith("layers.7 · graph of ")


def test_a_range_ends_with_an_exception(nvtx):
    def fails():
        with span("prefill 16"): raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError): fails()
    assert nvtx.seen == [("prefill 16",)]


def test_without_the_setting_nvtx_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.delenv("NV_NVTX", raising=False)
    ranges.enable_nvtx()
    assert not hooks.is_watched()
