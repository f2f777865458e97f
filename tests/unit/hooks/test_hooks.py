"""Rewrites and compile hooks. test_upstream_patch.py runs this again on a tinygrad with the plugin points."""
import os

import numpy as np
import pytest
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, UOp

from tests.support.patterns import silu_mul
from tinygrad_nv import Context, Tensor, TinyJit, Variable, explain, function, hooks
from tinygrad_nv.errors import HookError
from tinygrad_nv.runtime.note import ProgramKernel

pytestmark = pytest.mark.usefixtures("as_found")
ROWS = Variable("rows", 1, 16)


@pytest.fixture(scope="module")
def data():
    x, y = np.random.default_rng(7).normal(size=(2, 16, 8)).astype(np.float32)
    return Tensor(x).realize(), Tensor(y).realize(), (x / (1 + np.exp(-x)) * y)


def close(got, want): np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6)


def names(linear): return [u.arg.name for u in linear.toposort() if u.op is Ops.PROGRAM]


def test_the_expected_way_into_tinygrad_is_taken():
    assert hooks.official() == (os.environ.get("EXPECT_OFFICIAL") == "1")


# **** (a) rewrites, in each of tinygrad's modes ****

@pytest.mark.usefixtures("silu")
def test_rewrite_eager(data):
    x, y, want = data
    out = x.silu() * y
    assert [k.template for k in explain(out).kernels] == ["silu_mul"]
    close(out, want)


@pytest.mark.usefixtures("silu")
def test_rewrite_under_jit(data):
    x, y, want = data
    run = TinyJit(lambda x, y: (x.silu() * y).realize())
    for scale in (1, 2, 3, 4): close(run(x, (y * scale).realize()), want * scale)
    assert names(run.captured.linear) == ["silu_mul"]


@pytest.mark.usefixtures("silu")
@pytest.mark.parametrize("precompile", [False, True])
def test_rewrite_in_function(data, precompile):
    x, y, want = data
    fn = function(lambda x, y: x.silu() * y, precompile=precompile)
    # tinygrad 0.14.0 keeps a precompiled result that is realized directly as GETTUPLE: hence the addition
    assert "silu_mul" in [k.template for k in explain(fn(x, y) + 1).kernels]
    close(fn(x, y) + 1, want + 1)


@pytest.mark.usefixtures("silu")
@pytest.mark.parametrize("precompile", [False, True])
def test_rewrite_in_function_under_jit(data, precompile):
    x, y, want = data
    fn = function(lambda x, y: x.silu() * y, precompile=precompile)
    run = TinyJit(lambda x, y: (fn(x, y) + 1).realize())
    for scale in (1, 2, 3): close(run(x, (y * scale).realize()), want * scale + 1)
    assert "silu_mul" in names(run.captured.linear)


@pytest.mark.usefixtures("silu")
def test_rewrite_with_variable(data):
    x, y, want = data
    for rows in (3, 16, 1):
        n = ROWS.bind(rows)
        out = (x[:n].silu() * y[:n]).sum(0)
        assert [k.template for k in explain(out).kernels] == ["silu_mul", None]
        close(out, want[:rows].sum(0))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("silu")
@pytest.mark.parametrize("wrap", [lambda fn: fn, function, lambda fn: function(fn, precompile=True)])
def test_rewrite_with_variable_under_jit(data, wrap):
    x, y, want = data
    fn = wrap(lambda x, y: (x.silu() * y).sum(0))
    run = TinyJit(lambda x, y: (fn(x, y) + 1).realize())
    for rows in (5, 16, 2, 9):
        close(run(x[:ROWS.bind(rows)], y[:ROWS.bind(rows)]), want[:rows].sum(0) + 1)
    assert "silu_mul" in names(run.captured.linear)


@pytest.mark.usefixtures("silu")
def test_rewrite_sees_each_shard(data):
    x, y, want = data
    x, y = (t.shard(("CPU:0", "CPU:1"), axis=0).realize() for t in (x, y))
    out = x.silu() * y
    records = explain(out).kernels
    assert [(k.template, k.device) for k in records] == [("silu_mul", "CPU"), ("silu_mul", "CPU:1")]
    close(out, want)


@pytest.mark.usefixtures("silu")
def test_rewrite_writes_into_the_target_of_an_assign_without_a_copy(data):
    x, y, want = data
    target = Tensor.zeros(16, 8).contiguous().realize()
    target.assign(x.silu() * y)
    assert [k.template for k in explain(target).kernels] == ["silu_mul"]
    close(target, want)


@pytest.mark.usefixtures("silu")
def test_rewrite_keeps_its_own_storage_when_it_reads_the_target(data):
    x, y, want = data
    target = Tensor.zeros(16, 8).contiguous().assign(x).realize()
    target.assign(target.silu() * y)
    assert [k.template for k in explain(target).kernels] == ["silu_mul", None]
    close(target, want)


# **** (a) caches, and what was captured ****

def counted(calls, state):
    def fn(sink):
        calls.append(state[0])
        return sink
    return fn


def test_schedules_are_cached_for_each_key_of_a_rewrite():
    calls, state = [], [1]
    hooks.add_rewrite("counted", counted(calls, state), lambda: state[0])
    try:
        def scheduled(): (Tensor.empty(5, 3) * 2).schedule_linear()
        scheduled(), scheduled()
        assert calls == [1]
        state[0] = 2
        scheduled(), scheduled()
        assert calls == [1, 2]
        state[0] = 1
        scheduled()
        assert calls == [1, 2]
    finally: hooks.remove_rewrite("counted")


