"""explain(): says what will run, and leaves everything as it was."""
import gc

import numpy as np
import pytest
from tinygrad import schedule
from tinygrad.dtype import dtypes
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, buffers

from tests.support.patterns import silu_mul
from tinygrad_nv import Context, GlobalCounters, Tensor, TinyJit, Variable, explain, function, hooks
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.explain import KernelRecord, Lowering
from tinygrad_nv.hooks import rewrites as hook_rewrites
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.note import Note

ROWS = Variable("rows", 1, 16)


@pytest.fixture(scope="module", autouse=True)
def silu():
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    yield
    hooks.remove_rewrite("silu_mul")


@pytest.fixture(scope="module")
def data():
    x, y = np.random.default_rng(3).normal(size=(2, 16, 8)).astype(np.float32)
    return Tensor(x).realize(), Tensor(y).realize()


GRAPHS = {
    "ours": lambda x, y: x.silu() * y,
    "matmul": lambda x, y: x @ y.T,
    "softmax": lambda x, y: x.softmax(),
    "mixed": lambda x, y: ((x @ y.T).softmax() @ x).silu() * y,
    "function": lambda x, y: function(lambda a, b: a.silu() * b)(x, y).sum(),
    "precompiled": lambda x, y: function(lambda a, b: a.silu() * b, precompile=True)(x, y) + 1,
    "from the host": lambda x, y: Tensor([1.0, 2.0, 3.0]) * x.sum(),
    "two devices": lambda x, y: (x.shard(("CPU:0", "CPU:1"), axis=0) * 2).sum(),
    "symbolic": lambda x, y: (x[:ROWS.bind(5)].silu() * y[:ROWS.bind(5)]).sum(0),
    "symbolic, tinygrad's": lambda x, y: x[:ROWS.bind(5)].softmax().sum(0),
    "assign": lambda x, y: Tensor.zeros(16, 8).contiguous().assign(x.silu() * y),
}
graphs = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)


# **** what it says is what happens ****

@pytest.mark.sampled(3)
@graphs
def test_counts_are_those_of_the_run(data, graph):
    out = graph(*data)
    lowering = explain(out)
    GlobalCounters.reset()
    out.realize()
    assert (len(lowering.kernels), lowering.flops, lowering.bytes) == (
        GlobalCounters.kernel_count, GlobalCounters.global_ops, GlobalCounters.global_mem)
    assert all(type(n) is int for k in lowering.kernels for n in (k.flops, k.bytes))


@pytest.mark.sampled(1)
@graphs
def test_names_are_those_of_the_run(data, graph, capsys):
    out = graph(*data)
    explained = [k.name for k in explain(out).kernels]
    capsys.readouterr()
    with Context(DEBUG=2, NO_COLOR=1): out.realize()
    printed = capsys.readouterr().out
    at = 0
    for name in explained:
        at = ansistrip(printed).index(name[:30], at) + 1


def test_matmul_is_counted_as_two_operations_a_multiply_add():
    a, b = Tensor.empty(64, 128), Tensor.empty(128, 32)
    kernel, = explain(a @ b).kernels
    assert kernel.flops == 2 * 64 * 128 * 32
    assert kernel.bytes == 4 * (64 * 128 + 128 * 32 + 64 * 32)


def test_template_spec_schedule_and_reason_come_from_the_note(data):
    x, y = data
    assert explain(x.silu() * y).kernels == [KernelRecord(
        "silu_mul", "silu_mul", "x.silu() * y", "CPU", ("float32", (16, 8)), "one loop", 6 * 128, 12 * 128)]


def test_variables_count_with_the_values_they_are_bound_to(data):
    x, y = data
    for rows in (2, 9):
        ours = explain((x[:ROWS.bind(rows)].silu() * y[:ROWS.bind(rows)]).sum(0)).kernels[0]
        assert (ours.template, ours.flops, ours.bytes) == ("silu_mul", 6 * 8 * rows, 12 * 8 * rows)


# **** why not ****

def test_nothing_matched(data): assert explain(data[0] + 1).kernels[0].reason == "no pattern matched"


def test_near_miss_is_told_with_the_kernel_it_ended_in(data):
    x, y = data
    lowering = explain(x.sum(0).contiguous(), x.silu() * y[0])
    reasons = sorted(k.reason for k in lowering.kernels)
    assert reasons == ["no pattern matched", "silu_mul: operands are broadcast"]
    assert lowering.notes == ()


def test_near_miss_that_fits_no_kernel_is_a_note(data):
    x, y = data
    lowering = explain((x.half().silu() * y.half()).sum())
    assert [k.reason for k in lowering.kernels] == ["no pattern matched"]
    assert lowering.notes == ("silu_mul: dtype half is not float32",)
    assert "note: silu_mul: dtype half is not float32" in str(lowering)


