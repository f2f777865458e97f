"""What hooks replace and leave: off means tinygrad's own, and what others replaced is refused.
test_upstream_patch.py runs this again on a tinygrad with the plugin points."""
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tinygrad import schedule
from tinygrad.engine import jit, realize
from tinygrad.mixin import gradient

from tests.support.patterns import silu_mul
from tinygrad_nv import Tensor, hooks
from tinygrad_nv.errors import HookError

ROOT = Path(__file__).resolve().parents[3]
WHEEL_ONLY = pytest.mark.skipif(hooks.official(), reason="about replaced attributes")
pytestmark = pytest.mark.usefixtures("as_found")


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
        from tests.support.patterns import silu_mul
        from tinygrad_nv import hooks
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
    assert gradient._compact_params.__module__ == "tinygrad_nv.hooks.methods"


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


# **** mistakes ****

def test_another_tinygrad_version_is_refused(monkeypatch):
    monkeypatch.setattr("tinygrad_nv.hooks.replaced.TINYGRAD_VERSION", "0.15.0")
    with pytest.raises(HookError) as caught: hooks.enable()
    assert str(caught.value).splitlines() == ["tinygrad 0.14.0 is installed", "  expected: tinygrad 0.15.0",
                                              "  to fix:   pip install tinygrad==0.15.0"]


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
