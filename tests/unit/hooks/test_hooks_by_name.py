"""Devices and custom functions by name. test_upstream_patch.py runs this again on a patched tinygrad."""
import os

import numpy as np
import pytest
from tinygrad.engine import jit, realize
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import Context, Device, Tensor, TinyJit, Variable, explain, function, hooks
from tinygrad_nv.errors import HookError
from tinygrad_nv.hooks import devices as hook_devices
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.tile.launch import LaunchConfig

ROWS = Variable("rows", 1, 16)


@pytest.fixture(autouse=True)
def as_found():
    """Every test starts with nothing of its own registered, and must leave it so."""
    hooks.load_later()
    tables = hooks._compiles, hooks._functions, hook_devices._devices
    before = [dict(table) for table in tables]
    yield
    assert [dict(table) for table in tables] == before


@pytest.fixture(scope="module")
def data(): return Tensor(np.random.default_rng(7).normal(size=(16, 8)).astype(np.float32)).realize()


def close(got, want): np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6)


def test_the_expected_way_into_tinygrad_is_taken():
    assert hooks.official() == (os.environ.get("EXPECT_OFFICIAL") == "1")


# **** devices ****

def toy(factor=1):
    from tinygrad.runtime.ops_cpu import CPUDevice
    class ToyDevice(CPUDevice):
        factor_ = factor
    return ToyDevice


def test_device_by_name_opens_runs_and_goes():
    cpu = Device["CPU"]
    hooks.add_device("toy", cls := toy())
    try:
        assert type(Device["TOY:1"]) is cls
        out = (Tensor([1.0, 2.0, 3.0], device="TOY") * 2 + 1)
        assert out.device == "TOY"
        assert out.tolist() == [3.0, 5.0, 7.0]
        run = TinyJit(lambda x: (x + 1).realize())
        for value in (1.0, 2.0, 3.0):
            assert run(Tensor([value], device="TOY").realize()).tolist() == [value + 1]
        with pytest.raises(HookError, match="device TOY is open already"): hooks.add_device("toy", toy())
        del out, run
    finally: hooks.remove_device("TOY")
    assert Device["CPU"] is cpu
    assert "TOY" not in Device._opened_devices
    with pytest.raises(ModuleNotFoundError, match="ops_toy"): Device["TOY"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [lambda fn: fn, function, lambda fn: function(fn, precompile=True)])
def test_device_by_name_in_functions_under_jit_and_with_variables(wrap):
    hooks.add_device("toy", toy())
    try:
        rows = np.arange(128, dtype=np.float32).reshape(16, 8)
        x, fn = Tensor(rows, device="TOY").realize(), wrap(lambda x: x.sum(0) * 2)
        close(fn(x) + 1, rows.sum(0) * 2 + 1)
        close(fn(x[:ROWS.bind(3)]) + 1, rows[:3].sum(0) * 2 + 1)
        run = TinyJit(lambda x: (fn(x) + 1).realize())
        for n in (4, 5, 6, 7): close(run(x[:ROWS.bind(n)]), rows[:n].sum(0) * 2 + 1)
        assert {kernel.device for kernel in explain(fn(x) + 1).kernels} == {"TOY"}
        del x, run
    finally: hooks.remove_device("TOY")


def test_a_program_gets_the_aux_of_its_kernel(monkeypatch):
    """With a call of a kernel that has some, eager and replayed; None with others, tinygrad's too."""
    opened, text = [], "void twice(float* restrict o, const float* restrict x) { o[0] = 2 * x[0]; }"
    def twice(x):
        return Tensor(program("twice", text, "TOY", [Output((1,), x.dtype)], [x.uop],
                              launch=LaunchConfig(dynamic_smem=512))[0])
    hooks.add_device("toy", toy())
    try:
        runtime = Device["TOY"].runtime
        monkeypatch.setattr(Device["TOY"], "runtime", lambda elf: opened.append(elf) or runtime(elf))
        run = TinyJit(lambda x: (twice(x) + 1).realize())
        for value in (1.0, 2.0, 3.0):
            assert run(Tensor([value], device="TOY").realize()).tolist() == [2 * value + 1]
        assert [elf.aux for elf in opened if elf.name == "twice"] == [LaunchConfig(dynamic_smem=512)]
        assert {elf.aux for elf in opened if elf.name != "twice"} == {None}
        del run
    finally: hooks.remove_device("TOY")