def test_near_misses_are_heard_although_the_schedule_is_cached(data):
    x, y = data
    (x.silu() * y[0]).realize()
    assert explain(x.silu() * y[0]).kernels[0].reason == "silu_mul: operands are broadcast"


def test_disabled(data):
    x, y = data
    with hooks.disabled(): kernel, = explain(x.silu() * y).kernels
    assert (kernel.template, kernel.reason) == (None, "tinygrad_nv is disabled")


def test_copies_are_records_too(data):
    copy = explain(Tensor([1.0, 2.0, 3.0]) + 1).kernels[0]
    assert (copy.template, copy.reason, copy.flops, copy.bytes) == (None, "copy", 0, 12)
    assert copy.name.startswith("copy")
    assert "PYTHON" in copy.name


def test_program_without_a_note_is_the_users(data):
    x, _ = data
    source = "void twice(float* restrict o, const float* restrict a) { for (int i=0;i<128;i++) o[i]=2*a[i]; }"
    out = Tensor(program("twice", source, "CPU", [Output((16, 8), dtypes.float)], [x.uop])[0])
    kernel, = explain(out).kernels
    assert (kernel.name, kernel.template, kernel.bytes) == ("twice", None, 1024)
    assert kernel.reason == "a program of the user"
    np.testing.assert_array_equal(out.numpy(), x.numpy() * 2)


# **** it realizes nothing ****

@pytest.mark.sampled(1)
@graphs
def test_nothing_is_changed(data, graph):
    want = graph(*data).numpy()
    out = graph(*data)
    GlobalCounters.reset()
    def state(): return ([t.uop for t in (out, *data)], len(buffers), dict(schedule.schedule_cache),
                         dict(hook_rewrites.configured_cache), dict(vars(GlobalCounters)))
    gc.collect()  # or buffers that other tests left in cycles are freed meanwhile, and mem_used falls
    before = state()
    first = explain(out)
    assert state() == before
    assert not out.uop.is_realized
    assert explain(out) == first
    np.testing.assert_array_equal(out.numpy(), want)


def test_realized_and_constant_tensors_have_no_kernels(data):
    assert explain(data[0]) == explain(Tensor(3.0)) == explain() == Lowering([])
    assert (explain(data[0]).flops, explain(data[0]).bytes) == (0, 0)


def test_several_tensors_share_their_kernels(data):
    x, _ = data
    shared = (x @ x.T).contiguous()
    assert len(explain(shared + 1, shared * 2).kernels) == len(explain(shared).kernels) + 2


def test_in_a_jit_capture_nothing_is_added_to_it(data):
    x, _ = data
    seen = []
    def step(x):
        out = x.sum(0)
        seen.append(len(explain(out).kernels))
        return out.realize()
    run = TinyJit(step)
    for _ in range(3): np.testing.assert_allclose(run(x).numpy(), x.numpy().sum(0), rtol=1e-5)
    assert seen == [1, 1]
    assert len([u for u in run.captured.linear.toposort() if u.op is Ops.PROGRAM]) == 1


def test_an_error_in_a_rewrite_leaves_no_trace(data, monkeypatch):
    x, _ = data
    monkeypatch.setenv("NV_SPEC", "2")
    with pytest.raises(ConfigError, match="NV_SPEC=2"): explain(x + 5)
    monkeypatch.delenv("NV_SPEC")
    assert len(explain(x + 5).kernels) == 1


# **** as text ****

def test_table_is_aligned_and_has_totals():
    lowering = Lowering((KernelRecord("gemm", "gemm", "contraction", "CUDA", None, None, 2_000_000, 3_000),
                         KernelRecord("r_16", None, "no pattern matched", "CUDA", None, None, 16, 64)),
                        ("attention: K stride",))
    assert str(lowering).splitlines() == [
        "kernel    template  device      flops  bytes  why",
        "gemm      gemm      CUDA    2,000,000  3,000  contraction",
        "r_16      -         CUDA           16     64  no pattern matched",
        "2 in all  1 ours            2,000,016  3,064",
        "note: attention: K stride"]


def test_the_padding_of_copies_is_not_in_the_table():
    copy = KernelRecord("copy        8 B,     EMU <- CPU", None, "copy", "EMU", None, None, 0, 8)
    assert str(Lowering([copy])).splitlines()[1].startswith("copy 8 B, EMU <- CPU  -  ")


def test_records_are_frozen():
    with pytest.raises(AttributeError): Lowering(()).kernels = ()
    record = KernelRecord("k", None, "", "CPU", Note("t"), None, 0, 0)
    with pytest.raises(AttributeError): record.name = "other"