def test_another_rewrite_under_the_same_name_gets_no_cached_schedule():
    calls = []
    for expected in (1, 2):
        hooks.add_rewrite("counted", counted(calls, [0]))
        (Tensor.empty(5, 4) * 2).schedule_linear()
        hooks.remove_rewrite("counted")
        assert len(calls) == expected


def test_rewrite_registered_after_the_same_program_was_scheduled_applies(data):
    x, y, _ = data
    def scheduled():
        calls = (x.silu() * y + 3).schedule_linear().src
        return [u.arg.name for c in calls for u in c.toposort() if isinstance(u.arg, ProgramKernel)]
    assert scheduled() == []
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    assert "silu_mul" in scheduled()
    hooks.remove_rewrite("silu_mul")
    assert scheduled() == []


def test_captured_jit_keeps_what_it_captured(data):
    x, y, want = data
    plain, ours = (TinyJit(lambda x, y: (x.silu() * y).realize()) for _ in range(2))
    for _ in range(2): plain(x, y)
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    for _ in range(2): ours(x, y)
    close(plain(x, y), want)
    hooks.remove_rewrite("silu_mul")
    with hooks.disabled(): close(ours(x, y), want)
    assert names(ours.captured.linear) == ["silu_mul"]
    assert "silu_mul" not in names(plain.captured.linear)


def test_rewrites_run_in_order_of_registration():
    calls = []
    for name in "ab": hooks.add_rewrite(name, lambda sink, name=name: calls.append(name) or sink)
    (Tensor.empty(3, 5) * 2).schedule_linear()
    for name in "ab": hooks.remove_rewrite(name)
    assert calls == ["a", "b"]


def test_invalid_graph_of_a_rewrite_is_blamed_on_it(monkeypatch):
    monkeypatch.setenv("NV_SPEC", "1")
    def break_it(sink): return sink.replace(src=(*sink.src, UOp(Ops.SOURCE, src=sink.src, arg="")))
    hooks.add_rewrite("breaks", break_it)
    try:
        with pytest.raises(HookError, match="rewrite 'breaks' made a graph"):
            (Tensor.empty(2, 5) * 2).schedule_linear()
    finally: hooks.remove_rewrite("breaks")
    assert not hooks.rewriting()


# **** around the execution of calls ****

def test_an_execute_sees_eager_calls_and_replays_and_is_nested():
    x, seen = Tensor([1.0, 2.0, 3.0]).realize(), []
    def outer(call, ctx, run):
        seen.append(("outer", call.src[0].op))
        return run(call, ctx)
    def inner(call, ctx, run):
        seen.append(("inner", ctx.jit))
        return run(call, ctx)
    jitted = TinyJit(lambda x: ((x * 2).contiguous().realize() + 1).realize())
    hooks.add_execute("outer", outer)
    hooks.add_execute("inner", inner)
    try:
        with hooks.disabled(): assert (x + 5).tolist() == [6, 7, 8]
        assert seen[:2] == [("outer", Ops.PROGRAM), ("inner", False)]
        for _ in range(2): jitted(x)
        seen.clear()
        assert jitted(x).tolist() == [3, 5, 7]
        assert seen[1] == ("inner", True)
    finally:
        hooks.remove_execute("outer")
        hooks.remove_execute("inner")
    seen.clear()
    assert (x + 6).tolist() == [7, 8, 9]
    assert not seen
    with pytest.raises(HookError, match="no execute 'outer' is registered"): hooks.remove_execute("outer")


# **** (b) around compile_linear ****

def test_compile_hooks_nest_in_order_and_see_beam(data):
    x, _, _ = data
    seen = []
    def outer(linear, inner):
        seen.append(("outer", inner.beam, all(c.src[0].op is Ops.PROGRAM for c in linear.src)))
        done = inner(linear)
        seen.append(("outer", inner.beam, all(c.src[0].op is Ops.PROGRAM for c in done.src)))
        return done
    def nested(linear, inner):
        seen.append(("nested", inner.beam, False))
        return inner(linear)
    hooks.add_compile("outer", outer)
    hooks.add_compile("nested", nested)
    try:
        (x + 7).realize()
        assert seen == [("outer", 0, False), ("nested", 0, False), ("outer", 0, True)]
        seen.clear()
        with hooks.disabled(): (x + 7).realize()
        assert seen == []
    finally:
        hooks.remove_compile("nested")
        hooks.remove_compile("outer")


def test_compile_hook_is_told_the_beam():
    beams = []
    hooks.add_compile("beam", lambda linear, inner: beams.append(inner.beam) or linear)
    try:
        for beam in (None, 3): realize.compile_linear(UOp(Ops.LINEAR), beam)
        with Context(BEAM=2): realize.compile_linear(UOp(Ops.LINEAR))
    finally: hooks.remove_compile("beam")
    assert beams == [0, 3, 2]


@pytest.mark.parametrize("wrap", [lambda fn: fn, function, lambda fn: function(fn, precompile=True)])
def test_compile_hook_runs_for_eager_and_capture_but_not_replay(data, wrap):
    x, _, _ = data
    compiled = []
    fn = wrap(lambda x: (x * 3).sum(0))
    run = TinyJit(lambda x: (fn(x) + 1).realize())
    hooks.add_compile("seen", lambda linear, inner: compiled.append(len(linear.src)) or inner(linear))
    try:
        for rows in (4, 5, 6, 7): run(x[:ROWS.bind(rows)])
    finally: hooks.remove_compile("seen")
    assert len([n for n in compiled if n]) == 2
    close(run(x[:ROWS.bind(3)]), x.numpy()[:3].sum(0) * 3 + 1)
