"""Programs in the graph: outputs, storage, variables, and what tinygrad is told about them. What patterns
ask of targets: a schedule, or why there is none, and kernels, made once."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops

from tests.support.patterns import silu_mul
from tinygrad_nv import Context, Device, GlobalCounters, Tensor, TinyJit, Variable, explain, function, hooks
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.program import Output, call, program
from tinygrad_nv.patterns.target import Chosen, choose
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.kernel import Scratch
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, FilterSpec, Number
from tinygrad_nv.tile.template import GPU

ROWS = Variable("rows", 1, 16)
SPLIT = """
void split(float* restrict sum, int* restrict sign, const float* restrict a, const float* restrict b) {
  for (int i = 0; i < 128; i++) { sum[i] = a[i] + b[i]; sign[i] = (a[i] > b[i]) - (a[i] < b[i]); }
}"""
APPEND = """
void append(float* restrict cache, const float* restrict row, int at) {
  for (int i = 0; i < 8; i++) cache[at * 8 + i] = row[i];
}"""
TWICE = """
void twice(float* restrict o, const float* restrict a, int n) {
  for (int i = 0; i < n * 8; i++) o[i] = 2 * a[i];
}"""


@pytest.fixture(scope="module")
def data():
    a, b = np.random.default_rng(11).normal(size=(2, 16, 8)).astype(np.float32)
    return Tensor(a).realize(), Tensor(b).realize()


@pytest.fixture
def silu():
    hooks.add_rewrite("silu_mul", silu_mul.rewrite)
    yield
    hooks.remove_rewrite("silu_mul")


def split(a, b):
    outputs = program("split", SPLIT, "CPU", [Output((16, 8), dtypes.float), Output((16, 8), dtypes.int)],
                      [a.uop, b.uop], note=Note("split"))
    return tuple(Tensor(u) for u in outputs)


def append(cache, row, at):
    return Tensor(program("append", APPEND, "CPU", [cache.uop], [row.uop], variables=[at])[0])


def twice(x, n, **options):
    return Tensor(program("twice", TWICE, "CPU", [Output((16, 8), dtypes.float)], [x.uop], variables=[n],
                          flops=8 * n, nbytes=64 * n, note=Note("twice"), **options)[0])


def test_several_outputs_are_made_by_one_call(data):
    a, b = data
    total, sign = split(a, b)
    assert [k.template for k in explain(total, sign).kernels] == ["split"]
    Tensor.realize(total, sign)
    np.testing.assert_array_equal(total.numpy(), a.numpy() + b.numpy())
    np.testing.assert_array_equal(sign.numpy(), np.sign(a.numpy() - b.numpy()))


@pytest.mark.parametrize("precompile", [False, True])
def test_several_outputs_in_a_function_under_jit(data, precompile):
    a, b = data
    fn = function(split, precompile=precompile)
    run = TinyJit(lambda a, b: (lambda total, sign: (total * sign).realize())(*fn(a, b)))
    for scale in (1, 2, 3, 4):
        got = run((a * scale).realize(), b).numpy()
        x, y = a.numpy() * scale, b.numpy()
        np.testing.assert_array_equal(got, (x + y) * np.sign(x - y))


@dataclass(frozen=True)
class Halves:
    """sum = first + second, the two kept between two kernels: the second output is scratch."""
    kernels = (
        CPUKernel("halves", """void halves(float* sum, float* kept, int* sign, const float* a) {
          for (int i = 0; i < 8; i++) { sum[i] = a[i]; kept[i] = a[i + 8]; sign[i] = 0; } }"""),
        CPUKernel("joined", """void joined(float* sum, float* kept, int* sign, const float* a) {
          for (int i = 0; i < 8; i++) { sum[i] += kept[i]; sign[i] = (sum[i] > 0) - (sum[i] < 0); } }"""))
    scratch = (Scratch(dtypes.float, 8, at=1),)


def test_what_a_template_makes_is_called_with_its_scratch():
    """Scratch has its place among the outputs, and is none of them; the second kernel goes on with both."""
    x = np.random.default_rng(3).normal(size=16).astype(np.float32)
    outputs = call(Halves(), "CPU", [Output((8,), dtypes.float), Output((8,), dtypes.int)],
                     [Tensor(x).realize().uop], flops=8, note=Note("halves"))
    total, sign = map(Tensor, outputs)
    lowering = explain(total, sign)
    assert [(k.template, k.flops, k.bytes) for k in lowering.kernels] == [("halves", 8, 160),
                                                                          ("combine", 0, 32)]
    Tensor.realize(total, sign)
    np.testing.assert_array_equal(total.numpy(), x[:8] + x[8:])
    np.testing.assert_array_equal(sign.numpy(), np.sign(x[:8] + x[8:]))


def test_output_into_given_storage_keeps_the_rest_of_it(data):
    a, b = data
    cache = Tensor(a.numpy()).realize()
    run = TinyJit(lambda cache, row, at: append(cache, row, at).realize())
    want = a.numpy().copy()
    for at in (3, 1, 7, 15, 9):
        run(cache, Tensor(b.numpy()[at]).realize(), ROWS.bind(at))
        want[at] = b.numpy()[at]
    np.testing.assert_array_equal(cache.numpy(), want)


def test_what_is_written_and_read_is_declared(data):
    a, b = data
    seen = {}
    def record(linear, inner):
        linear = inner(linear)
        seen.update({c.src[0].arg.name: c.src[0].arg for c in linear.src if c.src[0].op is Ops.PROGRAM})
        return linear
    hooks.add_compile("record", record)
    try:
        Tensor.realize(*split(a, b))
        append(Tensor(a.numpy()).realize(), b[0].contiguous(), ROWS.bind(1)).realize()
    finally: hooks.remove_compile("record")
    assert (seen["split"].outs, seen["split"].ins, seen["split"].globals) == ((0, 1), (2, 3), (0, 1, 2, 3))
    assert (seen["append"].outs, seen["append"].ins) == ((0,), (0, 1))


CASES = {"whole": (lambda x: x, 0), "reshaped": (lambda x: x.reshape(8, 16), 0),
         "last rows": (lambda x: x[2:], 0), "first rows": (lambda x: x[:ROWS.bind(4)], 1),
         "transposed": (lambda x: x.T, 1), "columns": (lambda x: x[:, :4], 1),
         "flipped": (lambda x: x[:, ::-1], 1), "computed": (lambda x: x + 1, 1)}


@pytest.mark.parametrize(("view", "copies"), CASES.values(), ids=CASES)
def test_inputs_are_copied_only_where_they_do_not_lie_in_memory_in_order(data, view, copies):
    x = view(data[0])
    out = twice(x, ROWS.bind(4))
    assert [k.name == "twice" for k in explain(out).kernels] == [False] * copies + [True]
    rows = x.contiguous() if isinstance(x.shape[0], int) else data[0]
    np.testing.assert_array_equal(out.numpy().flatten()[:32], 2 * rows.numpy().flatten()[:32])


@pytest.mark.usefixtures("silu")
def test_a_rewrite_takes_the_first_rows_of_a_buffer_without_a_copy(data):
    x, y = (t[:ROWS.bind(4)] for t in data)
    assert [k.template for k in explain((x.silu() * y).sum(0)).kernels] == ["silu_mul", None]
    x, y = (t[:, :4] for t in data)
    assert [k.template for k in explain(x.silu() * y).kernels] == [None, None, "silu_mul"]


def test_counts_follow_the_variables(data):
    a, _ = data
    for rows in (2, 16):
        out = twice(a, ROWS.bind(rows))
        kernel, = explain(out).kernels
        GlobalCounters.reset()
        out.realize()
        assert (kernel.flops, kernel.bytes) == (8 * rows, 64 * rows)
        assert (GlobalCounters.global_ops, GlobalCounters.global_mem) == (8 * rows, 64 * rows)


def test_counts_are_an_upper_bound_while_disabled(data):
    a, _ = data
    out = twice(a, ROWS.bind(2))
    GlobalCounters.reset()
    with hooks.disabled(): out.realize()
    assert (GlobalCounters.global_ops, GlobalCounters.global_mem) == (8 * 16, 64 * 16)
    np.testing.assert_array_equal(out.numpy()[:2], 2 * a.numpy()[:2])


@pytest.mark.parametrize("program", [
    lambda a, n: twice(a, n), lambda a, n: (a[:n].silu() * a[:n]).sum(0),
    lambda a, n: function(lambda a, n: (a[:n].silu() * a[:n]).sum(0))(a, n)])
def test_variables_reach_the_kernel_as_int32_under_their_own_names(data, silu, program):
    seen = []
    hooks.add_compile("record", lambda linear, inner: seen.append(done := inner(linear)) or done)
    try: program(data[0], ROWS.bind(2)).realize()
    finally: hooks.remove_compile("record")
    programs = [c.src[0].arg for c in seen[0].src]
    assert {(v.expr, v.dtype) for p in programs for v in p.vars} == {("rows", dtypes.int32)}
    assert programs[0].name in ("twice", "silu_mul")


def test_grid_and_block_become_launch_dimensions(data):
    a, _ = data
    out = twice(a, ROWS.bind(3), grid=(ROWS * 2, 5), block=(32, 2))
    linear, var_vals = out.linear_with_vars()
    from tinygrad.engine.realize import compile_linear
    info = compile_linear(linear).src[0].src[0].arg
    assert info.launch_dims(var_vals) == ((6, 5, 1), (32, 2, 1))


def test_given_binary_is_not_compiled_again(data):
    a, _ = data
    lib = Device["CPU"].compiler.compile(TWICE)
    out = Tensor(program("twice", "not C at all", "CPU", [Output((16, 8), dtypes.float)], [a.uop],
                         variables=[ROWS.bind(16)], binary=lib)[0])
    np.testing.assert_array_equal(out.numpy(), 2 * a.numpy())


def test_the_same_program_is_scheduled_once(data):
    a, b = data
    with Context(DEBUG=0):
        Tensor.realize(*split(a, b))
        keys = [split(a, b)[0].schedule_linear().src[0].src[0].key for _ in range(2)]
    assert keys[0] == keys[1]


HOPPER = GPU("sm_90a", 132)
TOKENS = Tokens(dtypes.int32, (7,), (1,))
TABLE = EmbeddingSpec(100, 64, dtypes.float32, TOKENS)
SPECS = (dense(64, 64, 64), TABLE, ChoiceSpec(2, 1 << 17), FilterSpec(2, 1000, Number.top_k, True))


@pytest.fixture(params=["gpu", "cpu"])
def target(request: pytest.FixtureRequest) -> GPU | CPU: return HOPPER if request.param == "gpu" else host()


@pytest.mark.parametrize("spec", SPECS, ids=lambda each: type(each).__name__)
def test_a_spec_becomes_kernels_that_equal_choices_share(target: GPU | CPU, spec: Any):
    one, other = choose(spec, target), choose(spec, target)
    assert (one.spec, one.target, one.schedule.kind) == (spec, target, target.kind)
    assert one.build() is other.build()


def test_other_integers_are_other_kernels():
    one, integers = choose(dense(64, 64, 64), HOPPER), (Integer(3, (1,)),)
    (other,) = Chosen(one.spec, one.schedule, HOPPER, integers).build().kernels
    assert other.launch.integers == integers
    assert one.build().kernels[0].launch.integers == ()


@pytest.mark.parametrize(("where", "spec", "words"), [
    ("gpu", dense(64, 64, 64, "f32"), "float32 without ALLOW_TF32"),
    ("gpu", FilterSpec(1, (1 << 30) + 1, Number.top_k),
     "counted_threshold: sums of weights, whose order counts; "
     "threshold: 1073741825 logits of a row, at most 1073741824"),
    ("gpu", GroupRowsSpec(7, 2, 4), "no template for 14 slots by their 4 experts"),
    ("cpu", dense(5000, 4, 4, "f32"), "K of 4 with 4 rows or columns, at least 9 or 64")],
    ids=["f32", "logits", "groups", "short"])
def test_what_no_template_takes_is_refused_with_the_reason(where: str, spec: Any, words: str):
    with pytest.raises(Unsupported) as no: choose(spec, HOPPER if where == "gpu" else host())
    assert str(no.value) == words
