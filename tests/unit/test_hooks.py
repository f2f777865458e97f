"""Rewrites and compile hooks. test_upstream_patch.py runs this again on a tinygrad with the plugin points."""
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import silu_mul
from tinygrad import schedule
from tinygrad.engine import jit, realize
from tinygrad.mixin import gradient
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import (
    Context,
    Tensor,
    TinyJit,
    Variable,
    explain,
    function,
    hook_devices,
    hook_methods,
    hooks,
)
from tinygrad_nv.errors import HookError
from tinygrad_nv.patterns import attention, gemm, named, program

ROOT = Path(__file__).resolve().parents[2]
WHEEL_ONLY = pytest.mark.skipif(hooks.official(), reason="about replaced attributes")
ROWS = Variable("rows", 1, 16)


@pytest.fixture(autouse=True, scope="module")
def without_ours():
    """These tests are about what they register themselves."""
    for name in ("named", "attention", "gemm"): hooks.remove_rewrite(name)
    yield
    hooks.add_rewrite("named", named.rewrite)
    hooks.add_rewrite("attention", attention.rewrite, attention.configuration)
    hooks.add_rewrite("gemm", gemm.rewrite, gemm.configuration)


@pytest.fixture(autouse=True)
def as_found(without_ours):
    """Every test starts enabled with nothing of its own registered, and must leave it so."""
    tables = (hooks._rewrites, hooks._compiles, hooks._executes, hooks._functions, hook_devices._devices,
              hook_methods._methods)
    before = [dict(table) for table in tables], hooks.enabled()
    yield
    assert ([dict(table) for table in tables], hooks.enabled()) == before


@pytest.fixture
def silu():
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    yield
    hooks.remove_rewrite("silu_mul")


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
    hooks.add_rewrite("counted", counted(calls, state), key=lambda: state[0])
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
        return [u.arg.name for c in calls for u in c.toposort() if isinstance(u.arg, program.ProgramKernel)]
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


# **** off means tinygrad's own ****

SCHEDULES = """
from tinygrad import Tensor, function
import json
def schedules():
    x, y, w = Tensor.empty(16, 8), Tensor.empty(16, 8), Tensor.empty(8, 8)
    graphs = [lambda: x.silu() * y, lambda: (x @ w).softmax(),
              lambda: function(lambda a, b: a.silu() * b)(x, y) + 1,
              lambda: function(lambda a, b: a.silu() * b, precompile=True)(x, y) + 1,
              lambda: x.shard(("CPU:0", "CPU:1"), axis=0).sum()]
    return [[call.src[0].key.hex() for call in graph().schedule_linear().src] for graph in graphs]
"""


def child(script, **env):
    path = [p for p in (os.environ.get("PYTHONPATH"), str(ROOT)) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "DEV": "CPU", **env}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def tinygrads_own():
    """Kernels as a process schedules them that never imported tinygrad_nv."""
    alone = "import sys\nprint(json.dumps(schedules()))\nassert 'tinygrad_nv' not in sys.modules"
    return child(f"{SCHEDULES}\n{alone}")


def here():
    scope = {}
    exec(SCHEDULES, scope)
    return scope["schedules"]()


def test_enabled_with_no_rewrite_changes_no_schedule(tinygrads_own): assert here() == tinygrads_own


def test_rewrite_that_matches_nothing_changes_no_schedule(tinygrads_own):
    hooks.add_rewrite("nothing", lambda sink: sink)
    try: assert here() == tinygrads_own
    finally: hooks.remove_rewrite("nothing")


def test_disabled_restores_every_schedule(tinygrads_own, silu):
    assert here() != tinygrads_own
    with hooks.disabled(): assert here() == tinygrads_own
    assert here() != tinygrads_own


def test_removed_rewrite_leaves_nothing(tinygrads_own):
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    hooks.remove_rewrite("silu_mul")
    assert here() == tinygrads_own


def test_NV_0_does_not_enable(tinygrads_own):
    script = SCHEDULES + textwrap.dedent("""
        import sys; sys.path.insert(0, "tests/unit")
        from tinygrad_nv import hooks
        import silu_mul
        hooks.add_rewrite("silu_mul", silu_mul.rewrite)
        print(json.dumps([hooks.enabled(), schedules(), hooks.enable() or schedules()]))""")
    was_enabled, off, on = child(script, NV="0")
    assert (was_enabled, off) == (False, tinygrads_own)
    assert on != tinygrads_own


def test_disabled_nests_and_survives_exceptions():
    assert hooks.enabled()
    def fails():
        with hooks.disabled():
            with hooks.disabled(): assert not hooks.enabled()
            assert not hooks.enabled()
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError): fails()
    assert hooks.enabled()


def test_enable_inside_disabled_ends_with_it():
    hooks.disable()
    with hooks.disabled(): hooks.enable()
    assert not hooks.enabled()
    hooks.enable()