def test_device_name_can_be_given_to_another_class():
    for factor in (1, 2):
        hooks.add_device("toy", toy(factor))
        assert Device["TOY"].factor_ == factor
        hooks.remove_device("toy")


def test_tinygrads_own_device_can_be_replaced_and_comes_back():
    own = Device.get_class("NULL")
    hooks.add_device("NULL", cls := toy())
    assert Device.get_class("NULL") is cls
    hooks.remove_device("NULL")
    assert Device.get_class("NULL") is own


# **** custom functions ****

def fill(ctx, call, ast):
    out, source = (u.buffer.ensure_allocated() for u in realize.resolve_params(call, ctx.input_uops))
    values = np.frombuffer(source.as_memoryview(), np.float32) * float(ast.arg.partition(":")[2])
    out.as_memoryview(force_zero_copy=True).cast("f")[:] = memoryview(values + ctx.var_vals.get("rows", 0))
    return []


@pytest.fixture
def filled():
    hooks.add_custom_function("test_fill", fill, lambda call: ((0,), (1,)))
    yield lambda x, *bound: Tensor(
        (out := UOp.invalids(16, 8, device="CPU", dtype=x.dtype))
        .after(UOp(Ops.CUSTOM_FUNCTION, arg="test_fill:3").call(out, x.uop.contiguous(), *bound)))
    hooks.remove_custom_function("test_fill")


def test_custom_function_eager_and_disabled(data, filled):
    x = data
    close(filled(x) + 1, x.numpy() * 3 + 1)
    with hooks.disabled(): close(filled(x) + 1, x.numpy() * 3 + 1)
    record = explain(filled(x) + 1).kernels[0]
    assert (record.name, record.template) == ("test_fill:3", "test_fill")


@pytest.mark.parametrize("wrap", [lambda fn: fn, function, lambda fn: function(fn, precompile=True)])
def test_custom_function_under_jit_and_in_functions(data, filled, wrap):
    x = data
    fn = wrap(lambda x: filled(x) + 1)
    close(fn(x) * 1, x.numpy() * 3 + 1)
    run = TinyJit(lambda x: (fn(x) * 2).realize())
    for scale in (1, 2, 3, 4): close(run((x * scale).realize()), (x.numpy() * scale * 3 + 1) * 2)


def test_custom_function_is_told_the_variables(data, filled):
    x = data
    run = TinyJit(lambda x, n: (filled(x, n) + x[:n].sum()).realize())
    for rows in (4, 5, 6): close(run(x, ROWS.bind(rows)), x.numpy() * 3 + rows + x.numpy()[:rows].sum())


def test_custom_function_has_a_name_in_debug_output(data, filled, capsys):
    x = data
    with Context(DEBUG=2): (filled(x) + 1).realize()
    assert "test_fill:3" in capsys.readouterr().out


def test_what_a_custom_function_writes_is_not_taken_for_an_input():
    hooks.add_custom_function("writes", lambda ctx, call, ast: [], lambda call: ((0, 2), (1,)))
    call = UOp(Ops.CUSTOM_FUNCTION, arg="writes:x").call()
    own = UOp(Ops.CUSTOM_FUNCTION, arg="unknown").call()
    assert realize.get_call_outs_ins(call) == jit.get_call_outs_ins(call) == ((0, 2), (1,))
    assert realize.get_call_outs_ins(own) == ((), ())
    hooks.remove_custom_function("writes")
    assert realize.get_call_outs_ins(call) == ((), ())


# **** mistakes ****

@pytest.mark.parametrize(("kind", "add"), [
    ("rewrite", lambda: hooks.add_rewrite("twice", lambda sink: sink)),
    ("compile", lambda: hooks.add_compile("twice", lambda linear, inner: inner(linear))),
    ("custom_function", lambda: hooks.add_custom_function("twice", lambda *a: [], lambda call: ((), ()))),
    ("device", lambda: hooks.add_device("twice", toy())),
])
def test_registering_twice_and_removing_nothing_are_errors(kind, add):
    remove = getattr(hooks, f"remove_{kind}")
    with pytest.raises(HookError, match=r"(?i)no .* 'twice' is registered"): remove("twice")
    add()
    with pytest.raises(HookError, match=rf"is registered already\n.*\n.*hooks.remove_{kind}"): add()
    remove("twice")


@pytest.mark.parametrize("name", ["graph", "encdec", "a:b"])
def test_custom_function_names_of_tinygrad_are_refused(name):
    with pytest.raises(HookError, match=f"custom function name '{name}'"):
        hooks.add_custom_function(name, None, None)