@WHEEL_ONLY
def test_every_attribute_is_put_back():
    def there():
        return [schedule.pm_schedule, realize.pm_exec, realize.get_call_name, realize.get_call_outs_ins,
                jit.get_call_outs_ins, vars(Tensor)["argmax"]]
    own = there()
    hooks.add_rewrite("r", lambda sink: sink)
    hooks.add_method("argmax", lambda theirs, self: theirs(self))
    hooks.add_custom_function("f", lambda ctx, call, ast: [], lambda call: ((0,), ()))
    hooks.add_execute("e", lambda call, ctx, run: run(call, ctx))
    assert not any(a is b for a, b in zip(own, there(), strict=True))
    hooks.remove_rewrite("r")
    hooks.remove_method("argmax")
    hooks.remove_custom_function("f")
    assert realize.pm_exec is not own[1]
    hooks.remove_execute("e")
    assert all(a is b for a, b in zip(own, there(), strict=True))
    with hooks.disabled():
        assert gradient._compact_params.__module__ == "tinygrad.mixin.gradient"
        assert realize.compile_linear is jit.compile_linear
        assert realize.compile_linear.__module__ == "tinygrad.engine.realize"
    assert realize.compile_linear.__module__ == "tinygrad_nv.hooks"
    assert gradient._compact_params.__module__ == "tinygrad_nv.hook_methods"


# **** methods of Tensor ****

def test_a_method_is_ours_while_enabled():
    own = vars(Tensor)["argmax"]
    hooks.add_method("argmax", lambda theirs, self, axis=None: theirs(self, axis=axis) + 100)
    try:
        x = Tensor([[3.0, 1.0], [2.0, 5.0]])
        assert x.argmax(axis=1).tolist() == [100, 101]
        assert Tensor.argmax is not own
        assert (Tensor.argmax.__name__, Tensor.argmax.__doc__) == ("argmax", own.__doc__)
        with hooks.disabled():
            assert Tensor.argmax is own
            assert x.argmax(axis=1).tolist() == [0, 1]
        with pytest.raises(HookError, match="method 'argmax' is registered already"):
            hooks.add_method("argmax", lambda theirs, self: self)
    finally: hooks.remove_method("argmax")
    assert vars(Tensor)["argmax"] is own
    with pytest.raises(HookError, match="no method 'argmax' is registered"): hooks.remove_method("argmax")


def test_a_method_registered_while_disabled_is_ours_from_then_on_only():
    own = vars(Tensor)["argmin"]
    with hooks.disabled():
        hooks.add_method("argmin", lambda theirs, self: "ours")
        assert Tensor.argmin is own
    assert Tensor([1.0]).argmin() == "ours"
    hooks.remove_method("argmin")
    assert Tensor.argmin is own


UNNOTED = """
import json
from tinygrad import Tensor, dtypes
from tinygrad.mixin.rand import RandMixin
own = vars(RandMixin)["dropout"]
from tinygrad_nv import hooks
hooks.add_method("dropout", lambda theirs, self, p=0.5: "ours")
x = Tensor.ones(2)
seen = [x.dropout(), x.uop.dropout(0.1) is x.uop, "dropout" in vars(Tensor)]
hooks.disable()
print(json.dumps([*seen, vars(RandMixin)["dropout"] is own]))
"""


def test_a_method_that_tinygrad_has_elsewhere_and_notes_no_names_of():
    assert child(UNNOTED, TRACEMETA="0") == ["ours", True, False, True]


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


# **** mistakes ****

def test_another_tinygrad_version_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.15.0")
    with pytest.raises(HookError) as caught: hooks.enable()
    assert str(caught.value).splitlines() == ["tinygrad 0.15.0 is installed", "  expected: tinygrad 0.14.0",
                                              "  to fix:   pip install tinygrad==0.14.0"]


@WHEEL_ONLY
def test_a_tinygrad_patched_by_others_is_refused(monkeypatch):
    with hooks.disabled():
        with monkeypatch.context() as patch:
            patch.setattr(schedule, "get_kernel_graph", lambda sink: sink)
            with pytest.raises(HookError, match=r"\.get_kernel_graph has been replaced"): hooks.enable()
        with monkeypatch.context() as patch:
            patch.setattr(jit, "compile_linear", lambda linear: linear)
            with pytest.raises(HookError, match="compile_linear has been replaced by another"): hooks.enable()


@WHEEL_ONLY
def test_a_later_patch_on_ours_is_not_dropped_silently(monkeypatch):
    hooks.add_rewrite("r", lambda sink: sink)
    with monkeypatch.context() as patch:
        patch.setattr(schedule, "pm_schedule", object())
        with pytest.raises(HookError, match="pm_schedule has been replaced after tinygrad_nv did"):
            hooks.remove_rewrite("r")
    hooks.enable()
    assert schedule.pm_schedule.patterns[0][1] is schedule.lower_sink_to_linear
